"""Autoregressive decoding of a recurrent-depth model that ends a token's recurrence once it has converged.

Source: Geiping et al., "Scaling up test-time compute with latent reasoning", section 6.1, with the criteria and
thresholds of the released code. The plain form is reference/recurrent_adaptive.py; both run the same recurrences and
write the same tokens.

In a batch a sequence that has converged keeps its state, and its rows stop counting, while the others continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pdkernels._validation import check, check_type
from pdkernels.backends import backend_of
from pdkernels.decoding.recurrent._parts import (
    Core,
    NewState,
    RunPrompts,
    Sampling,
    Schedule,
    checked_core,
    checked_model,
    checked_recurrences,
    prefill,
)
from pdkernels.generation.noise import checked_flag, checked_name, checked_number, checked_size
from pdkernels.generation.session import Session, flag_no_choice, is_end, to_device_async
from pdkernels.generation.traces import AdaptiveStep
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth
from pdkernels.ops import logit_divergence

_OP = "decoding.recurrent_adaptive"


class ExitCheck(NamedTuple):
    """The input of a custom exit criterion: the tokens that are being computed."""

    state: Tensor
    """``(batch, rows, hidden)``, the states after `recurrences` recurrences; a token has one row, a prompt one for each
    of its tokens."""
    before: Tensor
    """The states at the previous check, or the initial ones."""
    recurrences: int
    logits: Callable[[], Tensor]
    """Computes the logits of the last row of each sequence, ``(batch, vocab_size)``; this runs the coda."""
    counts: Tensor
    """``(batch,)``: the number of valid rows of each sequence; the others are padding."""


OwnCriterion = Callable[[ExitCheck], Tensor]
Criterion = Literal["latent-diff", "cosine", "entropy-diff", "kl", "minp-kl", "argmax-stability"]
THRESHOLDS: dict[Criterion, float] = {
    "latent-diff": 0.03,
    "cosine": 1e-3,
    "entropy-diff": 1e-3,
    "kl": 1e-3,
    "minp-kl": 1e-5,
    "argmax-stability": 5,
}
_LATENT = ("latent-diff", "cosine")  # the others need the coda at every check


def decode(
    session: Session,
    *,
    criterion: Criterion | OwnCriterion = "latent-diff",
    threshold: float | None = None,
    max_recurrences: int | None = None,
    min_recurrences: int = 1,
    check_every: int = 1,
    first_check: int | None = None,
    adaptive_prompt: bool = False,
    init_scale: float = 1.0,
    kept_recurrences: int = 1,
    core_noise: float = 0.0,
    core_noise_schedule: Schedule = "harmonic",
    new_state: NewState = "fresh",
    recurrences: int | None = None,
    page_size: int | None = None,
) -> None:
    """Fills `session` with one token per forward, each with as many recurrences as it needs.

    The host decides whether the core continues, so the device is read once per check that counts (with a trace: per
    check). A token needs no extra read: it comes with the first check of the next one. So the end of the last sequence
    is noticed after one more token has been started, which affects only the stats' seconds.

    Args:
        criterion: what is compared between two checks: "latent-diff" ``|z - z_last| / |z|`` of the states, "cosine" 1 -
            their cosine, "entropy-diff" the entropies of the next token's distributions, "kl" their divergence,
            "minp-kl" that of distributions without unlikely tokens; a token is done below the threshold.
            "argmax-stability" counts checks in a row that count and leave the likeliest token unchanged; done at the
            threshold. Or a function of an `ExitCheck` whose result ``(batch,)`` says which tokens are done, as bools or
            as numbers below the threshold.
        threshold: when a token is done; None: 0.03, 1e-3, 1e-3, 1e-3, 1e-5 and 5 for the criteria in this order, 0 for
            a function.
        max_recurrences: maximum recurrences of a token; None: `recurrences`. Those after the last check run unchecked.
        min_recurrences: a check counts only if the state it compares with has had this many. With 0 the first check
            counts too: it compares with the initial state, an entropy of 100 or the uniform distribution, as in the
            released code.
        check_every: number of recurrences between two checks.
        first_check: recurrences before the first check; None: `check_every`. ``first_check=n + 1`` with
            ``min_recurrences=0`` has the phase of the released code with ``min_steps=n``: its first check comes after
            one more recurrence, and counts.
        adaptive_prompt: stop the prompt by the same criterion, all its rows together: states count by their mean over
            the rows, distributions by the last row. By default it gets `recurrences`.
        recurrences: recurrences of the prompt, or their maximum if it is adaptive; None: as many as the model was
            trained for.
    """
    model = checked_model(_OP, session)
    recurrences = checked_recurrences(_OP, "recurrences", model, recurrences)
    sampling = Sampling.of(session)
    if not callable(criterion):
        checked_name(_OP, "criterion", criterion, get_args(Criterion))
    default = 0.0 if callable(criterion) else THRESHOLDS[criterion]
    limit = default if threshold is None else checked_number(_OP, "threshold", threshold)
    maximum = recurrences if max_recurrences is None else checked_size(_OP, "max_recurrences", max_recurrences)
    check_type(type(min_recurrences) is int, _OP, "min_recurrences", "be an int", type(min_recurrences).__name__)
    check(min_recurrences >= 0, _OP, "min_recurrences", "be at least 0", min_recurrences)
    checked_size(_OP, "check_every", check_every)
    first_check = check_every if first_check is None else checked_size(_OP, "first_check", first_check)
    checked_flag(_OP, "adaptive_prompt", adaptive_prompt)
    noise = core_noise, core_noise_schedule
    core = checked_core(_OP, model, max(maximum, recurrences), init_scale, kept_recurrences, *noise, new_state)
    if session.max_new_tokens == 0:
        return
    rule = Rule(criterion, limit, min_recurrences, check_every, first_check)
    run_prompts: RunPrompts | None = None
    if adaptive_prompt:
        run_prompts = partial(_run_until_converged, model, core, rule, recurrences, sampling.seeds)
    cache, token, ended, ends, _, active, before = prefill(session, recurrences, sampling, page_size, core, run_prompts)
    active_rows, host_tokens = ~ended, token[:, 0]  # what the host reads for the token
    unread: tuple[list[int], list[list[float]]] | None = None  # facts about tokens that the host has not read yet

    for step in range(session.max_new_tokens - 1):
        session.stop_(active, active_rows)
        if not any(active):
            break
        counts = None if all(active) else active_rows.to(cache.lengths.dtype)
        context = model.context(1, cache, counts)
        state, term = core.begin(model, model.prelude(token.clamp(min=0), context), context, sampling.seeds)
        if core.copied and before is not None:
            state = before
        divergence = Divergence(criterion, state)
        open_rows, still_open = active_rows, list(active)  # sequences still iterating: on the device, and on the host
        needed = [0] * session.batch
        values: list[list[float]] = [[] for _ in active]
        count, last, logits, polled = 0, 0, None, False  # `last`: recurrences at the last check
        while count < maximum and any(still_open):
            until_check = check_every if last else first_check
            run = min(until_check, maximum - count)
            # A converged row runs too, but is not stored.
            current_context = (
                context if still_open == active else context._replace(counts=open_rows.to(cache.lengths.dtype))
            )
            refined = core.run(model, state, term, current_context, sampling.seeds, count, run)
            state = refined if still_open == active else torch.where(open_rows[:, None, None], refined, state)
            compared = last >= min_recurrences  # recurrences of the state that this check is compared with
            count += run
            needed = [count if is_open else before for is_open, before in zip(still_open, needed)]
            if run < until_check:
                logits = None
                break
            last = count
            if not callable(criterion) and criterion not in _LATENT:
                seen = model.coda(state, current_context)
                told = session.plain(seen)
                # A converged row is padding of this forward: its logits are those of the check at which it converged.
                if logits is None or still_open == active:
                    logits, unfiltered = seen, told
                else:
                    logits = torch.where(open_rows[:, None, None], seen, logits)
                    unfiltered = torch.where(open_rows[:, None, None], told, unfiltered)
            if callable(criterion):
                say = partial(_last_rows, model, state, current_context, None)
                rows = torch.ones_like(cache.lengths)
                value, done = own_verdict(criterion, ExitCheck(state, divergence.state, count, say, rows), limit)
                divergence.state = state
            else:
                value = divergence.measure(state, logits, compared)
                done = value >= limit if criterion == "argmax-stability" else value < limit
            if compared:
                open_rows = open_rows & ~done
            if compared or session.trace is not None:
                # The one read of the device in a check; the first of a token also brings the previous token.
                poll = torch.stack([host_tokens.double(), open_rows.double(), value.double()], 1).tolist()
                polled = True
                if unread is not None:
                    _record(session, active, [int(row[0]) for row in poll], *unread)
                    unread = None
                for sequence, (_, is_open, number) in enumerate(poll):
                    if still_open[sequence]:
                        values[sequence].append(number if compared else math.inf)
                        still_open[sequence] = is_open != 0
        if not any(active):
            break  # started before the host knew that all were done

        if logits is None:
            logits = model.coda(state, context)
            unfiltered = session.plain(logits)
        if core.kv_recurrences > 1:
            core.fill(model, cache, 1, counts, to_device_async([needed], cache.lengths.device)[0])
        before = state
        cache.commit_(active_rows.to(cache.lengths.dtype))
        token = sampling.sample(logits, cache.lengths[:, None])
        session.note(unfiltered, token, cache.lengths[:, None], active_rows[:, None])
        host_tokens = flag_no_choice(logits, token)[:, 0]
        if ends is not None:
            active_rows = active_rows & ~is_end(token[:, 0], ends)
        session.forwards += 1
        session.recurrences += count
        unread = needed, values
        if not polled or step == session.max_new_tokens - 2:  # no check will read the token
            _record(session, active, host_tokens.tolist(), *unread)
            unread = None


def _record(
    session: Session, active: list[bool], tokens: list[int], needed: list[int], values: list[list[float]]
) -> None:
    """Records the next token of every sequence in `active`, and removes those that end with it."""
    for sequence, token in enumerate(tokens):
        if active[sequence]:
            recorded = session.tokens[sequence]
            before = recorded[-1]
            if session.trace is not None:
                cursor = len(session.prompts[sequence]) + len(recorded) - 1
                session.trace[sequence].append(AdaptiveStep(cursor, before, token, needed[sequence], values[sequence]))
            session.log_step(sequence, [before], None, accepted=1, next_token=token)
            active[sequence] = token not in session.end_tokens and not session.stopped[sequence]


class Rule(NamedTuple):
    """The rule that ends recurrences."""

    criterion: Criterion | OwnCriterion
    limit: float
    min_recurrences: int
    check_every: int
    first_check: int


def own_verdict(criterion: OwnCriterion, seen: ExitCheck, limit: float) -> tuple[Tensor, Tensor]:
    """What a criterion of the caller's says, ``(batch,)`` each: values for the trace, and which are done."""
    measured = criterion(seen)
    check_type(isinstance(measured, Tensor), _OP, "criterion", "return a tensor", type(measured).__name__)
    batch = len(seen.counts)
    check(measured.shape == (batch,), _OP, "criterion", f"return a tensor of shape ({batch},)", tuple(measured.shape))
    return measured.float(), measured if measured.dtype == torch.bool else measured < limit


def _last_rows(model: RecurrentDepth, state: Tensor, context: Any, last: Tensor | None) -> Tensor:
    """Logits ``(batch, V)`` of the last rows; None: of the only one."""
    logits = model.coda(state, context) if last is None else model.coda(state, context, last)
    return logits[:, 0]


def _run_until_converged(
    model: RecurrentDepth,
    core: Core,
    rule: Rule,
    maximum: int,
    seeds: Tensor,
    cache: Any,
    tokens: Tensor,
    counts: Tensor | None,
    last: Tensor,
) -> tuple[Tensor, Tensor, int]:
    """`RunPrompts` by a criterion: the device is read once per check that counts."""
    criterion, limit, min_recurrences, check_every, first_check = rule
    lengths = last[:, 0] + 1
    context = model.context(tokens.shape[1], cache, counts)
    state, term = core.begin(model, model.prelude(tokens, context), context, seeds)
    real = torch.arange(tokens.shape[1], device=last.device) < lengths[:, None]
    latent = criterion in _LATENT
    divergence = Divergence(criterion, state, real)
    goes_on, still_open, needed = torch.ones_like(lengths, dtype=torch.bool), [True] * len(tokens), [0] * len(tokens)
    count, checked = 0, 0
    while count < maximum and any(still_open):
        until_check = check_every if checked else first_check
        run = min(until_check, maximum - count)
        now = context if all(still_open) else context._replace(counts=lengths * goes_on)
        refined = core.run(model, state, term, now, seeds, count, run)
        state = torch.where(goes_on[:, None, None], refined, state)
        count += run
        needed = [count if is_open else before for is_open, before in zip(still_open, needed)]
        if run < until_check:
            break
        compared, checked = checked >= min_recurrences, count
        say = partial(_last_rows, model, state, now, last)
        if callable(criterion):
            _, done = own_verdict(criterion, ExitCheck(state, divergence.state, count, say, lengths), limit)
            divergence.state = state
        else:
            value = divergence.measure(state, None if latent else say()[:, None], compared)
            done = value >= limit if criterion == "argmax-stability" else value < limit
        if compared:
            goes_on = goes_on & ~done
            still_open = goes_on.tolist()
    if core.kv_recurrences > 1:
        core.fill(model, cache, tokens.shape[1], counts, to_device_async([needed], last.device)[0])
    return model.coda(state, context, last), state, count


class Divergence:
    """The quantity that a criterion compares between the checks of one token, or of the rows of a prompt that are
    `real` ``(batch, rows)``."""

    def __init__(self, criterion: Criterion | OwnCriterion, state: torch.Tensor, real: Tensor | None = None) -> None:
        self.criterion, self.real = criterion, real
        self.state = state.clone()
        self.logits: torch.Tensor | None = None
        first = 100.0 if criterion == "entropy-diff" else -1.0
        self.before = torch.full((len(state),), first, dtype=torch.float32, device=state.device)
        self.unchanged_checks = torch.zeros(len(state), dtype=torch.int64, device=state.device)

    def measure(self, state: torch.Tensor, logits: torch.Tensor | None, compared: bool) -> torch.Tensor:
        """``(batch,)``: how far `state` ``(batch, rows, E)`` or `logits` ``(batch, 1, V)`` moved since the last call;
        or the checks without a new argmax, among those that are `compared`.
        """
        if logits is None:
            now, then = _wide(state), _wide(self.state)
            self.state = state
            if self.criterion == "cosine":
                moved: Tensor = 1 - (now * then).sum(-1) / now.norm(dim=-1) / then.norm(dim=-1)
            else:
                distance = (now - then).norm(dim=-1)
                moved = torch.where(distance == 0, 0.0, distance / now.norm(dim=-1))
            if self.real is None:
                return moved[:, 0]
            mean: Tensor = moved.masked_fill(~self.real, 0).sum(-1) / self.real.sum(-1)
            return mean
        divergence = logit_divergence(logits[:, 0], self.logits, backend=backend_of(logits.dtype))
        self.logits = logits[:, 0]
        if self.criterion == "kl":
            return divergence.kl
        if self.criterion == "minp-kl":
            return divergence.minp_kl
        if self.criterion == "entropy-diff":
            before, self.before = self.before, divergence.entropy
            return (divergence.entropy - before).abs()
        before, self.before = self.before, divergence.argmax
        self.unchanged_checks = torch.where(divergence.argmax == before, self.unchanged_checks + int(compared), 0)
        return self.unchanged_checks


def _wide(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))
