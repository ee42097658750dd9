"""The diffusion-forcing sampler of recurrent-depth models: many positions at once, each a few recurrences behind the previous one.

Source: "Efficient parallel samplers for recurrent-depth models and their connection to diffusion language models", Algorithms 1
and 2, equations 1 to 3. Where the paper and its code disagree, or are wrong, this is what the decoders do; what the
released code does is in docs/papers/released.md.

The *wave* is a run of positions from `cursor` on, everything before is frozen. Row 0's token is already in the text, the token
of row i is the prediction of row i - 1 in the last step. A step gives every row `inner_recurrence` more recurrences, predicts,
and freezes some rows from the front: their predictions become text, their K and V stay, and the cursor moves past them. So a
wave of one row is autoregressive decoding with adaptive exits, and with all recurrences in one step it is static decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .jacobi import fillers
from .philox import random_words
from .recurrent_sampling import Init, RecurrentModel, RecurrentResult, RecurrentStep, choose, forward, refine, rows

EXITS = ("latent-diff", "fixed", "token-stability", "latent-acceleration")


def noise_level(noise: float, count: int, schedule: str, horizon: int) -> float:
    """beta of equation 2 for a position that has gone through `count` recurrences.

    >>> [noise_level(0.5, 8, schedule, 32) for schedule in ("constant", "linear", "harmonic")]
    [0.5, 0.375, 0.05555555555555555]
    """
    return {
        "constant": noise,
        "linear": noise * max(0.0, 1 - count / horizon),
        "harmonic": noise / (1 + count),
        "root": noise / math.sqrt(1 + count),
    }[schedule]


def moved(difference: Tensor, state: Tensor) -> float:
    """Norm of `difference` over that of `state`, both ``(E,)``; 0 / 0 counts as 0 (equation 3)."""
    over, under = difference.norm().item(), state.norm().item()
    return over / under if under > 0 else (0.0 if over == 0 else math.inf)


def leading(ready: Sequence[bool], rule: str) -> int:
    """Rows to freeze: the leading ready ones ("prefix", equation 3), or all up to the last one ("last", Algorithm 2, line 16).

    >>> [leading([True, False, True], rule) for rule in ("prefix", "last")]
    [1, 3]
    """
    if rule == "prefix":
        return ready.index(False) if False in ready else len(ready)
    return max((i + 1 for i, row in enumerate(ready) if row), default=0)


def recurrent_diffusion(
    model: RecurrentModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    init: Init,
    recurrences: int = 32,
    inner_recurrence: int = 4,
    threshold: float = 0.03,
    noise: float = 0.0,
    schedule: str = "linear",
    mixer: str = "linear",
    momentum: float = 0.1,
    headway: int = 1,
    max_wavefront: int = 128,
    rule: str = "prefix",
    exit: str = "latent-diff",
    new_state: str = "fresh",
    keep_changed: bool = True,
    max_recurrences: int | None = None,
    stability: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> RecurrentResult:
    """Refines a wave of positions, freezes converged rows, and appends new positions.

    The prompt is one forward of `recurrences`, which gives the first token; the wave then starts with that token's position. One
    sampler step, for rows at positions p (a row is *new* in its first step):

    1. ``e = prelude(tokens)``; an old row's is ``(1 - momentum) * e + momentum * (its e of the last step)`` (equation 1).
    2. A new row's state is ``init(0, p)``, an old one's is that of its last step. Both are mixed with ``init(t, p)`` in step t,
       counted from 1 (line 7 of both algorithms, equation 2).
    3. `inner_recurrence` recurrences and the coda over the wave, then one token per row.
    4. Rows are *ready* by `exit`; the leading ready ones freeze, by `rule` and `keep_changed`, cut after the first end token and
       after `max_new_tokens`.
    5. The wave grows by `headway` rows at its end, as far as `max_wavefront` and the tokens left allow. The first takes
       the last row's prediction as its token, the others guesses from the text: ``text[word(seed, step, 0, j) mod len(text)]``,
       where text is the prompt and the tokens before this step, j counts the guesses from 0.

    With rule "prefix" and fresh new states, a shorter generation is the beginning of a longer one.

    Args:
        model, prompt, max_new_tokens, init, temperature, top_p, min_p, top_k, end_tokens, seed: as in
            :func:`~pdkernels.reference.recurrent_static.recurrent_static`.
        recurrences: of the prompt; of a position before it freezes with exit "fixed"; and the horizon of the linear schedule.
        inner_recurrence: recurrences of a step.
        threshold: a row is ready if the relative change of its state since the last step is below this.
        noise: beta of equation 2 before its `schedule`, see :func:`noise_level`; 0 leaves states unchanged.
        mixer: "linear" takes ``(1 - beta) z + beta init``, "sqrt" the square roots of both factors.
        momentum: eta of equation 1.
        headway: positions that a step appends.
        max_wavefront: the largest number of positions in the wave, at least 1.
        rule: "prefix" or "last", see :func:`leading`.
        exit: what makes a row ready. "latent-diff": its distance ``|z - z_last| / |z|``, both aligned by position, z the states
            at the ends of this step and of the last. "latent-acceleration": ``|z - 2 z_last + z_before| / |z|``, which needs two
            steps before. "token-stability": its prediction has been the same in the last `stability` steps and the one before
            them. "fixed": it has had `recurrences` (Algorithm 1).
        new_state: "fresh", or "copied": that of the last row that stays in the wave, if any.
        keep_changed: keep rows whose token changed in this step: their K and V belong to the old token.
        max_recurrences: a row is ready after this many recurrences, regardless of `exit`; 0: no limit, and a model that does not
            converge never ends. None: ``4 * recurrences``.
        stability: steps for "token-stability"; None: ``recurrences // inner_recurrence + 1``.

    >>> from pdkernels.reference.recurrent_depth import RecurrentDepthReference, random_weights
    >>> model = RecurrentDepthReference(random_weights(state_scale=0.1))
    >>> zeros = lambda step, positions: torch.zeros(len(positions), 8, dtype=torch.float64)
    >>> result = recurrent_diffusion(model, [1, 2, 3], 5, init=zeros)
    >>> len(result.tokens), result.forwards, [step.frozen for step in result.trace]
    (5, 6, [0, 1, 1, 1, 1])
    """
    check_options(
        exit=exit,
        rule=rule,
        mixer=mixer,
        schedule=schedule,
        new_state=new_state,
        headway=headway,
        inner_recurrence=inner_recurrence,
        max_wavefront=max_wavefront,
    )
    if max_new_tokens == 0:
        return RecurrentResult([], 0, 0, [])
    maximum = 4 * recurrences if max_recurrences is None else max_recurrences
    if exit == "fixed":
        maximum = min(recurrences, maximum) if maximum > 0 else recurrences
    stable_steps = recurrences // inner_recurrence + 1 if stability is None else stability
    compared = {"latent-diff": 1, "latent-acceleration": 2}.get(exit)  # steps before this one that a distance needs

    past = model.new_past()
    logits = forward(model, prompt, past, recurrences, init)
    past.freeze(len(prompt))
    tokens = choose(logits[-1:], [len(prompt)], temperature, top_p, min_p, seed, top_k)

    # State is keyed by position; nothing is moved when rows freeze.
    wave = [len(prompt)]
    inputs = {wave[0]: tokens[0]}
    guess: dict[int, int] = {}  # the last prediction of the token at a position
    states: dict[int, list[Tensor]] = {}  # at the ends of all its steps
    blended: dict[int, Tensor] = {}
    stable: dict[int, int] = {}
    trace: list[RecurrentStep] = []
    while tokens[-1] not in end_tokens and len(tokens) < max_new_tokens:
        step, cursor, text = len(trace), wave[0], [*prompt, *tokens]
        counts = [inner_recurrence * len(states.get(p, [])) for p in wave]

        e = model.prelude(torch.tensor([inputs[p] for p in wave]), cursor, past)
        z = init(0, rows(cursor, len(wave))).clone()
        drawn = init(step + 1, rows(cursor, len(wave))) if noise else z  # the algorithms count steps from 1
        kept = [p for p in wave if p in states]
        for i, p in enumerate(wave):
            if p in states:
                z[i] = states[p][-1]
                e[i] = (1 - momentum) * e[i] + momentum * blended[p]
            elif new_state == "copied" and kept:
                z[i] = states[kept[-1]][-1]
            if noise:
                beta = noise_level(noise, counts[i], schedule, recurrences)
                keep, mix = (math.sqrt(max(1 - beta, 0.0)), math.sqrt(beta)) if mixer == "sqrt" else (1 - beta, beta)
                z[i] = keep * z[i] + mix * drawn[i]
        z = refine(model, z, e, cursor, past, inner_recurrence)
        predictions = choose(model.coda(z, cursor, past), [p + 1 for p in wave], temperature, top_p, min_p, seed, top_k)

        distance = []
        for i, p in enumerate(wave):
            before = states.get(p, [])
            if compared is None or len(before) < compared:
                distance.append(math.inf)
            elif compared == 1:
                distance.append(moved(z[i] - before[-1], z[i]))
            else:
                distance.append(moved(z[i] - 2 * before[-1] + before[-2], z[i]))
            stable[p] = stable.get(p, 0) + 1 if before and guess[p + 1] == predictions[i] else 0
        ready = [
            distance[i] < threshold
            or (maximum > 0 and counts[i] + inner_recurrence >= maximum)
            or (exit == "token-stability" and stable[p] >= stable_steps)
            for i, p in enumerate(wave)
        ]
        frozen = leading(ready, rule)
        if keep_changed:
            changed = [i for i in range(1, len(wave)) if predictions[i - 1] != inputs[wave[i]]]
            frozen = min([frozen, *changed])
        frozen = min(frozen, max_new_tokens - len(tokens))
        ends = [i for i in range(frozen) if predictions[i] in end_tokens]
        frozen = ends[0] + 1 if ends else frozen

        trace.append(RecurrentStep(cursor, [inputs[p] for p in wave], predictions, distance, frozen))
        past.freeze(frozen)
        tokens = tokens + predictions[:frozen]
        for i, p in enumerate(wave):
            states.setdefault(p, []).append(z[i])
            blended[p] = e[i]
            guess[p + 1] = inputs[p + 1] = predictions[i]

        width = min(len(wave) - frozen + headway, max_wavefront, max_new_tokens - len(tokens))
        words = random_words(seed, torch.tensor(step), torch.tensor(0), torch.arange(headway - 1)).tolist()
        for j, token in enumerate(fillers(words, text)):
            inputs[wave[-1] + 2 + j] = token
        wave = list(range(cursor + frozen, cursor + frozen + width))
    passes = recurrences + inner_recurrence * len(trace)
    return RecurrentResult(tokens, 1 + len(trace), passes, trace)


def check_options(
    *,
    exit: str,
    rule: str,
    mixer: str,
    schedule: str,
    new_state: str,
    headway: int,
    inner_recurrence: int,
    max_wavefront: int,
) -> None:
    """Raises ValueError for an unknown name, or a size below 1."""
    known = {
        "exit": (exit, EXITS),
        "rule": (rule, ("prefix", "last")),
        "mixer": (mixer, ("linear", "sqrt")),
        "schedule": (schedule, ("constant", "linear", "harmonic", "root")),
        "new_state": (new_state, ("fresh", "copied")),
    }
    for name, (value, values) in known.items():
        if value not in values:
            raise ValueError(f"pdkernels.recurrent_diffusion: {name} must be one of {values}, got {value!r}.")
    sizes = {"headway": headway, "inner_recurrence": inner_recurrence, "max_wavefront": max_wavefront}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"pdkernels.recurrent_diffusion: {name} must be at least 1, got {size}.")
