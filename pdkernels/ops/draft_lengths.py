"""The length of a draft that pays, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check_device, check_index, check_number, check_shape, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops._library import Draw, call, define
from pdkernels.reference import draft_lengths as reference

__all__ = ["draft_lengths_"]


def draft_lengths_(
    lengths: Tensor,
    accepted: Tensor,
    remaining: Tensor,
    seen: Tensor,
    balance: Tensor,
    ready: Tensor,
    costs: Tensor,
    *,
    wake: float = 0.0,
    kept: float = 0.97,
    hope: float = 0.75,
    slack: float = 0.005,
    backend: Backend = "auto",
) -> None:
    """Chooses the length of each sequence's next draft: that with the most expected tokens for its cost, of those that it can afford.

    A draft of r tokens, the known one included, costs ``costs[r - 1]``. Its place j is right with the share of `seen`, if all places
    before it are, so it is expected to give ``1 + p1 + p1 p2 + ..`` tokens. It is affordable if `balance` covers what it costs
    more than one token at a time, ``costs[0] * (1 + slack)``, even if none of it is accepted. First the last draft is counted::

        seen = kept * seen + what was accepted and reached;   balance += accepted * costs[0] * (1 + slack) - costs[length - 1]

    Args:
        lengths: ``(batch,)`` int32 or int64. Of the last draft, 0 if there was none; becomes that of the next one, at most `remaining`.
        accepted: ``(batch,)`` int32 or int64: tokens of the last draft that were accepted, the known one included.
        remaining: ``(batch,)`` int32 or int64: tokens that a sequence still needs; 0 once it is done.
        seen: ``(batch, 2, slots)`` float64, zeros at first: how often each place of a draft was accepted, and how often it was reached,
            fading. The first place is the known token's. Updated in place.
        balance: ``(batch,)`` float64: what may still be lost, at first what may be lost in all. Updated in place.
        ready: ``(batch,)`` bool: whether a draft can be made at once.
        costs: ``(slots,)`` float64, positive: of a step with 1, 2, .. tokens, in any unit.
        wake: what a sequence that is not ready pays for becoming ready.
        kept: share of `seen` that is kept in each step.
        hope: share of acceptances in one imagined draft, which is all that is known at first.
        slack: share of the cost of decoding token by token that may be lost.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: shapes that do not fit, numbers out of range; on the CPU a length outside ``[0, slots]``, or more accepted tokens than
            that (nothing is written then). On CUDA such values are clamped.
        TypeError: dtypes that do not fit.

    Deterministic and independent of the batch size. Source: Liu et al., "Optimizing speculative decoding for serving large language
    models using goodput" (arXiv 2406.14066); the bound is ours.

    Example:
        >>> import torch, pdkernels as pd
        >>> costs, ready = torch.tensor([1.0, 1.1, 1.2, 1.3]).double(), torch.tensor([True])
        >>> seen, balance = torch.zeros(1, 2, 4).double(), torch.tensor([0.5]).double()
        >>> lengths, left = torch.tensor([0]), torch.tensor([9])
        >>> for _ in range(9):  # nothing is accepted but the known token
        ...     pd.draft_lengths_(lengths, torch.minimum(lengths, torch.tensor(1)), left, seen, balance, ready, costs)
        >>> lengths.tolist()
        [1]
    """
    arguments = (lengths, accepted, remaining, seen, balance, ready, costs, wake, kept, hope, slack)
    call(draft_lengths_op, arguments, lengths, backend)


def _fake(
    lengths: Tensor,
    accepted: Tensor,
    remaining: Tensor,
    seen: Tensor,
    balance: Tensor,
    ready: Tensor,
    costs: Tensor,
    wake: float = 0.0,
    kept: float = 0.97,
    hope: float = 0.75,
    slack: float = 0.005,
) -> None:
    op = "draft_lengths_"
    check_index(op, "lengths", lengths, (None,), None)
    device, batch = lengths.device, lengths.shape[0]
    check_index(op, "accepted", accepted, (batch,), device)
    check_index(op, "remaining", remaining, (batch,), device)
    for name, tensor in (("seen", seen), ("balance", balance), ("ready", ready), ("costs", costs)):
        dtype = torch.bool if name == "ready" else torch.float64
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
        check_type(tensor.dtype == dtype, op, name, f"be {dtype}", tensor.dtype)
        check_device(op, name, tensor, device)
    if costs.dim() != 1 or costs.shape[0] == 0:
        fail(op, "costs", "have shape (slots,), with at least one slot", tuple(costs.shape))
    check_shape(op, "seen", seen, (batch, 2, costs.shape[0]))
    check_shape(op, "balance", balance, (batch,))
    check_shape(op, "ready", ready, (batch,))
    check_number(op, "wake", wake, 0, expectation="be at least 0")
    check_number(op, "kept", kept, 0, 1, "be in [0, 1]")
    check_number(op, "hope", hope, 0, 1, "be in [0, 1]")
    check_number(op, "slack", slack, 0, expectation="be at least 0")


def _example(draw: Draw) -> dict[str, Any]:
    seen = draw.floats(3, 2, 4, dtype=torch.float64).abs().sort(1).values
    return {
        "lengths": torch.tensor([4, 2, 0]),
        "accepted": torch.tensor([3, 1, 0]),
        "remaining": torch.tensor([9, 9, 2]),
        "seen": seen,
        "balance": torch.tensor([0.5, 0.1, 3.0], dtype=torch.float64),
        "ready": torch.tensor([True, False, True]),
        "costs": torch.tensor([1.0, 1.25, 1.5, 2.0], dtype=torch.float64),
        "wake": 0.25,
    }


draft_lengths_op = define(
    "draft_lengths_(Tensor(a!) lengths, Tensor accepted, Tensor remaining, Tensor(b!) seen, Tensor(c!) balance, Tensor ready, "
    "Tensor costs, float wake=0., float kept=0.97, float hope=0.75, float slack=0.005) -> ()",
    fake=_fake,
    reference=reference.draft_lengths_,
    example=_example,
    gradients="none",
    float64=True,
)
