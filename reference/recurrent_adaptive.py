"""Autoregressive decoding of a recurrent-depth model that stops a token's recurrence once it has converged.

Source: Geiping et al., "Scaling up test-time compute with latent reasoning: a recurrent depth approach", section 6.1, with the
criteria and thresholds of the released code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .recurrent_diffusion import moved
from .recurrent_sampling import Init, RecurrentModel, choose, forward_with_states, refine, rows

THRESHOLDS = {
    "latent-diff": 0.03,
    "cosine": 1e-3,
    "entropy-diff": 1e-3,
    "kl": 1e-3,
    "minp-kl": 1e-5,
    "argmax-stability": 5,
}
LATENT = ("latent-diff", "cosine")  # the others need the coda at every check


# (states (T, E), those of the check before, a function that gives logits (T, V), recurrences so far) -> done, or a value
OwnCriterion = Callable[[Tensor, Tensor, Callable[[], Tensor], int], bool | float]


class AdaptiveStep(NamedTuple):
    """One token."""

    cursor: int
    token: int  # the input
    prediction: int
    recurrences: int
    values: list[float]  # of the criterion, one per check; inf for a check too early to count


class AdaptiveResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int  # one per token
    recurrences: int  # times the core ran; the prompt's count
    trace: list[AdaptiveStep]


def minp_distribution(logits: Tensor, min_p: float = 0.1) -> Tensor:
    """fp64 ``(V,)``: the softmax with everything below `min_p` times the largest set to 1 / V, renormalised.

    >>> minp_distribution(torch.tensor([0.5, 0.49, 0.01]).log()).mul(1.3233333).round(decimals=3).tolist()
    [0.5, 0.49, 0.333]
    """
    distribution = torch.softmax(logits.double(), -1)
    distribution = torch.where(distribution < min_p * distribution.max(), 1 / len(distribution), distribution)
    return distribution / distribution.sum()


def observed(criterion: str, state: Tensor, logits: Tensor | None) -> Tensor:
    """The quantity that a criterion compares between two checks, from states ``(T, E)`` and the logits ``(V,)`` of the last one."""
    if criterion in LATENT:
        return state
    assert logits is not None
    distribution = torch.softmax(logits.double(), -1)
    if criterion == "entropy-diff":
        return -(distribution * torch.log(distribution + 1e-10)).sum()
    if criterion == "kl":
        return torch.log_softmax(logits.double(), -1)
    if criterion == "minp-kl":
        return minp_distribution(logits).log()
    return logits.argmax()


def at_first(criterion: str, state: Tensor, vocab_size: int) -> Tensor:
    """The value that the first check is compared with: the initial state, entropy 100, the uniform distribution, or no token."""
    if criterion in LATENT:
        return state
    if criterion == "entropy-diff":
        return torch.tensor(100.0, dtype=torch.float64)
    if criterion == "argmax-stability":
        return torch.tensor(-1)
    return torch.full((vocab_size,), -math.log(vocab_size), dtype=torch.float64)


def change(criterion: str, now: Tensor, before: Tensor) -> float:
    """The change of the observed quantity, averaged over states; for argmax-stability 0.0 if it is unchanged and 1.0 if not.

    >>> change("cosine", torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
    1.0
    """
    if criterion in LATENT:
        now, before = torch.atleast_2d(now), torch.atleast_2d(before)
    if criterion == "latent-diff":
        return sum(moved(new - old, new) for new, old in zip(now, before)) / len(now)
    if criterion == "cosine":
        return 1 - ((now * before).sum(-1) / now.norm(dim=-1) / before.norm(dim=-1)).mean().item()
    if criterion == "entropy-diff":
        return (now - before).abs().item()
    if criterion == "argmax-stability":
        return float(now != before)
    return (before.exp() * (before - now)).sum().item()  # KL of the previous distribution from the current one


def recurrent_adaptive(
    model: RecurrentModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    init: Init,
    recurrences: int = 32,
    criterion: str | OwnCriterion = "latent-diff",
    threshold: float | None = None,
    max_recurrences: int | None = None,
    min_recurrences: int = 1,
    check_every: int = 1,
    first_check: int | None = None,
    new_state: str = "fresh",
    adaptive_prompt: bool = False,
    temperature: float = 0.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> AdaptiveResult:
    """Decodes one token per forward, with as many recurrences as the token needs.

    Every `check_every` recurrences, from the first check on, the criterion compares the state, or the distribution of the next
    token, with that of the previous check; the token is done if the value is below the threshold. The prediction is that of the
    last state.

    Args:
        model, prompt, max_new_tokens, init, temperature, top_p, min_p, top_k, end_tokens, seed: as in
            :func:`~pdkernels.reference.recurrent_static.recurrent_static`.
        recurrences: of the prompt.
        criterion: one of `THRESHOLDS`. "latent-diff": ``|z - z_last| / |z|``. "cosine": 1 - the cosine between the two.
            "entropy-diff": of the distribution, ``-sum p log(p + 1e-10)``, in absolute value. "kl": ``sum p_last (log p_last - log p)``.
            "minp-kl": the same of distributions as in :func:`minp_distribution`. "argmax-stability": checks in a row that count
            and have not changed the argmax; done if they are at least `threshold`. Or a function (`OwnCriterion`), whose result says
            that the token is done, or is a value as above.
        threshold: None: that of `THRESHOLDS`.
        max_recurrences: of a token; None: `recurrences`. Those left after the last check run without one.
        min_recurrences: a check counts only if what it is compared with has had this many. With 0 the first check counts too; it
            is compared with the initial state, entropy 100 or the uniform distribution, as in the released code.
        check_every: recurrences between two checks.
        first_check: recurrences before the first one; None: `check_every`. The released code with `min_steps` corresponds to
            ``min_steps + 1``, with all checks counting.
        new_state: as in :func:`~pdkernels.reference.recurrent_static.recurrent_static`.
        adaptive_prompt: the prompt stops by the same criterion: all its rows together, of states the mean over them, of
            distributions that of the last row. By default it has its `recurrences`.

    >>> from pdkernels.reference.recurrent_depth import RecurrentDepthReference, random_weights
    >>> model = RecurrentDepthReference(random_weights(state_scale=0.1))
    >>> zeros = lambda step, positions: torch.zeros(len(positions), 8, dtype=torch.float64)
    >>> [step.recurrences for step in recurrent_adaptive(model, [1, 2, 3], 4, init=zeros, criterion="argmax-stability").trace]
    [6, 6, 6]
    """
    if not callable(criterion) and criterion not in THRESHOLDS:
        raise ValueError(
            f"pdkernels.recurrent_adaptive: criterion must be one of {tuple(THRESHOLDS)}, got {criterion!r}."
        )
    if check_every < 1:
        raise ValueError(f"pdkernels.recurrent_adaptive: check_every must be at least 1, got {check_every}.")
    first = check_every if first_check is None else first_check
    if first < 1:
        raise ValueError(f"pdkernels.recurrent_adaptive: first_check must be at least 1, got {first}.")
    if max_new_tokens == 0:
        return AdaptiveResult([], 0, 0, [])
    usual = None if callable(criterion) else THRESHOLDS[criterion]
    limit = cast(
        float, usual if threshold is None else threshold
    )  # None only beside a criterion that answers with bools
    maximum = recurrences if max_recurrences is None else max_recurrences

    past = model.new_past()

    def iterate(inputs: Sequence[int], state: Tensor | None, maximum: int) -> tuple[Tensor, Tensor, int, list[float]]:
        """Logits and states of `inputs` after the frozen rows, their recurrences, the values of the checks."""
        start = past.length
        e = model.prelude(torch.tensor(list(inputs)), start, past)
        z = begun = init(0, rows(start, len(inputs))) if state is None else state
        before = z if callable(criterion) else None
        count, last, unchanged_checks, done = 0, 0, 0, False
        values: list[float] = []
        while count < maximum and not done:
            until_check = check_every if last else first
            run = min(until_check, maximum - count)
            z = refine(model, z, e, start, past, run)
            count += run
            if run < until_check:
                break
            counts, last = last >= min_recurrences, count
            if callable(criterion):
                assert before is not None
                value = criterion(z, before, partial(model.coda, z, start, past), count)
                before = z
                done = counts and (value if isinstance(value, bool) else value < limit)
                values.append(float(value) if counts else math.inf)
                continue
            seen = None if criterion in LATENT else model.coda(z, start, past)[-1]
            now = observed(criterion, z, seen)
            if before is None:
                before = at_first(criterion, begun, 0 if seen is None else len(seen))
            value = change(criterion, now, before)
            before = now
            if criterion == "argmax-stability":
                unchanged_checks = unchanged_checks + 1 if counts and value == 0 else 0
                done = counts and unchanged_checks >= limit
                value = float(unchanged_checks)
            else:
                done = counts and value < limit
            values.append(value if counts else math.inf)
        return model.coda(z, start, past), z, count, values

    if adaptive_prompt:
        logits, z, passes, _ = iterate(prompt, None, recurrences)
    else:
        logits, z = forward_with_states(model, prompt, past, recurrences, init)
        passes = recurrences
    past.freeze(len(prompt))
    tokens = choose(logits[-1:], [len(prompt)], temperature, top_p, min_p, seed, top_k)
    trace: list[AdaptiveStep] = []
    while tokens[-1] not in end_tokens and len(tokens) < max_new_tokens:
        cursor = past.length
        logits, z, count, values = iterate(tokens[-1:], z[-1:] if new_state == "copied" else None, maximum)
        past.freeze(1)
        predictions = choose(logits, [cursor + 1], temperature, top_p, min_p, seed, top_k)
        trace.append(AdaptiveStep(cursor, tokens[-1], predictions[0], count, values))
        tokens = tokens + predictions
    passes += sum(step.recurrences for step in trace)
    return AdaptiveResult(tokens, 1 + len(trace), passes, trace)
