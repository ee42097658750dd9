"""The arguments of the attention ops as named structures, and the checks that these ops share.

Fakes, references and Triton launchers take them whole. `python_bindings/attention.h` has the same structures in C++.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels._structures import part_of
from pdkernels._validation import KERNEL_DTYPES, check, check_type, fail, message

LARGEST = torch.finfo(torch.float32).max

SCALE_BYTES = 4
"""Bytes of the scale, in float32, that follows the codes of a row of an 8-bit cache."""


class PlanArguments(NamedTuple):
    """The parts of a plan that an op takes, in the order of its schema: see `TilePlan`."""

    plan_rows: Tensor
    plan_lists: Tensor
    bitmaps: Tensor
    block_q: int
    block_k: int


class AttentionArguments(NamedTuple):
    """The arguments of `block_sparse_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    plan_rows: Tensor
    plan_lists: Tensor
    bitmaps: Tensor
    block_q: int
    block_k: int
    scale: float
    sinks: Tensor | None = None
    softcap: float = 0.0

    @property
    def plan(self) -> PlanArguments:
        return part_of(self, PlanArguments)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.q.shape[0], self.q.shape[2], self.q.shape[1]


class GradientArguments(NamedTuple):
    """The arguments of `block_sparse_attention_backward`: gradients and results of a forward pass, and its
    arguments."""

    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    forward: AttentionArguments

    @classmethod
    def of(
        cls, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *forward: Any
    ) -> GradientArguments:
        """From the op's arguments one by one."""
        return cls(grad_out, grad_lse, out, lse, AttentionArguments(*forward))


class SpeculativeArguments(NamedTuple):
    """The arguments of `speculative_attention` and `speculative_attention_append_`."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    plan_rows: Tensor
    plan_lists: Tensor
    bitmaps: Tensor
    block_q: int
    block_k: int
    scale: float
    block_table: Tensor | None = None
    starts: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_new: int = 0
    sinks: Tensor | None = None
    softcap: float = 0.0
    # Of the op that appends alone.
    counts: Tensor | None = None
    source_index: Tensor | None = None

    @property
    def plan(self) -> PlanArguments:
        return part_of(self, PlanArguments)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def quantized(self) -> bool:
        """Whether keys and values are rows of an 8-bit cache."""
        return self.k_cache.dtype == torch.int8

    @property
    def halved(self) -> bool:
        """Whether keys and values are in 16 bits beside queries in 32."""
        return halves(self.q.dtype, self.k_cache.dtype)

    @property
    def batch(self) -> int:
        if self.cu_seqlens is None:
            return self.q.shape[0]
        return self.lengths.shape[0] if self.lengths.dim() else 0

    @property
    def new(self) -> int:
        """New tokens of a sequence; where sequences are packed, of the longest."""
        return self.q.shape[1] if self.cu_seqlens is None else self.max_new

    @property
    def starts_by_row(self) -> bool:
        """Whether `starts` has an entry for each packed row, not for each sequence."""
        return self.packed and self.starts is not None and tuple(self.starts.shape) == (1, self.q.shape[0])

    @property
    def capacity(self) -> int:
        """Slots of a sequence."""
        slots = self.k_cache.shape[1]
        return slots if self.block_table is None else slots * self.block_table.shape[1]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-3], self.q.shape[-2], self.q.shape[-3])


APPEND_ONLY = ("counts", "source_index")

# The dimensions of tensors with a batch (b) or heads (h); others are tokens (t), slots (s), pages (p), elements (d).
LAYOUTS = {
    **dict.fromkeys(("q", "k", "v", "k_new", "v_new", "out", "grad_out"), "bthd"),
    **dict.fromkeys(("k_cache", "v_cache"), "bshd"),
    **dict.fromkeys(("lse", "grad_lse"), "bht"),
    **{"lengths": "b", "block_table": "bp", "starts": "bt", "sinks": "h"},
}


def takes_head_dim(head_dim: int) -> bool:
    """Whether the kernels support heads of that size.

    >>> [size for size in (8, 16, 20, 96, 256, 512, 520) if takes_head_dim(size)]
    [16, 96, 256, 512]
    """
    return head_dim % 8 == 0 and 16 <= head_dim <= 512


def checked_scale(op: str, scale: float | None, q: Tensor) -> float:
    """`scale`, or the default for None. Kernels multiply in float32, where a larger one turns a zero into NaN."""
    if scale is None:
        return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0
    check_type(isinstance(scale, (int, float)), op, "scale", "be a number", type(scale).__name__)
    check(-LARGEST <= scale <= LARGEST, op, "scale", "be finite in float32", scale)
    return float(scale) if isinstance(scale, int) else scale


def checked_softcap(op: str, softcap: float | None) -> float:
    """`softcap` as the ops take it: 0 for none."""
    if softcap is None:
        return 0.0
    check_type(isinstance(softcap, (int, float)), op, "softcap", "be a number or None", type(softcap).__name__)
    check(0 < softcap <= LARGEST, op, "softcap", "be positive and finite in float32", softcap)
    return float(softcap)


def refuse_softcap(op: str, softcap: float) -> None:
    """Only the CPU's kernels and the references cap scores."""
    if softcap:
        remedy = "Pass backend='reference', or run it on the CPU."
        raise NotImplementedError(
            message(op, "softcap", "be None for kernels of Triton and for gradients", softcap, remedy)
        )


def halves(dtype: torch.dtype, of_cache: torch.dtype) -> bool:
    """Whether a cache holds rows of that dtype in half the bits, which only CPU kernels read.

    >>> halves(torch.float32, torch.float16), halves(torch.float16, torch.float16)
    (True, False)
    """
    return dtype == torch.float32 and of_cache == torch.float16


def check_input(op: str, name: str, x: Tensor, q: Tensor, remedy: str = "Call .contiguous() on it.") -> None:
    """Dtype, device and last dimension of a tensor with heads."""
    if x.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise TypeError(message(op, name, "be float32, float16 or bfloat16", x.dtype, "Convert it with .to()."))
    if x.dtype != q.dtype:
        raise TypeError(message(op, name, f"be {q.dtype} like q", x.dtype, "Convert it with .to()."))
    check_place(op, name, x, q, remedy)


def check_halves(op: str, name: str, x: Tensor, q: Tensor, remedy: str = "Call .contiguous() on it.") -> None:
    """Dtype, device and memory of rows in 16 bits beside queries in 32."""
    if q.device.type == "cuda":
        raise TypeError(message(op, name, f"be {q.dtype} like q on a GPU", x.dtype, "Convert it with .to()."))
    if x.dtype != torch.float16:
        raise TypeError(message(op, name, "be float16 like k_cache", x.dtype, "Convert it with .to()."))
    check_place(op, name, x, q, remedy)


def check_place(op: str, name: str, x: Tensor, q: Tensor, remedy: str) -> None:
    """Device and last dimension of a tensor with heads."""
    if x.device != q.device:
        fail(op, name, f"be on {q.device} like q", x.device, f"Move it with .to({str(q.device)!r}).")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        fail(op, name, "have a contiguous last dimension", f"strides {x.stride()}", remedy)


def check_quantized(op: str, name: str, x: Tensor, q: Tensor, remedy: str = "Call .contiguous() on it.") -> None:
    """Dtype, device and memory of rows of an 8-bit cache."""
    if x.dtype != torch.int8:
        raise TypeError(message(op, name, "be int8 like k_cache", x.dtype, "Quantize it with pdkernels.kv_quantize."))
    check_place(op, name, x, q, remedy)
    if x.storage_offset() % SCALE_BYTES or any(stride % SCALE_BYTES for stride in x.stride()[:-1]):
        actual = f"strides {x.stride()} and an offset of {x.storage_offset()}"
        fail(op, name, f"have rows at multiples of {SCALE_BYTES} bytes, for their scales", actual, remedy)


def check_head_dim(op: str, head_dim: int) -> None:
    if not takes_head_dim(head_dim):
        remedy = "Pad all heads with zeros and pass the scale."
        fail(op, "head_dim", "be a multiple of 8 in [16, 512]", head_dim, remedy)


def check_heads(op: str, arguments: AttentionArguments | SpeculativeArguments, keys: str) -> None:
    """Checks heads and sinks; `keys` is the argument with the KV heads."""
    heads, head_dim = arguments.q.shape[-2:]
    kv_heads = getattr(arguments, keys).shape[-2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads != 0:
        fail(op, keys, f"have a number of heads that divides the {heads} of q", kv_heads)
    check_head_dim(op, head_dim)
    if arguments.sinks is not None:
        check_sinks(op, arguments.sinks, arguments.q, heads)


def check_sinks(op: str, sinks: Tensor, q: Tensor, heads: int) -> None:
    """One number for each query head, in the precision of the softmax."""
    if tuple(sinks.shape) != (heads,):
        fail(op, "sinks", f"have shape ({heads},), one for each query head", tuple(sinks.shape))
    if sinks.dtype != softmax_dtype(q):
        raise TypeError(message(op, "sinks", f"be {softmax_dtype(q)}", sinks.dtype, "Convert it with .to()."))
    if sinks.device != q.device:
        fail(op, "sinks", f"be on {q.device} like q", sinks.device, f"Move it with .to({str(q.device)!r}).")


def softmax_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def autocast_dtype(x: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype in which PyTorch's attention reads a tensor: under autocast its own (or `dtype`), except for float64."""
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return dtype or torch.get_autocast_dtype(kind)


def autocasted(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The tensors in their `autocast_dtype`."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(autocast_dtype(x, dtype)) for x in tensors)


def checked_sinks(op: str, sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """`sinks` as the ops take them, in the dtype of the softmax."""
    if sinks is None:
        return None
    check_type(isinstance(sinks, Tensor), op, "sinks", "be a tensor", type(sinks).__name__)
    if not sinks.is_floating_point():
        raise TypeError(message(op, "sinks", "be of a floating-point dtype", sinks.dtype))
    return sinks.to(softmax_dtype(q))


def refuse_float64(op: str, q: Tensor) -> None:
    """Only the reference takes it."""
    if q.dtype == torch.float64:
        remedy = "Pass backend='reference', which computes in float64."
        raise TypeError(message(op, "q", "be float32, float16 or bfloat16 for the kernels", q.dtype, remedy))


def check_plan(op: str, device: torch.device, rows_of: tuple[int, int], kv_len: int, plan: PlanArguments) -> None:
    """A plan of `rows_of` ``(batch, q_len)`` and `kv_len` columns: everything but values."""
    batch, q_len = rows_of
    rows, lists, bitmaps, block_q, block_k = plan
    for tensor in (rows, lists, bitmaps):
        if tensor.device != device:
            fail(op, "plan", f"be on {device} like q", tensor.device, f"Move it with plan.to({str(device)!r}).")
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise TypeError(
                message(op, "plan", "hold contiguous int32 tensors", f"{tensor.dtype} with strides {tensor.stride()}")
            )
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if size % 16 != 0 or size < 16 or size > 1024:
            fail(op, name, "be a multiple of 16 in [16, 1024]", size)
    if rows.dim() == 3 and rows.shape[0] != batch:
        remedy = "Stack one plan for each sample, or pass a single plan that all samples share."
        fail(op, "plan", f"have {batch} samples like q", rows.shape[0], remedy)
    q_tiles, kv_tiles = -(-q_len // block_q), -(-kv_len // block_k)
    if rows.dim() not in (2, 3) or tuple(rows.shape[-2:]) != (q_tiles + kv_tiles, 4):
        fail(op, "plan", f"have rows for {q_tiles} x {kv_tiles} tiles of {block_q} x {block_k}", tuple(rows.shape))
    if lists.dim() != 2 or lists.shape[1] != 2:
        fail(op, "plan", "have lists of pairs", tuple(lists.shape))
    if bitmaps.dim() != 3 or tuple(bitmaps.shape[1:]) != (block_q, -(-block_k // 32)):
        fail(op, "plan", f"have bitmaps of shape (any, {block_q}, {-(-block_k // 32)})", tuple(bitmaps.shape))
