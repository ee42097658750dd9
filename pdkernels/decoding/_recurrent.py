"""What the decoders of recurrent-depth models share: their options, filtered draws, the prompt's forward.

Initial states depend on positions (`pdkernels.recurrence_inject`), and so do the random numbers of a draw. One seed per sequence
keys both, so all methods start a position from the same state and draw its token with the same noise, in whichever step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pdkernels._validation import check_type
from pdkernels.decoding._sampling import OWN, Seed, checked_number, checked_size, draw
from pdkernels.decoding._sampling import checked_sampling as checked_seeds
from pdkernels.decoding._session import Session, is_end, marked
from pdkernels.models.recurrent_depth import RecurrentDepth


class Sampling(NamedTuple):
    """How a token is drawn from its row of logits."""

    temperature: float
    top_p: float | None
    min_p: float | None
    top_k: int | None
    seeds: torch.Tensor  # (batch,) int64, on the device of the model

    def draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token for each row of `logits` ``(batch, R, V)``, for `positions` ``(batch, R)``: int64."""
        if self.temperature > 0:
            logits = filtered(logits, self.temperature, self.top_p, self.min_p, self.top_k)
        return draw(logits, positions, self.temperature, self.seeds, OWN)


def filtered(
    logits: torch.Tensor, temperature: float, top_p: float | None, min_p: float | None, top_k: int | None = None
) -> torch.Tensor:
    """`logits` ``(..., V)`` with -inf for filtered tokens, at a temperature above 0.

    As the published model draws: of ``softmax(logits / temperature)`` top-k drops what is below the `top_k`-th largest. From
    the rest, in descending order and ties by id, top-p drops every token whose cumulative mass, its own included, exceeds
    `top_p`, except the first (the usual rule, that of `token_statistics`, also keeps the token that crosses the threshold, and
    its equals). Then min-p drops what is below `min_p` times the largest.

    >>> distribution = torch.tensor([0.5, 0.3, 0.2]).log()
    >>> filtered(distribution, 1.0, 0.75, None).isfinite().tolist(), filtered(distribution, 1.0, None, 0.5).isfinite().tolist()
    ([True, False, False], [True, True, False])
    """
    if top_p is None and min_p is None and top_k is None:
        return logits
    scores = logits.double()
    distribution = torch.softmax(scores / temperature, -1)
    if top_k is not None:
        distribution = distribution.masked_fill(
            scores < scores.topk(min(top_k, scores.shape[-1]), -1).values[..., -1:], 0
        )
    if top_p is not None and top_p < 1:
        ordered, ids = distribution.sort(dim=-1, descending=True, stable=True)
        dropped = ordered.cumsum(-1) > top_p
        dropped[..., 0] = False
        distribution = distribution.masked_fill(torch.zeros_like(dropped).scatter(-1, ids, dropped), 0)
    if min_p is not None:
        distribution = distribution.masked_fill(distribution < min_p * distribution.amax(-1, keepdim=True), 0)
    return logits.masked_fill(distribution == 0, -torch.inf)


def checked_sampling(
    op: str,
    session: Session,
    temperature: float,
    top_p: float | None,
    min_p: float | None,
    top_k: int | None,
    seed: Seed,
) -> Sampling:
    seeds = checked_seeds(op, temperature, seed, session.batch)
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None:
            checked_number(op, name, value, 1.0)
    if top_k is not None:
        checked_size(op, "top_k", top_k)
    return Sampling(temperature, top_p, min_p, top_k, seeds.to(session.model.device))


def checked_model(op: str, session: Session) -> RecurrentDepth:
    """The model of `session`, with counting of recurrences switched on."""
    model: RecurrentDepth = session.model
    check_type(
        hasattr(model.config, "mean_recurrence"),
        op,
        "model",
        "be a recurrent-depth model",
        type(model).__name__,
        "Its config has `mean_recurrence`: see docs/own_models.md.",
    )
    session.counts_recurrences = True
    return model


def checked_recurrences(op: str, name: str, model: RecurrentDepth, given: int | None) -> int:
    """`given`, or the recurrences that the model was trained for."""
    return model.config.mean_recurrence if given is None else checked_size(op, name, given)


class Prefill(NamedTuple):
    """The initial state of a decoder's steps."""

    cache: Any  # holds the prompts
    tokens: torch.Tensor  # (batch, 1) int64: the first new tokens, already on record
    ended: torch.Tensor  # (batch,) bool: the first token ends its sequence
    ends: torch.Tensor | None  # int64 ids that end a sequence
    first: list[int]  # `tokens` on the host
    active: list[bool]  # which sequences still need tokens


def prefill(session: Session, recurrences: int, sampling: Sampling, page_size: int | None) -> Prefill:
    """Runs the prompts through the model and records the token after each; at least one token must be requested."""
    cache = session.new_cache(page_size)
    device = cache.lengths.device
    ends = session.ends_on(device)  # before the forward, for which a copy to the device would wait
    prompts, lengths = session.packed_prompts(session.longest, device)
    last, counts = (lengths - 1)[:, None], session.ragged(lengths)
    logits = session.model(prompts, cache=cache, counts=counts, rows=last, recurrences=recurrences, seed=sampling.seeds)
    tokens = sampling.draw(logits, lengths[:, None])
    session.forwards, session.recurrences = 1, recurrences
    cache.commit_(lengths)

    ended = torch.zeros_like(lengths, dtype=torch.bool) if ends is None else is_end(tokens[:, 0], ends)
    first = marked(logits, tokens)[:, 0].tolist()
    for sequence, token in enumerate(first):
        session.record_first(sequence, token)
    active = [token not in session.end_tokens and session.max_new_tokens > 1 for token in first]
    return Prefill(cache, tokens, ended, ends, first, active)
