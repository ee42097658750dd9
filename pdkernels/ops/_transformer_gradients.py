"""The backward passes of `add_rms_norm` and `silu_and_mul`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check_floats, check_number, fail, refuse, refuse_tangents
from pdkernels.ops._gradients import register_gradients
from pdkernels.ops.library import NAMESPACE, Draw, define
from pdkernels.reference import transformer_ops as reference

NORM, GATE = "add_rms_norm", "silu_and_mul"


def _fake_add_rms_norm_backward(
    grad: Tensor | None,
    grad_next: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    check_floats(NORM, "x", x)
    if x.dim() == 0:
        fail(NORM, "x", "have shape (..., E)", tuple(x.shape))
    for name, tensor in (("grad", grad), ("grad_next", grad_next), ("residual", residual)):
        if tensor is not None:
            check_floats(NORM, name, tensor, x.shape, like=x, whose=" like x")
    for name, tensor in (("weight", weight), ("next_weight", next_weight)):
        if tensor is not None:
            check_floats(NORM, name, tensor, x.shape[-1:], like=x)
    refuse(grad_next is None and next_weight is not None, NORM, "grad_next is missing beside next_weight")
    refuse(grad_next is not None and next_weight is None, NORM, "next_weight is missing beside grad_next")
    refuse(grad is None and grad_next is None, NORM, "grad and grad_next are missing", "Pass one of them, or both.")
    either = weight is not None or next_weight is not None
    refuse(not either, NORM, "weight and next_weight are missing", "Pass one of them, or both.")
    check_number(NORM, "eps", eps, 0, expectation="be at least 0")
    of_weights = [x.new_empty(0 if w is None else x.shape[-1]) for w in (weight, next_weight)]
    return x.new_empty(x.shape), of_weights[0], of_weights[1]


def _fake_silu_and_mul_backward(grad: Tensor, x: Tensor) -> Tensor:
    check_floats(GATE, "x", x)
    if x.dim() == 0 or x.shape[-1] % 2 != 0:
        fail(GATE, "x", "have shape (..., 2F)", tuple(x.shape))
    check_floats(GATE, "grad", grad, (*x.shape[:-1], x.shape[-1] // 2), like=x)
    return x.new_empty(x.shape)


def _example_add_rms_norm_backward(draw: Draw) -> dict[str, Any]:
    rows = {name: draw.floats(5, 64) for name in ("x", "residual", "grad")}
    return {**rows, "weight": draw.floats(64), "next_weight": draw.floats(64)}


def _example_silu_and_mul_backward(draw: Draw) -> dict[str, Any]:
    return {"x": draw.floats(5, 128), "grad": draw.floats(5, 64)}


norm_backward_op = define(
    f"{NORM}_backward(Tensor? grad, Tensor? grad_next, Tensor x, Tensor? residual, Tensor? weight, Tensor? next_weight, float eps)"
    " -> (Tensor dx, Tensor dweight, Tensor dnext_weight)",
    fake=_fake_add_rms_norm_backward,
    reference=reference.add_rms_norm_backward,
    example=_example_add_rms_norm_backward,
    gradients="own",
)
gate_backward_op = define(
    f"{GATE}_backward(Tensor grad, Tensor x) -> (Tensor dx)",
    fake=_fake_silu_and_mul_backward,
    reference=reference.silu_and_mul_backward,
    example=_example_silu_and_mul_backward,
    gradients="own",
)


class _AddRmsNorm(torch.autograd.Function):
    """Either result may have no gradient. The backward pass recomputes values of the rows, so only inputs are saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, next_weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, following = getattr(torch.ops, NAMESPACE).add_rms_norm.default(x, residual, weight, next_weight, eps)
        ctx.set_materialize_grads(False)
        if next_weight is None:
            ctx.mark_non_differentiable(following)
        ctx.save_for_backward(x, residual, weight, next_weight)
        ctx.eps = eps
        return y, following

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_next: Tensor | None) -> tuple[Tensor | None, ...]:
        x, residual, weight, next_weight = ctx.saved_tensors
        refuse_tangents(NORM, (grad, grad_next, x, residual, weight, next_weight))
        if grad_next is None:
            next_weight = None
        if grad is None and grad_next is None:
            return (None,) * 5
        dx = grad
        of_weights: tuple[Tensor | None, ...] = (None, None)
        if weight is not None or next_weight is not None:
            dx, *of_weights = norm_backward_op(grad, grad_next, x, residual, weight, next_weight, ctx.eps)
        found = (dx, None if residual is None else dx, *of_weights)
        given = (x, residual, weight, next_weight)
        needed = ctx.needs_input_grad
        return (*(d if n and of is not None else None for d, n, of in zip(found, needed, given)), None)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out: Tensor = getattr(torch.ops, NAMESPACE).silu_and_mul.default(x)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        refuse_tangents(GATE, (grad, x))
        dx: Tensor = gate_backward_op(grad, x)
        return dx


def register() -> None:
    """Once both ops are defined."""
    ops = getattr(torch.ops, NAMESPACE)
    register_gradients(ops.add_rms_norm.default, _AddRmsNorm)
    register_gradients(ops.silu_and_mul.default, _SiluAndMul)
