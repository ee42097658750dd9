"""Sampling of tokens, batched and on the device; the plain form is reference/sampling.py.

A sample's random numbers are keyed by the seed of the sequence (`sequence_seed`), by what is sampled
(`OWN`, or the number of the sequence's guessing forward), by the position and by the vocabulary id. So a sequence gets
the same tokens alone, in a batch and in the reference, and no random state is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch

from pdkernels._validation import KERNEL_DTYPES, check, check_choice, check_fits_float, check_type, refuse
from pdkernels.backends import backend_of
from pdkernels.generation.params import MAX_POSITIONS
from pdkernels.models.capabilities import capabilities
from pdkernels.ops import TokenStatistics, token_statistics

Name = TypeVar("Name", bound=str)

OWN = 0  # step of tokens sampled from the model's own distribution at a position, whichever forward computes it
ORDER = 2  # fourth word of the counter for the order of positions; draws of tokens use 0, latent noise uses 1

Seed = int | Sequence[int]

_GOLDEN = (
    0x9E3779B97F4A7C15  # 2**64 over the golden ratio: multiples of it are far from each other and from small seeds
)


def sequence_seed(seed: int, sequence: int) -> int:
    """The seed of sequence number `sequence` of a batch whose `seed` is one number, ``seed + sequence *
    0x9E3779B97F4A7C15`` modulo 2**64: with it, the sequence alone gives what it gives in the batch.

    >>> sequence_seed(7, 0), hex(sequence_seed(7, 1))
    (7, '0x9e3779b97f4a7c1c')
    """
    return (seed + sequence * _GOLDEN) % 2**64


def sample(
    logits: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    seeds: torch.Tensor,
    step: torch.Tensor | int,
    suppress: tuple[int, ...] = (),
) -> torch.Tensor:
    """One token for each row of `logits` ``(batch, R, V)``, for `positions` ``(batch, R)``: int64 ``(batch, R)``.

    An exact sample from ``softmax(logits / temperature)``; the argmax at temperature 0. Ties go to the lowest id.
    `seeds` are ``(batch,)``, `step` is a number or broadcasts against `positions`.
    """
    if temperature == 0:
        return greedy(logits, suppress)
    backend, numbers = backend_of(logits.dtype), noise(temperature, seeds, step, positions)
    return token_statistics(logits, suppress=suppress, top_k=1, backend=backend, **numbers).ids


def greedy(logits: torch.Tensor, suppress: tuple[int, ...] = ()) -> torch.Tensor:
    """The most probable token of each row ``(..., V)`` other than those of `suppress`, the lowest id on ties."""
    # PyTorch's argmax of 16-bit numbers takes many times as long on a CPU as all statistics do.
    by_op = type(logits) is torch.Tensor and logits.device.type == "cpu" and logits.dtype in KERNEL_DTYPES
    if not suppress and not by_op:
        return logits.argmax(-1)  # all that is needed
    return token_statistics(logits, suppress=suppress, top_k=1, backend=backend_of(logits.dtype)).ids


def drafted(ids: torch.Tensor, mask_token: int) -> torch.Tensor:
    """`ids` as the tokens of a draft. An id of -1, from a row without a distribution, becomes any valid token, which
    will be verified."""
    return ids.masked_fill(ids < 0, int(mask_token == 0))


def noise(temperature: float, seeds: torch.Tensor, step: torch.Tensor | int, positions: torch.Tensor) -> dict[str, Any]:
    """The arguments of `token_statistics` for sampling; empty at temperature 0."""
    if temperature == 0:
        return {}
    return {"temperature": temperature, "seed": seeds[:, None], "step": step, "positions": positions}


def latents(model: Any, seeds: torch.Tensor) -> dict[str, Any]:
    """Additional arguments for the forward of a recurrent-depth model: the seeds ``(batch,)`` of its initial states."""
    return {"seed": seeds} if "recurrent" in capabilities(model) else {}


def statistics(model: Any, hidden: torch.Tensor, **options: Any) -> TokenStatistics:
    """`token_statistics` of the logits of rows of `hidden`; without storing logits if the model can."""
    if hasattr(model, "statistics"):
        result: TokenStatistics = model.statistics(hidden, **options)
        return result
    logits = model.logits(hidden)
    return token_statistics(logits, backend=backend_of(logits.dtype), **options)


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The fp64 probabilities of `sample`, at a temperature above 0."""
    logits = logits.double()
    # The best logit is at 0: divided by a tiny temperature, others would overflow.
    return torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)


def suppress_(logits: torch.Tensor, token: int) -> torch.Tensor:
    """Makes `token` impossible, in place: a guess is never the mask token, which would leave its slot masked."""
    logits[..., token] = -torch.inf
    return logits


def likeliest(logits: torch.Tensor, count: int, temperature: float, top_p: float) -> torch.Tensor:
    """`logits` ``(..., V)`` with -inf for all but the `count` most probable tokens, and for those that `top_p` drops.

    A token is dropped if the more probable ones have the mass `top_p` of ``softmax(logits / temperature)`` (0: 1) over
    all tokens. The first always stays, and ties stay or go together.

    >>> distribution = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    >>> likeliest(distribution, 3, 0.0, 0.65).isfinite().tolist(), likeliest(distribution, 1, 0.0, 0.65).isfinite().tolist()
    ([True, True, False, False], [True, False, False, False])
    """
    best = logits.topk(min(count, logits.shape[-1]), -1).values
    exact = torch.promote_types(logits.dtype, torch.float32)
    largest = best[..., :1].to(exact)  # at 0, so that neither a tiny temperature overflows nor a large sum is rounded
    total = ((logits.to(exact) - largest) / (temperature or 1.0)).logsumexp(-1, keepdim=True)
    mass = ((best.to(exact) - largest) / (temperature or 1.0) - total).exp()
    stay = (mass.cumsum(-1) - mass < top_p).sum(-1, keepdim=True)
    return logits.masked_fill(logits < best.gather(-1, (stay - 1).clamp(min=0)), -torch.inf)


def checked_seeds(op: str, seed: Seed, batch: int) -> torch.Tensor:
    """The seed of each sequence, int64 ``(batch,)`` on the host."""
    if isinstance(seed, int) and not isinstance(seed, bool):
        seeds = [sequence_seed(seed, sequence) for sequence in range(batch)]
    else:
        is_list = isinstance(seed, Sequence) and not isinstance(seed, (bytes, bytearray, memoryview))
        is_list = is_list and all(type(number) is int for number in cast(Sequence[int], seed))
        check_type(is_list, op, "seed", "be an int or a list of ints", type(seed).__name__)
        seeds = list(cast(Sequence[int], seed))
        check(len(seeds) == batch, op, "seed", f"have one number for each of the {batch} sequences", len(seeds))
    return torch.tensor([(number + 2**63) % 2**64 - 2**63 for number in seeds], device="cpu")


def _is_number(value: object) -> bool:
    """Whether it is a Python number, which includes NumPy's float64."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_size(op: str, name: str, value: int) -> int:
    check_type(type(value) is int, op, name, "be an int", type(value).__name__)
    check(value >= 1, op, name, "be at least 1", value)
    check(value <= MAX_POSITIONS, op, name, f"be at most {MAX_POSITIONS}", value)
    return value


def checked_number(op: str, name: str, value: float, maximum: float = math.inf) -> float:
    """A number from 0 up to `maximum`."""
    check_type(_is_number(value), op, name, "be a number", type(value).__name__)
    bounds = "be at least 0" if maximum == math.inf else f"be in 0 .. {maximum:g}"
    check(0 <= value <= maximum, op, name, bounds, value)
    check_fits_float(op, name, value)
    return value


def checked_name(op: str, name: str, value: Name, choices: tuple[str, ...]) -> Name:
    check_choice(op, name, value, choices)
    return value


def checked_flag(op: str, name: str, value: bool) -> bool:
    check_type(type(value) is bool, op, name, "be a bool", type(value).__name__)
    return value


def checked_mask_token(op: str, model: Any, mask_token: int | None) -> int:
    """The id of masked slots: `given`, or the model's own."""
    token: Any = getattr(model, "mask_token", None) if mask_token is None else mask_token
    refuse(token is None, op, "the model has no mask token", "Pass mask_token, the id that it was trained to fill in.")
    check_type(type(token) is int, op, "mask_token", "be an int", type(token).__name__)
    vocabulary = model.config.vocab_size
    check(0 <= token < vocabulary, op, "mask_token", f"be an id in 0 .. {vocabulary - 1}", token)
    return int(token)


def banned_tokens(op: str, model: Any, allow_mask_token: bool, mask_token: int | None = None) -> tuple[int, ...]:
    """Ids that no text may contain: the mask token, given or the model's own, if there is one and it is not allowed."""
    checked_flag(op, "allow_mask_token", allow_mask_token)
    token = getattr(model, "mask_token", None) if mask_token is None else mask_token
    return () if allow_mask_token or token is None else (token,)
