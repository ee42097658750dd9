"""Shared by the samplers of recurrent-depth models: states keyed by position, sampling, the prompt's forward.

Random numbers do not depend on when they are used. The initial state of position p is ``init(0, p)`` whenever a sampler starts it,
the noise that sampler step t = 1, 2, .. mixes into position p is ``init(t, p)``, and the token of position p is drawn with the numbers
of p (sampling.py). So all samplers start a position from the same state, and a token's noise does not change from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .recurrence import initial_state, noise_share
from .recurrent_depth import RecurrentDepthReference, RecurrentPast
from .sampling import OWN, draw

# init(step, positions (T,) int64) -> (T, E)
Init = Callable[[int, Tensor], Tensor]


class RecurrentModel(Protocol):
    """The parts of a model without batch, as in :class:`~pdkernels.reference.recurrent_depth.RecurrentDepthReference`."""

    def new_past(self) -> RecurrentPast: ...

    def prelude(self, tokens: Tensor, start: int, past: RecurrentPast) -> Tensor: ...

    def core(self, state: Tensor, e: Tensor, start: int, past: RecurrentPast) -> Tensor: ...

    def coda(self, state: Tensor, start: int, past: RecurrentPast) -> Tensor: ...


class RecurrentStep(NamedTuple):
    """One sampler step: rows i at positions ``cursor + i``."""

    cursor: int  # everything before it is frozen
    tokens: list[int]  # inputs of the rows; tokens[0] is already in the text
    predictions: list[int]  # predictions[i] is the token at position cursor + i + 1
    distance: list[
        float
    ]  # how far each state moved since the last step, relative; inf if there is nothing to compare with
    frozen: int  # predictions[:frozen] became text, and the cursor moves by that many


class RecurrentResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int  # sampler steps, and the prompt's forward
    recurrences: int  # times the core ran, regardless of its rows; the prompt's count
    trace: list[RecurrentStep]  # one per sampler step; not counting the prompt's forward


def rows(start: int, count: int) -> Tensor:
    """int64 positions ``start .. start + count - 1``."""
    return torch.arange(start, start + count)


def position_states(size: int, *, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Init:
    """The states that all samplers draw: truncated normal, keyed by `seed`, step and position (recurrence.py).

    Args:
        size: E.
        scale: factor of the standard deviation sqrt(2 / 5).

    >>> position_states(3)(0, rows(5, 2)).shape
    torch.Size([2, 3])
    """
    return lambda step, positions: initial_state(torch.tensor(step), positions, size, seed, 0.4**0.5 * scale).to(dtype)


def filtered(
    logits: Tensor, temperature: float, top_p: float | None, min_p: float | None, top_k: int | None = None
) -> Tensor:
    """fp64 logits ``(R, V)`` with -inf for filtered tokens; the distribution is that of the rest, renormalised.

    As published: of ``softmax(logits / temperature)``, top-k drops what is below the `top_k`-th largest. From the rest, in
    descending order with ties by id, top-p drops every token whose cumulative mass, its own included, exceeds `top_p`, but
    keeps the first one (stricter than the usual rule, which keeps the token that crosses the threshold). Then min-p drops what
    is below `min_p` times the largest. Nothing is dropped at temperature 0, by None, by ``top_p = 1`` or by ``min_p = 0``.

    >>> distribution = torch.tensor([[0.5, 0.3, 0.2]]).log()
    >>> filtered(distribution, 1.0, 0.75, None).isfinite().tolist(), filtered(distribution, 1.0, None, 0.5).isfinite().tolist()
    ([[True, False, False]], [[True, True, False]])
    """
    scores = logits.double()
    if temperature == 0:
        return scores
    distribution = torch.softmax(scores / temperature, -1)
    if top_k is not None:
        distribution = distribution.masked_fill(scores < scores.topk(min(top_k, scores.shape[-1])).values[..., -1:], 0)
    if top_p is not None and top_p < 1:
        ordered, ids = distribution.sort(dim=-1, descending=True, stable=True)
        dropped = ordered.cumsum(-1) > top_p
        dropped[:, 0] = False
        distribution = distribution.masked_fill(torch.zeros_like(dropped).scatter(-1, ids, dropped), 0)
    if min_p is not None:
        distribution = distribution.masked_fill(distribution < min_p * distribution.amax(-1, keepdim=True), 0)
    return scores.masked_fill(distribution == 0, -torch.inf)


def choose(
    logits: Tensor,
    positions: Sequence[int],
    temperature: float,
    top_p: float | None,
    min_p: float | None,
    seed: int,
    top_k: int | None = None,
) -> list[int]:
    """The token at each of `positions` from its row of `logits` ``(R, V)``; the argmax at temperature 0.

    >>> choose(torch.tensor([[1.0, 3.0, 3.0]]), [7], 0.0, None, None, seed=0)
    [1]
    """
    return draw(filtered(logits, temperature, top_p, min_p, top_k), positions, temperature, seed, OWN)


def refine(
    model: RecurrentModel, state: Tensor, e: Tensor, start: int, past: RecurrentPast, recurrences: int
) -> Tensor:
    """The state after `recurrences` more recurrences."""
    for _ in range(recurrences):
        state = model.core(state, e, start, past)
    return state


def forward(
    model: RecurrentModel,
    tokens: Sequence[int],
    past: RecurrentPast,
    recurrences: int,
    init: Init,
    state: Tensor | None = None,
) -> Tensor:
    """Logits ``(T, V)`` of `tokens` after the frozen rows: prelude, `recurrences` from the initial states, coda."""
    return forward_with_states(model, tokens, past, recurrences, init, state)[0]


def forward_with_states(
    model: RecurrentModel,
    tokens: Sequence[int],
    past: RecurrentPast,
    recurrences: int,
    init: Init,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same and the last states ``(T, E)``; the first ones are `state` ``(T, E)``, or by None those of the positions."""
    start = past.length
    e = model.prelude(torch.tensor(list(tokens), dtype=torch.int64), start, past)
    first = init(0, rows(start, len(tokens))) if state is None else state
    state = refine(model, first, e, start, past, recurrences)
    return model.coda(state, start, past), state


class NoisyCore:
    """A model whose recurrences, from the second on, begin with noise in their states ("test-time noise" of the published code).

    Before recurrence t of a forward, counted from 0, a state z becomes ``renorm((1 - beta) z + beta init(t, position))``, renorm
    being the norm that ends a recurrence and `init` of deviation 1. beta is :func:`~pdkernels.reference.recurrence.noise_share` of
    t: the published "geom" is "harmonic", its "sqrt" is "root" and its "fixed" is "constant", each with `noise` for its
    ``test_time_noise * sqrt(2 / 5)``. There the first recurrence has noise too, which its state already is.

    >>> from pdkernels.reference.recurrent_depth import RecurrentDepthReference, random_weights
    >>> model = NoisyCore(RecurrentDepthReference(random_weights()), position_states(8), noise=0.5)
    >>> forward(model, [1, 2], model.new_past(), 3, position_states(8)).shape
    torch.Size([2, 11])
    """

    def __init__(
        self, model: RecurrentDepthReference, init: Init, noise: float, schedule: str = "harmonic", horizon: int = 32
    ) -> None:
        self.model, self.init, self.noise, self.schedule, self.horizon = model, init, noise, schedule, horizon
        self.new_past, self.prelude, self.coda = model.new_past, model.prelude, model.coda

    def core(self, state: Tensor, e: Tensor, start: int, past: RecurrentPast) -> Tensor:
        if (count := past.recurrence) > 0:
            beta = noise_share(torch.tensor(count), self.noise, self.schedule, self.horizon, torch.float64).to(
                state.dtype
            )
            noise = self.init(count, rows(start, len(state))).to(state.dtype)
            state = self.model.renorm((1 - beta) * state + beta * noise)
        return self.model.core(state, e, start, past)
