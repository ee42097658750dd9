"""The length of a draft that pays, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check_device, check_index, check_number, check_shape, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define
from pdkernels.reference import draft_lengths as reference

__all__ = ["draft_lengths_"]


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
    decay: float = 0.97,
    prior: float = 0.75,
    max_slowdown: float = 0.005,
    backend: Backend = "auto",
) -> None:
    """Chooses the length of each sequence's next draft: the most expected tokens for its cost that the budget covers.

    A draft of r tokens, its first (the last verified token) included, costs ``costs[r - 1]``. Token j of a draft is
    accepted with the probability pj that `acceptance_counts` give, if all before it are, so a draft is expected to give
    ``1 + p1 + p1 p2 + ..`` tokens. It is affordable if `budget` covers what it costs more than decoding token by token,
    which is ``price = costs[0] * (1 + max_slowdown)`` a token, even if none of it is accepted. First the last draft is
    counted::

        acceptance_counts = decay * acceptance_counts + (accepted places, reached places)
        budget += accepted * price - costs[length - 1]

    Args:
        lengths: ``(batch,)`` int32 or int64, of the last draft, 0 if there was none; becomes that of the next one, at
            most `remaining`.
        accepted: ``(batch,)`` int32 or int64: tokens of the last draft that were accepted, its first included.
        remaining: ``(batch,)`` int32 or int64: tokens that a sequence still needs; 0 once it is done.
        acceptance_counts: ``(batch, 2, slots)`` float64, zeros at first: how often each place of a draft was accepted,
            and how often it was reached, with decay. Updated in place.
        budget: ``(batch,)`` float64: the cost that may still be lost, at first all of it. Updated in place.
        ready: ``(batch,)`` bool: whether a draft can be made at once.
        costs: ``(slots,)`` float64, positive: of a step with 1, 2, .. tokens, in any unit.
        warmup_cost: what a sequence that is not ready pays to become ready.
        decay: factor of `acceptance_counts` in each step.
        prior: acceptance rate of one imagined draft, which is all that is known at first.
        max_slowdown: share of the cost of decoding token by token that may be lost.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: shapes that do not fit, numbers out of range; on the CPU a length outside ``[0, slots]``, or more
            accepted tokens than that (nothing is written then). On CUDA such values are clamped.
        TypeError: dtypes that do not fit.

    Deterministic and independent of the batch size. Source: Liu et al., "Optimizing speculative decoding for serving
    large language models using goodput" (arXiv 2406.14066); the bound is ours.

    Example:
        >>> import torch, pdkernels as pd
        >>> costs, ready = torch.tensor([1.0, 1.1, 1.2, 1.3]).double(), torch.tensor([True])
        >>> counts, budget = torch.zeros(1, 2, 4).double(), torch.tensor([0.5]).double()
        >>> lengths, one, remaining = torch.tensor([0]), torch.tensor(1), torch.tensor([9])
        >>> for _ in range(9):  # only the first token of a draft is accepted
        ...     pd.draft_lengths_(lengths, torch.minimum(lengths, one), remaining, counts, budget, ready, costs)
        >>> lengths.tolist()
        [1]
    """
    state = (lengths, accepted, remaining, acceptance_counts, budget, ready, costs)
    call(draft_lengths_op, (*state, warmup_cost, decay, prior, max_slowdown), lengths, backend)


def _fake(
    lengths: Tensor,
    accepted: Tensor,
    remaining: Tensor,
    acceptance_counts: Tensor,
    budget: Tensor,
    ready: Tensor,
    costs: Tensor,
    warmup_cost: float = 0.0,
    decay: float = 0.97,
    prior: float = 0.75,
    max_slowdown: float = 0.005,
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
    if costs.dim() != 1 or costs.shape[0] == 0:
        fail(op, "costs", "have shape (slots,), with at least one slot", tuple(costs.shape))
    check_shape(op, "acceptance_counts", acceptance_counts, (batch, 2, costs.shape[0]))
    check_shape(op, "budget", budget, (batch,))
    check_shape(op, "ready", ready, (batch,))
    check_number(op, "warmup_cost", warmup_cost, 0, expectation="be at least 0")
    check_number(op, "decay", decay, 0, 1, "be in [0, 1]")
    check_number(op, "prior", prior, 0, 1, "be in [0, 1]")
    check_number(op, "max_slowdown", max_slowdown, 0, expectation="be at least 0")


def _example(draw: Draw) -> dict[str, Any]:
    acceptance_counts = draw.floats(3, 2, 4, dtype=torch.float64).abs().sort(1).values
    return {
        "lengths": torch.tensor([4, 2, 0]),
        "accepted": torch.tensor([3, 1, 0]),
        "remaining": torch.tensor([9, 9, 2]),
        "acceptance_counts": acceptance_counts,
        "budget": torch.tensor([0.5, 0.1, 3.0], dtype=torch.float64),
        "ready": torch.tensor([True, False, True]),
        "costs": torch.tensor([1.0, 1.25, 1.5, 2.0], dtype=torch.float64),
        "warmup_cost": 0.25,
    }


draft_lengths_op = define(
    "draft_lengths_(Tensor(a!) lengths, Tensor accepted, Tensor remaining, Tensor(b!) acceptance_counts, Tensor(c!) budget, "
    "Tensor ready, Tensor costs, float warmup_cost=0., float decay=0.97, float prior=0.75, float max_slowdown=0.005) -> ()",
    fake=_fake,
    reference=reference.draft_lengths_,
    example=_example,
    gradients="none",
    float64=True,
)
