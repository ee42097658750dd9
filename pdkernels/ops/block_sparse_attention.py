"""Attention over a tile plan, for training and prefill: forward and backward.

The kernels read a `TilePlan` and nothing else about a mask: skipped tiles cost nothing, full tiles need no mask,
partial tiles load one bit per pair. Every block of results is owned by one program or thread, so nothing is summed
across them: results are identical bit for bit from run to run, whatever the number of threads and whatever else is in
the batch.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from pdkernels import masks
from pdkernels._attention import (
    AttentionArguments,
    GradientArguments,
    check_heads,
    check_input,
    check_plan,
    checked_scale,
    checked_sinks,
    checked_softcap,
    refuse_float64,
    refuse_softcap,
)
from pdkernels._validation import check_flag, check_type, fail, message, refuse_tangents
from pdkernels.backends import Backend
from pdkernels.masks import TilePlan
from pdkernels.masks.tile_plan import dense_plan
from pdkernels.ops._gradients import refuse_inference, refuse_second_derivative, refuse_transforms
from pdkernels.ops.library import LIBRARY, OPS, Draw, call, define, schema_of
from pdkernels.reference import block_sparse_attention as reference

__all__ = ["block_sparse_attention"]

OP = "block_sparse_attention"
# The arguments whose gradients the backward op returns, in its order. That of the sinks: `_of_sinks`.
DIFFERENTIABLE = ("q", "k", "v")


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, *,
    scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    return_lse: Literal[False] = ..., backend: Backend = ...
) -> Tensor: ...  # fmt: skip


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, *,
    scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    return_lse: Literal[True], backend: Backend = ...
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TilePlan,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale q k^T) v`` over the pairs that a plan shows. Differentiable.

    Any mask can be planned: see `pdkernels.masks`. Work and time grow with the tiles that the plan visits, not with all
    pairs, and no array of pairs is ever stored, forward or backward.

    Args:
        q: ``(batch, q_len, q_heads, head_dim)``, float32, float16 or bfloat16 (float64 with ``backend="reference"``);
            head_dim a multiple of 8 in ``[16, 512]``.
        k, v: ``(batch, kv_len, kv_heads, head_dim)``, dtype of q; kv_heads divides q_heads, and query head ``h`` reads
            KV head ``h // (q_heads // kv_heads)``. All three may have any strides with a contiguous last dimension.
        plan: of a mask of q_len rows and kv_len columns, on the device of q: ``mask.plan(block_q, block_k, q.device)``.
            All samples and heads share it; a stacked plan (`TilePlan.stack`) has one for each sample.
        scale: of the scores, finite in float32; None means ``head_dim ** -0.5``.
        sinks: ``(q_heads,)``, any floating-point dtype: one more score for each row of a head, not scaled and without a
            value, so that the weights of the values sum to less than 1, as in gpt-oss. -inf means none. None: no head
            has one. Differentiable.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)``, as in Gemma 2; sinks do not. None: they stay. On
            the CPU alone, and without gradients.
        return_lse: also return the log-sum-exp of each row's scores.
        backend: see `pdkernels.show_config`.

    Returns:
        ``out``, shape and dtype of q, contiguous. With `return_lse` ``(out, lse)``: the natural log-sum-exp of the
        visible scores, ``(batch, q_heads, q_len)`` float32, differentiable too; a sink is one of them. Rows that see
        nothing are zero, with a log-sum-exp of -inf, or that of their sink; they receive and pass on zero gradients.

    Raises:
        ValueError: shapes or strides that do not fit, a plan for other lengths, another batch or another device.
        TypeError: dtypes that do not fit, a mask instead of a plan.
        NotImplementedError: a backend that does not serve the device; a second derivative, one in forward mode or one
            by ``torch.func``; a soft cap on a GPU, or with a gradient (the reference has them all).

    Softmax and sums run in float32. Results repeat bit for bit and do not depend on the number of threads or on the
    rest of the batch. ``torch.compile`` sees one op.

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
        expectation = f"have {q.shape[1]} rows and {k.shape[1]} columns like q and k"
        fail(
            OP,
            "plan",
            expectation,
            f"{plan.q_len} and {plan.kv_len}",
            "Build the mask for these lengths; pack(..., length=n) pads one.",
        )
    check_flag(OP, "return_lse", return_lse)
    arguments = AttentionArguments(
        q, k, v, *plan.arguments, checked_scale(OP, scale, q), checked_sinks(OP, sinks, q), checked_softcap(OP, softcap)
    )
    out, lse = call(attention_op, arguments, q, backend)
    return (out, lse) if return_lse else out


def _check(arguments: AttentionArguments) -> None:
    """Checks everything but float64."""
    q, k, v = arguments.q, arguments.k, arguments.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            fail(OP, name, "have shape (batch, length, heads, head_dim)", tuple(x.shape))
        check_input(OP, name, x, q)
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        fail(OP, "k", f"have the batch {q.shape[0]} and the head_dim {q.shape[3]} of q", tuple(k.shape))
    if v.shape != k.shape:
        fail(OP, "v", f"have shape {tuple(k.shape)} like k", tuple(v.shape))
    check_heads(OP, arguments, "k")
    check_plan(OP, q.device, (q.shape[0], q.shape[1]), k.shape[1], arguments.plan)


def _fake(arguments: AttentionArguments) -> tuple[Tensor, Tensor]:
    _check(arguments)
    refuse_float64(OP, arguments.q)
    return arguments.q.new_empty(arguments.q.shape), arguments.q.new_empty(arguments.lse_shape, dtype=torch.float32)


def _fake_backward(arguments: GradientArguments) -> tuple[Tensor, Tensor, Tensor]:
    _check(arguments.forward)
    refuse_softcap(f"{OP}_backward", arguments.forward.softcap)
    q, rows = arguments.forward.q, arguments.forward.lse_shape
    for name, x, shape, dtype in (
        ("grad_out", arguments.grad_out, q.shape, q.dtype),
        ("out", arguments.out, q.shape, q.dtype),
        ("lse", arguments.lse, rows, torch.float32),
        ("grad_lse", arguments.grad_lse, rows, torch.float32),
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
    dq, dk, dv = (x.new_empty(x.shape) for x in arguments.forward[:3])
    return dq, dk, dv


def _reference(arguments: AttentionArguments) -> tuple[Tensor, Tensor]:
    mask = dense_plan(arguments.plan, arguments.q.shape[1], arguments.k.shape[1])
    results: tuple[Tensor, Tensor] = reference.block_sparse_attention(
        *arguments[:3], mask, arguments.scale, arguments.sinks, arguments.softcap
    )
    return results


def _reference_backward(arguments: GradientArguments) -> tuple[Tensor, Tensor, Tensor]:
    def run(*leaves: Tensor) -> Any:
        changed: dict[str, Any] = dict(zip(DIFFERENTIABLE, leaves))
        return _reference(arguments.forward._replace(**changed))

    gradients = torch.func.vjp(run, *(getattr(arguments.forward, name) for name in DIFFERENTIABLE))[1]
    grad_lse = torch.zeros_like(arguments.lse) if arguments.grad_lse is None else arguments.grad_lse
    results: tuple[Tensor, Tensor, Tensor] = gradients((arguments.grad_out, grad_lse))
    return results


def _triton(arguments: AttentionArguments) -> tuple[Tensor, Tensor]:
    refuse_softcap(OP, arguments.softcap)
    from pdkernels.ops._gluon import forward_for

    specialised = forward_for(arguments)
    if specialised is not None:
        return specialised(arguments)
    from pdkernels.triton.block_sparse_attention import forward

    return forward(arguments)


def _triton_backward(arguments: GradientArguments) -> tuple[Tensor, Tensor, Tensor]:
    from pdkernels.ops._gluon import backward_for

    specialised = backward_for(arguments)
    if specialised is not None:
        return specialised(arguments)
    from pdkernels.triton.block_sparse_attention import backward

    return backward(arguments)


def _example(draw: Draw) -> dict[str, Any]:
    mask = masks.noise_aware_causal(40, 8, 5)
    q, k, v = (draw.floats(2, mask.q_len, heads, 32) for heads in (4, 2, 2))
    return {"q": q, "k": k, "v": v, "plan": mask.plan(32, 32), "sinks": draw.floats(4)}


def _example_backward(draw: Draw) -> dict[str, Any]:
    forward = _example(draw)
    return {**forward, "grad": draw.floats(*forward["q"].shape)}


attention_op = define(
    f"{OP}({schema_of(AttentionArguments)}) -> (Tensor out, Tensor lse)",
    structure=AttentionArguments,
    fake=_fake,
    reference=_reference,
    triton=_triton,
    reference_check=_check,
    example=_example,
    gradients="own",
)
backward_op = define(
    f"{OP}_backward({schema_of(GradientArguments)}) -> (Tensor dq, Tensor dk, Tensor dv)",
    structure=GradientArguments.of,
    fake=_fake_backward,
    reference=_reference_backward,
    triton=_triton_backward,
    example=_example_backward,
    gradients="own",
    float64=True,
)
TENSORS = OPS[OP].tensors
OTHERS = tuple(i for i in range(len(AttentionArguments._fields)) if i not in TENSORS)
DIFFERENTIATED = tuple(AttentionArguments._fields.index(name) for name in DIFFERENTIABLE)
SINKS = AttentionArguments._fields.index("sinks")


def _of_sinks(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks. Their value is 0, so it is minus their weight times rowsum(dO * O)."""
    delta = (grad_out.float() * out.float()).sum(-1).transpose(1, 2)
    if grad_lse is not None:
        delta = delta - grad_lse
    # Rows without any score have a log-sum-exp of -inf, and a sink of -inf has no weight.
    weights = torch.where(sinks[:, None].isneginf(), 0, (sinks[:, None] - lse).exp())
    return -torch.where(weights == 0, 0, weights * delta).sum((0, 2))


# What `torch.library.register_autograd` would generate, written out: before calling `setup_context` it walks the schema
# once per argument to fill in defaults, which more than doubles the host time of a forward pass.
class _Attention(torch.autograd.Function):
    """Both results get gradients; either may be absent."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = attention_op(*arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *[arguments[i] for i in TENSORS])
        ctx.others = [arguments[i] for i in OTHERS]
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, *arguments = ctx.saved_tensors
        for i, other in zip(OTHERS, ctx.others):
            arguments.insert(i, other)
        refuse_tangents(OP, (grad_out, grad_lse, *arguments))
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        elif grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        needed = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * len(arguments)
        for i, gradient in zip(DIFFERENTIATED, backward_op(grad_out, grad_lse, out, lse, *arguments)):
            gradients[i] = gradient if needed[i] else None
        if needed[SINKS]:
            gradients[SINKS] = _of_sinks(grad_out, grad_lse, out, lse, arguments[SINKS])
        return tuple(gradients)


def _autograd(*arguments: Any) -> tuple[Tensor, Tensor]:
    refuse_tangents(OP, arguments)
    if torch.is_grad_enabled():
        structure: Any = AttentionArguments(*arguments)  # with those that are left out, which do not arrive
        if any([structure[i] is not None and structure[i].requires_grad for i in (*DIFFERENTIATED, SINKS)]):
            if torch._C._are_functorch_transforms_active():
                refuse_transforms(OP, "q, k, v and sinks")
            refuse_softcap(OP, structure.softcap)
            refuse_inference(OP, structure)
            results: tuple[Tensor, Tensor] = _Attention.apply(*structure)  # type: ignore[no-untyped-call]
            return results
    with torch._C._AutoDispatchBelowAutograd():
        results = attention_op(*arguments)
    return results


LIBRARY.impl(OP, _autograd, "Autograd")
refuse_second_derivative(OP)
