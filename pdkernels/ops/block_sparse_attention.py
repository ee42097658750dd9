"""Attention over a tile plan, for training and prefill: forward and backward.

The kernels read a `TilePlan` and nothing else about a mask: skipped tiles cost nothing, full tiles need no mask, partial tiles
load one bit per pair. Every block of results is owned by one program or thread, so nothing is summed across them: results are
identical bit for bit from run to run, whatever the number of threads and whatever else is in the batch.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Literal, overload

import torch
from torch import Tensor

from pdkernels import masks
from pdkernels._validation import KERNEL_DTYPES, check_flag, check_type, fail, message, refuse_tangents
from pdkernels.backends import Backend
from pdkernels.masks import TilePlan
from pdkernels.masks.tile_plan import PlanArguments
from pdkernels.ops._attention import PLAN_SCHEMA, check_plan, dense_plan, given_scale, takes_head_dim
from pdkernels.ops._gradients import refuse_inference, refuse_second_derivative, refuse_transforms
from pdkernels.ops._library import LIBRARY, Draw, call, define
from pdkernels.reference import block_sparse_attention as reference

__all__ = ["block_sparse_attention"]

OP = "block_sparse_attention"


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, *,
    scale: float | None = ..., return_lse: Literal[False] = ..., backend: Backend = ...
) -> Tensor: ...  # fmt: skip


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, *,
    scale: float | None = ..., return_lse: Literal[True], backend: Backend = ...
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TilePlan,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale q k^T) v`` over the pairs that a plan shows. Differentiable.

    Any mask can be planned: see `pdkernels.masks`. Work and time grow with the tiles that the plan visits, not with all pairs,
    and no array of pairs is ever stored, forward or backward.

    Args:
        q: ``(batch, q_len, q_heads, head_dim)``, float32, float16 or bfloat16 (float64 with ``backend="reference"``); head_dim
            a multiple of 8 in ``[16, 256]``.
        k, v: ``(batch, kv_len, kv_heads, head_dim)``, dtype of q; kv_heads divides q_heads, and query head ``h`` reads KV head
            ``h // (q_heads // kv_heads)``. All three may have any strides with a contiguous last dimension.
        plan: of a mask of q_len rows and kv_len columns, on the device of q: ``mask.plan(block_q, block_k, q.device)``. All
            samples and heads share it; a stacked plan (`TilePlan.stack`) has one for each sample.
        scale: of the scores, finite in float32; None means ``head_dim ** -0.5``.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: see `pdkernels.show_config`.

    Returns:
        ``out``, shape and dtype of q, contiguous. With `return_lse` ``(out, lse)``: the natural log-sum-exp of the visible scores,
        ``(batch, q_heads, q_len)`` float32, differentiable too. Rows that see nothing are zero, with a log-sum-exp of -inf; they
        receive and pass on zero gradients.

    Raises:
        ValueError: shapes or strides that do not fit, a plan for other lengths, another batch or another device.
        TypeError: dtypes that do not fit, a mask instead of a plan.
        NotImplementedError: a backend that does not serve the device; a second derivative, one in forward mode or one by
            ``torch.func`` (the reference has them all).

    Softmax and sums run in float32. Results repeat bit for bit and do not depend on the number of threads or on the rest of the
    batch. ``torch.compile`` sees one op.

    Source: tiles and online softmax after FlashAttention-2 (Dao, 2023), section 3.1, with its backward pass.

    Example:
        >>> import torch, pdkernels as pd
        >>> mask = pd.masks.noise_aware_causal(prompt_len=20, block_size=8, num_blocks=4)   # 84 tokens
        >>> q, k, v = (torch.randn(2, 84, heads, 64, requires_grad=True) for heads in (4, 2, 2))
        >>> out, lse = pd.block_sparse_attention(q, k, v, mask.plan(32, 32), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 84, 4, 64]), torch.Size([2, 4, 84]))
        >>> out.sum().backward(); k.grad.shape
        torch.Size([2, 84, 2, 64])
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_type(isinstance(tensor, Tensor), OP, name, "be a tensor", type(tensor).__name__)
    if not isinstance(plan, TilePlan):
        remedy = "Call mask.plan(block_q, block_k, q.device)." if hasattr(plan, "plan") else ""
        raise TypeError(message(OP, "plan", "be a TilePlan", type(plan).__name__, remedy))
    if q.dim() == 4 and k.dim() == 4 and (plan.q_len != q.shape[1] or plan.kv_len != k.shape[1]):
        wanted = f"have {q.shape[1]} rows and {k.shape[1]} columns like q and k"
        fail(
            OP,
            "plan",
            wanted,
            f"{plan.q_len} and {plan.kv_len}",
            "Build the mask for these lengths; pack(..., length=n) pads one.",
        )
    check_flag(OP, "return_lse", return_lse)
    scale = given_scale(OP, scale, q)
    out, lse = call(attention_op, (q, k, v, *plan.arguments, scale), q, backend)
    return (out, lse) if return_lse else out


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan_rows: Tensor,
    plan_lists: Tensor,
    bitmaps: Tensor,
    block_q: int,
    block_k: int,
    scale: float,
) -> None:
    """Checks everything but float64."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            fail(OP, name, "have shape (batch, length, heads, head_dim)", tuple(x.shape))
        if x.dtype not in (*KERNEL_DTYPES, torch.float64):
            raise TypeError(message(OP, name, "be float32, float16 or bfloat16", x.dtype, "Convert it with .to()."))
        if x.dtype != q.dtype:
            raise TypeError(message(OP, name, f"be {q.dtype} like q", x.dtype, "Convert it with .to()."))
        if x.device != q.device:
            fail(OP, name, f"be on {q.device} like q", x.device, f"Move it with .to({str(q.device)!r}).")
        if x.shape[3] > 1 and x.stride(3) != 1:
            fail(OP, name, "have a contiguous last dimension", f"strides {x.stride()}", "Call .contiguous() on it.")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        fail(OP, "k", f"have the batch {q.shape[0]} and the head_dim {q.shape[3]} of q", tuple(k.shape))
    if v.shape != k.shape:
        fail(OP, "v", f"have shape {tuple(k.shape)} like k", tuple(v.shape))
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        fail(OP, "k", f"have a number of heads that divides the {q.shape[2]} of q", k.shape[2])
    if not takes_head_dim(q.shape[3]):
        fail(
            OP,
            "head_dim",
            "be a multiple of 8 in [16, 256]",
            q.shape[3],
            "Pad q, k and v with zeros and pass the scale.",
        )
    check_plan(
        OP,
        q.device,
        (q.shape[0], q.shape[1]),
        k.shape[1],
        PlanArguments(plan_rows, plan_lists, bitmaps, block_q, block_k),
    )


def _fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check(q, *rest)
    if q.dtype == torch.float64:
        remedy = "Pass backend='reference', which computes in float64."
        raise TypeError(message(OP, "q", "be float32, float16 or bfloat16 for the kernels", q.dtype, remedy))
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _fake_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan_rows: Tensor,
    plan_lists: Tensor,
    bitmaps: Tensor,
    block_q: int,
    block_k: int,
    scale: float,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, plan_rows, plan_lists, bitmaps, block_q, block_k, scale)
    rows = (q.shape[0], q.shape[2], q.shape[1])
    for name, x, shape, dtype in (
        ("grad_out", grad_out, q.shape, q.dtype),
        ("out", out, q.shape, q.dtype),
        ("lse", lse, rows, torch.float32),
        ("grad_lse", grad_lse, rows, torch.float32),
    ):
        if x is not None and (tuple(x.shape) != tuple(shape) or x.dtype != dtype or x.device != q.device):
            fail(
                OP,
                name,
                f"be {dtype} of shape {tuple(shape)} on {q.device}",
                f"{x.dtype}, {tuple(x.shape)}, {x.device}",
            )
        if x is not None and x.dim() == 4 and x.stride(3) != 1:
            fail(OP, name, "have a contiguous last dimension", f"strides {x.stride()}")
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan_rows: Tensor,
    plan_lists: Tensor,
    bitmaps: Tensor,
    block_q: int,
    block_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    plan = PlanArguments(plan_rows, plan_lists, bitmaps, block_q, block_k)
    results: tuple[Tensor, Tensor] = reference.block_sparse_attention(
        q, k, v, dense_plan(plan, q.shape[1], k.shape[1]), scale
    )
    return results


def _reference_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan_rows: Tensor,
    plan_lists: Tensor,
    bitmaps: Tensor,
    block_q: int,
    block_k: int,
    scale: float,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = dense_plan(PlanArguments(plan_rows, plan_lists, bitmaps, block_q, block_k), q.shape[1], k.shape[1])

    def run(*leaves: Tensor) -> Any:
        return reference.block_sparse_attention(*leaves, mask, scale)

    gradients = torch.func.vjp(run, q, k, v)[1]
    results: tuple[Tensor, Tensor, Tensor] = gradients(
        (grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse)
    )
    return results


def _triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from pdkernels.triton.block_sparse_attention import forward

    return forward(*arguments)


def _triton_backward(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    from pdkernels.triton.block_sparse_attention import backward

    return backward(*arguments, **options)


def _example(draw: Draw) -> dict[str, Any]:
    mask = masks.noise_aware_causal(40, 8, 5)
    q, k, v = (draw.floats(2, mask.q_len, heads, 32) for heads in (4, 2, 2))
    return {"q": q, "k": k, "v": v, "plan": mask.plan(32, 32)}


def _example_backward(draw: Draw) -> dict[str, Any]:
    forward = _example(draw)
    return {**forward, "grad": draw.floats(*forward["q"].shape)}


attention_op = define(
    f"{OP}(Tensor q, Tensor k, Tensor v, {PLAN_SCHEMA}, float scale) -> (Tensor, Tensor)",
    fake=_fake,
    reference=_reference,
    triton=_triton,
    reference_check=_check,
    example=_example,
    gradients="own",
)
backward_op = define(
    f"{OP}_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {PLAN_SCHEMA}, "
    "float scale, Tensor? grad_lse=None) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    reference=_reference_backward,
    triton=_triton_backward,
    example=_example_backward,
    gradients="own",
    float64=True,
)


# What `torch.library.register_autograd` would generate, written out: before calling `setup_context` it walks the schema once
# per argument to fill in defaults, which more than doubles the host time of a forward pass.
class _Attention(torch.autograd.Function):
    """Both results get gradients; either may be absent."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan_rows: Tensor,
        plan_lists: Tensor,
        bitmaps: Tensor,
        block_q: int,
        block_k: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = attention_op(q, k, v, plan_rows, plan_lists, bitmaps, block_q, block_k, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, plan_rows, plan_lists, bitmaps)
        ctx.sizes = block_q, block_k, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, *others = ctx.saved_tensors
        refuse_tangents(OP, (grad_out, grad_lse, q, k, v))
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        elif grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        gradients = backward_op(grad_out, q, k, v, out, *others, *ctx.sizes, grad_lse)
        # None for the plan and the scale, which come after q, k and v.
        return tuple(gradient if needed else None for gradient, needed in zip_longest(gradients, ctx.needs_input_grad))


def _autograd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    refuse_tangents(OP, (q, k, v))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if torch._C._are_functorch_transforms_active():
            refuse_transforms(OP, "q, k and v")
        refuse_inference(OP, (q, k, v, *rest))
        results: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, *rest)  # type: ignore[no-untyped-call]
        return results
    with torch._C._AutoDispatchBelowAutograd():
        results = attention_op(q, k, v, *rest)
    return results


LIBRARY.impl(OP, _autograd, "Autograd")
refuse_second_derivative(OP)
