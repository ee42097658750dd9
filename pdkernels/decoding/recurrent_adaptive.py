"""Autoregressive decoding of a recurrent-depth model that ends a token's recurrence once it has settled.

Source: Geiping et al., "Scaling up test-time compute with latent reasoning", section 6.1, with the criteria and thresholds of the
released code. The plain form is reference/recurrent_adaptive.py; both run the same recurrences and write the same tokens.

In a batch a sequence that has settled keeps its state, and its rows stop counting, while the others continue.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from pdkernels._validation import check, check_type
from pdkernels.backends import backend_of
from pdkernels.decoding._recurrent import checked_model, checked_recurrences, checked_sampling, prefill
from pdkernels.decoding._sampling import Seed, checked_name, checked_number, checked_size
from pdkernels.decoding._session import Session, is_end, marked
from pdkernels.decoding.traces import AdaptiveStep
from pdkernels.ops import logit_divergence

_OP = "decoding.recurrent_adaptive"

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
    criterion: Criterion = "latent-diff",
    threshold: float | None = None,
    max_recurrences: int | None = None,
    min_recurrences: int = 1,
    check_every: int = 1,
    first_check: int | None = None,
    recurrences: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    seed: Seed = 0,
    page_size: int | None = None,
) -> None:
    """Fills `session` with one token per forward, each with as many recurrences as it needs.

    The host decides whether the core continues, so the device is read once per check that counts (with a trace: per check). A token
    needs no extra read: it comes with the first check of the next one. So the end of the last sequence is noticed after one more
    token has been started, which affects only the stats' seconds.

    Args:
        criterion: what is compared with the previous check: "latent-diff" ``|z - z_last| / |z|`` of the states, "cosine" 1 - their
            cosine, "entropy-diff" the entropies of the next token's distributions, "kl" their divergence, "minp-kl" that of
            distributions without unlikely tokens; a token is done below the threshold. "argmax-stability" counts checks in a
            row that count and leave the likeliest token unchanged; done at the threshold.
        threshold: None: 0.03, 1e-3, 1e-3, 1e-3, 1e-5 and 5, in this order.
        max_recurrences: of a token; None: `recurrences`. Those left after the last check run without one.
        min_recurrences: a check counts only if what it is compared with has had this many. With 0 the first one counts too, and is
            compared with the initial state, an entropy of 100 or the uniform distribution, as in the released code.
        check_every: recurrences between two checks.
        first_check: recurrences before the first check; None: `check_every`. ``first_check=n + 1`` with ``min_recurrences=0`` is
            the phase of the released code with ``min_steps=n``: its first check comes after one more recurrence, and counts.
        recurrences: of the prompt, which is never adaptive; None: those the model was trained for.
    """
    model = checked_model(_OP, session)
    recurrences = checked_recurrences(_OP, "recurrences", model, recurrences)
    sampling = checked_sampling(_OP, session, temperature, top_p, min_p, top_k, seed)
    checked_name(_OP, "criterion", criterion, get_args(Criterion))
    limit = THRESHOLDS[criterion] if threshold is None else checked_number(_OP, "threshold", threshold)
    most = recurrences if max_recurrences is None else checked_size(_OP, "max_recurrences", max_recurrences)
    check_type(type(min_recurrences) is int, _OP, "min_recurrences", "be an int", type(min_recurrences).__name__)
    check(min_recurrences >= 0, _OP, "min_recurrences", "be at least 0", min_recurrences)
    checked_size(_OP, "check_every", check_every)
    first_check = check_every if first_check is None else checked_size(_OP, "first_check", first_check)
    if session.max_new_tokens == 0:
        return
    cache, token, ended, ends, _, active = prefill(session, recurrences, sampling, page_size)
    active_rows, written = ~ended, token[:, 0]  # what the host reads for the token
    unread: tuple[list[int], list[list[float]]] | None = None  # facts about tokens that the host has not read yet

    for step in range(session.max_new_tokens - 1):
        if not any(active):
            break
        counts = None if all(active) else active_rows.to(cache.lengths.dtype)
        context = model.context(1, cache, counts)
        state, term = model.begin(model.prelude(token, context), context, sampling.seeds)
        divergence = Divergence(criterion, state)
        open_rows, still_open = active_rows, list(active)  # sequences still iterating: on the device, and on the host
        needed = [0] * session.batch
        values: list[list[float]] = [[] for _ in active]
        count, last, logits, polled = 0, 0, None, False  # `last`: recurrences at the last check
        while count < most and any(still_open):
            wanted = check_every if last else first_check
            run = min(wanted, most - count)
            # A settled row runs too, but is not stored.
            current_context = (
                context if still_open == active else context._replace(counts=open_rows.to(cache.lengths.dtype))
            )
            refined = state
            for _ in range(run):
                refined = model.core(refined, term, current_context)
            state = refined if still_open == active else torch.where(open_rows[:, None, None], refined, state)
            counted = last >= min_recurrences  # what this check is compared with has had that many
            count += run
            needed = [count if is_open else before for is_open, before in zip(still_open, needed)]
            if run < wanted:
                logits = None
                break
            last = count
            if criterion not in _LATENT:
                seen = model.coda(state, current_context)
                # A settled row is padding of this forward: its logits are those of the check that settled it.
                logits = (
                    seen
                    if logits is None or still_open == active
                    else torch.where(open_rows[:, None, None], seen, logits)
                )
            value = divergence.measure(state, logits, counted)
            done = value >= limit if criterion == "argmax-stability" else value < limit
            if counted:
                open_rows = open_rows & ~done
            if counted or session.trace is not None:
                # The one read of the device in a check; the first of a token also brings the previous token.
                poll = torch.stack([written.double(), open_rows.double(), value.double()], 1).tolist()
                polled = True
                if unread is not None:
                    _record(session, active, [int(row[0]) for row in poll], *unread)
                    unread = None
                for sequence, (_, is_open, number) in enumerate(poll):
                    if still_open[sequence]:
                        values[sequence].append(number if counted else math.inf)
                        still_open[sequence] = is_open != 0
        if not any(active):
            break  # started before the host knew that all were done

        if logits is None:
            logits = model.coda(state, context)
        cache.commit_(active_rows.to(cache.lengths.dtype))
        token = sampling.draw(logits, cache.lengths[:, None])
        written = marked(logits, token)[:, 0]
        if ends is not None:
            active_rows = active_rows & ~is_end(token[:, 0], ends)
        session.forwards += 1
        session.recurrences += count
        unread = needed, values
        if not polled or step == session.max_new_tokens - 2:  # no check will read the token
            _record(session, active, written.tolist(), *unread)
            unread = None


def _record(
    session: Session, active: list[bool], tokens: list[int], needed: list[int], values: list[list[float]]
) -> None:
    """Records the next token of every sequence in `active`, and removes those that end with it."""
    for sequence, token in enumerate(tokens):
        if active[sequence]:
            known = session.tokens[sequence]
            before = known[-1]
            if session.trace is not None:
                cursor = len(session.prompts[sequence]) + len(known) - 1
                session.trace[sequence].append(AdaptiveStep(cursor, before, token, needed[sequence], values[sequence]))
            session.log_step(sequence, [before], None, accepted=1, next_token=token)
            active[sequence] = token not in session.end_tokens


class Divergence:
    """The quantity that a criterion compares between the checks of one token."""

    def __init__(self, criterion: Criterion, state: torch.Tensor) -> None:
        self.criterion = criterion
        self.state = state.clone()
        self.logits: torch.Tensor | None = None
        self.before = torch.full((len(state),), 100.0 if criterion == "entropy-diff" else -1.0, device=state.device)
        self.stable = torch.zeros(len(state), dtype=torch.int64, device=state.device)

    def measure(self, state: torch.Tensor, logits: torch.Tensor | None, counted: bool) -> torch.Tensor:
        """``(batch,)``: how far `state` ``(batch, 1, E)`` or `logits` ``(batch, 1, V)`` moved since the last call; or the checks
        without a new argmax, among those that are `counted`.
        """
        if logits is None:
            now, then = _wide(state[:, 0]), _wide(self.state[:, 0])
            self.state = state
            if self.criterion == "cosine":
                moved: torch.Tensor = 1 - (now * then).sum(-1) / now.norm(dim=-1) / then.norm(dim=-1)
                return moved
            over = (now - then).norm(dim=-1)
            return torch.where(over == 0, 0.0, over / now.norm(dim=-1))
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
        self.stable = torch.where(divergence.argmax == before, self.stable + int(counted), 0)
        return self.stable


def _wide(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))
