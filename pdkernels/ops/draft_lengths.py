"""The lengths of the drafts of a batch that pay, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check_device, check_flag, check_index, check_number, check_shape, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define
from pdkernels.reference import draft_lengths as reference

__all__ = ["draft_lengths_"]

_MOST_SEQUENCES, _MOST_SLOTS = 1024, 256  # as in csrc/ops/draft_lengths.h


def draft_lengths_(
    lengths: Tensor,
    accepted: Tensor,
    remaining: Tensor,
    acceptance_counts: Tensor,
    budget: Tensor,
    ready: Tensor,
    costs: Tensor,
    *,
    warmup_cost: float = 0.0,
    sequence_cost: float = 0.0,
    guess_cost: float = 0.0,
    decay: float = 0.97,
    prior: float = 0.75,
    max_slowdown: float = 0.005,
    padded: bool = False,
    backend: Backend = "auto",
) -> None:
    """Chooses the lengths of the next drafts of a batch: the most expected tokens for the cost of its step.

    A draft of r tokens is its known first one and ``r - 1`` guesses. Guess j is right with the probability pj that
    `acceptance_counts` give, if all before it are, so a draft is expected to give ``1 + p1 + p1 p2 + ..`` tokens. A
    step of n sequences with g guesses, all together, costs ``costs[g > 0, n + g - 1] + guess_cost * g + sequence_cost *
    (n - 1)``. Rows go to the guesses that are most likely to be accepted, whosever they are, as many of them as give
    the batch the most tokens for the cost of its step. With `padded` all sequences have rows up to the longest draft,
    so one length is chosen for all.

    What a token more saves lies between its share of a step, if all sequences advance alike, and what the step takes
    less without its sequence, if the others go on. It is the middle of both here, and the whole share with `padded`.
    Each sequence pays for its own guesses, so that none slows the batch down for long: `budget` counts in such tokens,
    and a draft is affordable if it covers what its guesses may cost even if
    none of them is accepted. First the last draft is counted::

        acceptance_counts = decay * acceptance_counts + (accepted places, reached places)
        budget += accepted * (1 + max_slowdown) - 1 - the cost of its guesses

    Args:
        lengths: ``(batch,)`` int32 or int64, of the last draft, 0 if there was none; becomes that of the next one, at
            most `remaining`.
        accepted: ``(batch,)`` int32 or int64: tokens of the last draft that were accepted, its first included.
        remaining: ``(batch,)`` int32 or int64: tokens that a sequence still needs, or the longest draft that there is;
            0 once it is done.
        acceptance_counts: ``(batch, 2, slots)`` float64, zeros at first: how often each place of a draft was accepted,
            and how often it was reached, with decay. Updated in place.
        budget: ``(batch,)`` float64: the tokens that may still be lost, at first all of them. Updated in place.
        ready: ``(batch,)`` bool: whether a draft can be made at once.
        costs: ``(2, rows)`` float64, positive, `rows` at least ``batch * slots``: of a step with 1, 2, .. rows of one
            sequence, in any unit; without guesses, and with some.
        warmup_cost: what a sequence that is not ready pays to become ready, in the unit of `budget`.
        sequence_cost: what a step costs more for each sequence after the first, beside its rows.
        guess_cost: what a drafter takes for a guess.
        decay: factor of `acceptance_counts` in each step.
        prior: acceptance rate of one imagined draft, which is all that is known at first.
        max_slowdown: share of the cost of decoding token by token that may be lost.
        padded: whether a step has rows for the longest draft in all sequences.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: shapes that do not fit, numbers out of range; more than 1,024 sequences or 256 slots; on the CPU a
            length outside ``[0, slots]``, or more accepted tokens than that (nothing is written then). On CUDA such
            values are clamped.
        TypeError: dtypes that do not fit.

    Deterministic. Source: Liu et al., "Optimizing speculative decoding for serving large language models using goodput"
    (arXiv 2406.14066), whose lengths maximise the tokens of a batch over the time of its step; the bound is ours.

    Example:
        >>> import torch, pdkernels as pd
        >>> costs, ready = torch.tensor([[1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]]).double(), torch.tensor([True, True])
        >>> counts, budget = torch.zeros(2, 2, 4).double(), torch.tensor([0.5, 0.5]).double()
        >>> lengths, remaining = torch.tensor([0, 0]), torch.tensor([99, 99])
        >>> for _ in range(9):  # all guesses for the first sequence are right, none for the second one is
        ...     accepted = torch.stack([lengths[0], lengths[1].clamp(max=1)])
        ...     pd.draft_lengths_(lengths, accepted, remaining, counts, budget, ready, costs.expand(2, -1))
        >>> lengths.tolist()
        [4, 1]
    """
    state = (lengths, accepted, remaining, acceptance_counts, budget, ready, costs)
    numbers = (warmup_cost, sequence_cost, guess_cost, decay, prior, max_slowdown)
    call(draft_lengths_op, (*state, *numbers, padded), lengths, backend)


def _fake(
    lengths: Tensor,
    accepted: Tensor,
    remaining: Tensor,
    acceptance_counts: Tensor,
    budget: Tensor,
    ready: Tensor,
    costs: Tensor,
    warmup_cost: float = 0.0,
    sequence_cost: float = 0.0,
    guess_cost: float = 0.0,
    decay: float = 0.97,
    prior: float = 0.75,
    max_slowdown: float = 0.005,
    padded: bool = False,
) -> None:
    op = "draft_lengths_"
    check_index(op, "lengths", lengths, (None,), None)
    device, batch = lengths.device, lengths.shape[0]
    check_index(op, "accepted", accepted, (batch,), device)
    check_index(op, "remaining", remaining, (batch,), device)
    for name, tensor in (
        ("acceptance_counts", acceptance_counts),
        ("budget", budget),
        ("ready", ready),
        ("costs", costs),
    ):
        dtype = torch.bool if name == "ready" else torch.float64
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
        check_type(tensor.dtype == dtype, op, name, f"be {dtype}", tensor.dtype)
        check_device(op, name, tensor, device)
    if acceptance_counts.dim() != 3 or not 1 <= acceptance_counts.shape[2] <= _MOST_SLOTS:
        expectation = f"have shape (batch, 2, slots), with 1 .. {_MOST_SLOTS} slots"
        fail(op, "acceptance_counts", expectation, tuple(acceptance_counts.shape))
    slots = acceptance_counts.shape[2]
    check_shape(op, "acceptance_counts", acceptance_counts, (batch, 2, slots))
    if batch > _MOST_SEQUENCES:
        fail(op, "lengths", f"have at most {_MOST_SEQUENCES} sequences", batch)
    if costs.dim() != 2 or costs.shape[0] != 2 or costs.shape[1] < batch * slots:
        fail(op, "costs", f"have shape (2, rows), with at least {batch * slots} rows", tuple(costs.shape))
    check_shape(op, "budget", budget, (batch,))
    check_shape(op, "ready", ready, (batch,))
    check_number(op, "warmup_cost", warmup_cost, 0, expectation="be at least 0")
    check_number(op, "sequence_cost", sequence_cost, 0, expectation="be at least 0")
    check_number(op, "guess_cost", guess_cost, 0, expectation="be at least 0")
    check_number(op, "decay", decay, 0, 1, "be in [0, 1]")
    check_number(op, "prior", prior, 0, 1, "be in [0, 1]")
    check_number(op, "max_slowdown", max_slowdown, 0, expectation="be at least 0")
    check_flag(op, "padded", padded)


def _example(draw: Draw) -> dict[str, Any]:
    acceptance_counts = draw.floats(3, 2, 4, dtype=torch.float64).abs().sort(1).values
    return {
        "lengths": torch.tensor([4, 2, 0]),
        "accepted": torch.tensor([1, 1, 0]),  # as in the next call too
        "remaining": torch.tensor([9, 9, 2]),
        "acceptance_counts": acceptance_counts,
        "budget": torch.tensor([0.5, 0.1, 3.0], dtype=torch.float64),
        "ready": torch.tensor([True, False, True]),
        "costs": (torch.arange(24).view(2, 12) / 8 + 1).double(),
        "warmup_cost": 0.25,
        "sequence_cost": 0.125,
        "guess_cost": 0.0625,
    }


draft_lengths_op = define(
    "draft_lengths_(Tensor(a!) lengths, Tensor accepted, Tensor remaining, Tensor(b!) acceptance_counts, Tensor(c!) budget, "
    "Tensor ready, Tensor costs, float warmup_cost=0., float sequence_cost=0., float guess_cost=0., float decay=0.97, "
    "float prior=0.75, float max_slowdown=0.005, bool padded=False) -> ()",
    fake=_fake,
    reference=reference.draft_lengths_,
    example=_example,
    gradients="none",
    float64=True,
)
