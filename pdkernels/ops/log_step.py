"""Logs the result of a decoding step on the device, and sets whether a conditional node of a CUDA graph continues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check_shape, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define
from pdkernels.reference import log_step as reference

__all__ = ["log_step_"]


def log_step_(
    log: Tensor,
    count: Tensor,
    condition: Tensor,
    entry: Tensor,
    *,
    handle: int | None = None,
    backend: Backend = "auto",
) -> None:
    """Appends the entry of one step, counts it, and decides whether another step follows::

        log[count] = entry;   count += 1;   condition = (entry[:, 0] > 0).any() and count < steps

    A decoder that runs on a device without its host logs the values that the host would have read after every step: the
    first column is the number of tokens that a sequence still needs, 0 when it is done; the decoder defines the others.
    The host reads the log once, at the end. In a CUDA graph the same launch sets the condition of a while node, so that
    the step repeats without the host (`pdkernels.integrations.device_loop`).

    Args:
        log: ``(steps, batch, columns)`` int64, contiguous; one entry is written.
        count: ``(1,)`` int64, entries in the log; updated in place.
        condition: ``(1,)`` bool; written. A full log ends the loop in any case, so that no loop runs forever.
        entry: ``(batch, columns)`` int64, contiguous.
        handle: of a graph's conditional node, which is set to `condition` (CUDA): `cudaGraphConditionalHandle` as an
            int. None: no such node.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: shapes that do not fit; a handle without CUDA; on the CPU a full log or a count outside of it
            (nothing is written then). On CUDA nothing is written for such a count either, and `condition` becomes
            False.
        TypeError: dtypes that do not fit.

    Deterministic. Source: CUDA programming guide, conditional graph nodes.

    Example:
        >>> import torch, pdkernels as pd
        >>> log = torch.zeros(3, 2, 2, dtype=torch.int64); count = torch.zeros(1, dtype=torch.int64)
        >>> condition = torch.ones(1, dtype=torch.bool)
        >>> pd.log_step_(log, count, condition, torch.tensor([[1, 7], [0, 8]])); condition.item(), count.item()
        (True, 1)
        >>> pd.log_step_(log, count, condition, torch.tensor([[0, 9], [0, 8]])); condition.item(), log[:, 0, 1].tolist()
        (False, [7, 9, 0])
    """
    call(log_step_op, (log, count, condition, entry, signed(handle)), entry, backend)


def signed(handle: int | None) -> int | None:
    """Reinterprets 64 bits as the signed int of a schema, whose range handles may exceed."""
    check_type(handle is None or isinstance(handle, int), "log_step_", "handle", "be an int", type(handle).__name__)
    return handle if handle is None or handle < 2**63 else handle - 2**64


def _fake(log: Tensor, count: Tensor, condition: Tensor, entry: Tensor, handle: int | None = None) -> None:
    op = "log_step_"
    for name, tensor in (("entry", entry), ("log", log), ("count", count), ("condition", condition)):
        dtype = torch.bool if name == "condition" else torch.int64
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
        check_type(tensor.dtype == dtype, op, name, f"be {dtype}", tensor.dtype)
        if tensor.device != entry.device:
            fail(op, name, f"be on {entry.device} like entry", tensor.device)
        if not tensor.is_contiguous():
            fail(op, name, "be contiguous", f"strides {tensor.stride()}")
    if entry.dim() != 2 or entry.shape[1] == 0:
        fail(op, "entry", "have shape (batch, columns), with at least one column", tuple(entry.shape))
    if log.dim() != 3 or log.shape[1:] != entry.shape:
        fail(op, "log", f"have shape (steps, {entry.shape[0]}, {entry.shape[1]})", tuple(log.shape))
    check_shape(op, "count", count, (1,))
    check_shape(op, "condition", condition, (1,))
    if handle is not None and entry.device.type == "cpu":
        fail(op, "handle", "be None on the CPU", handle, "Conditional nodes are parts of CUDA graphs.")


def _example(draw: Draw) -> dict[str, Any]:
    count, condition = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    return {
        "log": torch.zeros(4, 2, 3, dtype=torch.int64),
        "count": count,
        "condition": condition,
        "entry": draw.ints(0, 8, 2, 3),
    }


log_step_op = define(
    "log_step_(Tensor(a!) log, Tensor(b!) count, Tensor(c!) condition, Tensor entry, int? handle=None) -> ()",
    fake=_fake,
    reference=reference.log_step_,
    example=_example,
    gradients="own",
)
