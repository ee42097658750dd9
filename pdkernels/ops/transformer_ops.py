"""The ops between the matrix products of a layer: residual norms, gates, and rotary embedding.

The norms and the gate with silu have gradients; rotations write their input and refuse one that would need a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import (
    check_cuda_batch,
    check_device,
    check_floats,
    check_index,
    check_indices,
    check_last_contiguous,
    check_number,
    check_shape,
    check_type,
    fail,
    message,
    refuse,
    refuse_tangents,
)
from pdkernels.backends import Backend
from pdkernels.ops._gradients import register_gradients
from pdkernels.ops.library import NAMESPACE, Draw, call, define
from pdkernels.reference import transformer_ops as reference

__all__ = ["add_rms_norm", "apply_rope_", "apply_rope_append_", "gelu_and_mul", "silu_and_mul"]

NORM, GATE, GELU = "add_rms_norm", "silu_and_mul", "gelu_and_mul"


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


STYLES = ("half", "interleaved")


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    next_weight: Tensor | None = None,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """``y = rms_norm(x + residual) * weight``, and ``rms_norm(y) * next_weight`` where there is a next weight.

    One pass for the end of a sublayer and the start of the next: with both weights for a sandwich block; without the
    first, so that `y` is the sum, for a layer that norms only before its sublayers. The sum, the mean square and the
    division are computed in float32; the sum is not rounded before it is normed. The normed value is rounded to the
    dtype and then multiplied by the weight in that dtype, as the published models do. The second norm sees the rounded
    `y`.

    Args:
        x: ``(..., E)`` float32, float16 or bfloat16. Rows may be strided; any other layout is copied first.
        residual: like `x`; None: `x` alone is normed.
        weight: ``(E,)``, dtype of `x`; None: `y` is the sum, which requires a residual and a next weight.
        next_weight: like `weight`; None: no second result.
        eps: added to the mean square.
        backend: see `pdkernels.show_config`. The reference takes float64 too.

    Returns:
        ``(y, next)``, each contiguous and like `x`; `next` is None without a `next_weight`.

    Raises:
        ValueError: shapes that do not fit; `eps` below 0.
        TypeError: dtypes that do not fit.
        NotImplementedError: a second derivative, in forward mode, or by ``torch.func`` (the reference has them).

    Deterministic; a row's result does not depend on other rows. Differentiable: gradients are computed in float32 from
    the inputs, which alone are kept, and pass the roundings of the forward pass unchanged. Those of the weights do not
    depend on threads.

    Source: Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning", section 3.2; Zhang and Sennrich, "Root
    Mean Square Layer Normalization", equation 4.

    Example:
        >>> import torch, pdkernels as pd
        >>> x, residual = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
        >>> y, following = pd.add_rms_norm(x, residual, torch.ones(2), next_weight=torch.tensor([1.0, 2.0]))
        >>> y, following
        (tensor([[0.8485, 1.1314]]), tensor([[0.8485, 2.2627]]))
    """
    y, following = call(add_rms_norm_op, (x, residual, weight, next_weight, eps), x, backend)
    return y, None if next_weight is None else following


def silu_and_mul(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``silu(x[..., :F]) * x[..., F:]``: the first half gates the second. In float32, rounded once.

    Args:
        x: ``(..., 2F)`` float32, float16 or bfloat16. Rows may be strided; any other layout is copied first.
        backend: see `pdkernels.show_config`. The reference takes float64 too.

    Returns:
        ``(..., F)``, contiguous, dtype of `x`.

    Raises:
        ValueError: an odd last dimension.
        TypeError: dtypes that do not fit.
        NotImplementedError: a second derivative, in forward mode, or by ``torch.func`` (the reference has them).

    Deterministic and differentiable. Source: Shazeer, "GLU Variants Improve Transformer", equation 5.

    Example:
        >>> import torch, pdkernels as pd
        >>> pd.silu_and_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
        tensor([[0.0000, 1.4621]])
    """
    out: Tensor = call(silu_and_mul_op, (x,), x, backend)
    return out


def gelu_and_mul(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``gelu(x[..., :F]) * x[..., F:]``, where gelu is its approximation with tanh: as `silu_and_mul`, for Gemma. In
    float32, rounded once.

    Args:
        x: ``(..., 2F)`` float32, float16 or bfloat16. Rows may be strided; any other layout is copied first.
        backend: see `pdkernels.show_config`. The reference takes float64 too, and gradients flow through it.

    Returns:
        ``(..., F)``, contiguous, dtype of `x`.

    Raises:
        ValueError: an odd last dimension.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Deterministic. Gates far below 0 keep their digits, which ``1 + tanh`` loses. Source: Hendrycks and Gimpel, "Gaussian
    Error Linear Units (GELUs)", section 2; Shazeer, "GLU Variants Improve Transformer", equation 5.

    Example:
        >>> import torch, pdkernels as pd
        >>> pd.gelu_and_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
        tensor([[0.0000, 1.6824]])
    """
    out: Tensor = call(gelu_and_mul_op, (x,), x, backend)
    return out


def apply_rope_append_(
    qkv: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    counts: Tensor | None = None,
    block_table: Tensor | None = None,
    style: str = "interleaved",
    slots: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Adds the bias and rotates q and k in place; K and V go to the cache, after the committed rows or at `slots`.

    Row i of sequence b is at position ``lengths[b] + i``. q and k are rotated in float32 from the unrounded sum with
    the bias and rounded once; v does not change. K and V of the rows ``i < counts[b]`` are stored at their positions, a
    draft until `kv_commit_`. The other rows are rotated but not stored; where their position is past the tables they
    use the last entry.

    With `slots` row i is at ``lengths[b] + slots[b, i]`` instead, and overwrites that slot: one op for rows that are
    recomputed in place, adjacent or not. A row whose slot is -1 is padding: it is not read, changed or stored. The
    other rows of a sequence must have different slots; if two share one, each element stored there is from either of
    them.

    Args:
        qkv: ``(B, R, heads + 2 * kv_heads, D)``, float32, float16 or bfloat16: q, k and v of each row. Updated in
            place. Any strides with a contiguous last dimension; `kv_heads` are those of the cache.
        bias: ``(heads + kv_heads, D)``, dtype of `qkv`, added to q and k; None adds nothing.
        cos, sin: ``(P, D)`` float32, contiguous: a rotation is ``x * cos + swap(x) * sin``, so that the sine is
            negative for the first of each pair (as `pdkernels.models.architectures.rope.rope_tables` has it).
        k_cache, v_cache: one layer, ``(B, capacity, kv_heads, D)``, or with `block_table`
            ``(num_pages, page_size, kv_heads, D)``; dtype of `qkv`. Not the memory of `qkv`.
        lengths: ``(B,)`` int32 or int64, committed rows of each sequence; with `slots`, the base of those.
        counts: ``(B,)`` int32 or int64, rows to store; None: all of them.
        block_table: ``(B, max_pages)`` int32 or int64; position ``p`` lives in page ``block_table[b, p // page_size]``.
        style: which components are a pair: ``"interleaved"`` 2i and 2i + 1, ``"half"`` i and i + D/2.
        slots: ``(B, R)`` int32 or int64, -1 or more; None: ``0 .. R - 1``. Slots of rows past `counts` are arbitrary.
        backend: see `pdkernels.show_config`. The reference takes float64 too, with tables of float64 or float32.

    Raises:
        ValueError: shapes that do not fit; lengths, counts, slots or pages out of range, or a valid row past the tables
            (nothing is written then). On CUDA such a sequence is left as it was, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Deterministic where slots differ; a row's result does not depend on other rows.

    Source: Su et al., "RoFormer", equation 34; the learned bias of Geiping et al., section 3.2.

    Example:
        >>> import torch, pdkernels as pd
        >>> qkv = torch.ones(1, 1, 3, 2)                                       # one head each of q, k and v
        >>> cos, sin = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [-1.0, 1.0]])
        >>> k, v = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
        >>> pd.apply_rope_append_(qkv, None, cos, sin, k, v, torch.tensor([1]))
        >>> k[0, :, 0], v[0, 1, 0]
        (tensor([[ 0.,  0.],
                [-1.,  1.],
                [ 0.,  0.],
                [ 0.,  0.]]), tensor([1., 1.]))
    """
    op = "apply_rope_append_"
    if not isinstance(style, str) or style not in STYLES:
        fail(op, "style", "be 'half' or 'interleaved'", repr(style))
    arguments = (qkv, bias, cos, sin, k_cache, v_cache, lengths, counts, block_table, style == "interleaved", slots)
    call(apply_rope_append_op, arguments, qkv, backend)


def apply_rope_(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, style: str = "half", backend: Backend = "auto"
) -> None:
    """Rotary embedding in place: row r of sequence b is rotated by position ``positions[b, r]``.

    ``x * cos + swap(x) * sin`` in float32, rounded once. q and k of one product may be a view of it: heads and rows
    outside the view are not touched.

    Args:
        x: ``(B, R, heads, D)`` float32, float16 or bfloat16, D even. Updated in place. Any strides with a contiguous
            last dimension.
        cos, sin: ``(P, D)`` float32, contiguous, as `pdkernels.models.architectures.rope.rope_tables` makes them: the
            sine is negative for the first of each pair.
        positions: ``(B, R)``, or ``(R,)`` for all sequences, int32 or int64, of any strides: rows of the tables.
        style: which components are a pair: ``"half"`` i and i + D/2, ``"interleaved"`` 2i and 2i + 1.
        backend: see `pdkernels.show_config`. The reference takes float64 too, with tables of float64 or float32.

    Raises:
        ValueError: shapes that do not fit; a position outside the tables (nothing is written then). On CUDA the row of
            such a position is left as it was, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: dtypes that do not fit.
        NotImplementedError: an input that requires a gradient while gradients are recorded.

    Deterministic; a row's result does not depend on other rows, and has the bits that `apply_rope_append_` gives
    without a bias.

    Source: Su et al., "RoFormer", equation 34.

    Example:
        >>> import torch, pdkernels as pd
        >>> x = torch.tensor([[3.0, 4.0], [3.0, 4.0]]).view(1, 2, 1, 2)        # two rows of one head
        >>> cos, sin = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [-1.0, 1.0]])
        >>> pd.apply_rope_(x, cos, sin, torch.tensor([0, 1]))
        >>> x[0, :, 0]
        tensor([[ 3.,  4.],
                [-4.,  3.]])
    """
    op = "apply_rope_"
    if not isinstance(style, str) or style not in STYLES:
        fail(op, "style", "be 'half' or 'interleaved'", repr(style))
    call(apply_rope_op, (x, cos, sin, positions, style == "interleaved"), x, backend)


def _fake_add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, next_weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    op = "add_rms_norm"
    check_floats(op, "x", x)
    if x.dim() == 0:
        fail(op, "x", "have shape (..., E)", tuple(x.shape))
    if residual is not None:
        check_floats(op, "residual", residual, x.shape, like=x, whose=" like x")
    remedy = "Only a call with a residual and a next_weight may leave it out."
    refuse(weight is None and (residual is None or next_weight is None), op, "weight is missing", remedy)
    for name, tensor in (("weight", weight), ("next_weight", next_weight)):
        if tensor is not None:
            check_floats(op, name, tensor, x.shape[-1:], like=x)
    check_number(op, "eps", eps, 0, expectation="be at least 0")
    return x.new_empty(x.shape), x.new_empty(0 if next_weight is None else x.shape)


def _fake_gate(op: str, x: Tensor) -> Tensor:
    check_floats(op, "x", x)
    if x.dim() == 0 or x.shape[-1] % 2 != 0:
        fail(op, "x", "have shape (..., 2F)", tuple(x.shape))
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _fake_silu_and_mul(x: Tensor) -> Tensor:
    return _fake_gate(GATE, x)


def _fake_gelu_and_mul(x: Tensor) -> Tensor:
    return _fake_gate(GELU, x)


def _check_tables(op: str, cos: Tensor, sin: Tensor, head_dim: int, device: torch.device) -> None:
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
        if tensor.dim() != 2 or tensor.shape[0] < 1 or tensor.shape[1] != head_dim:
            fail(op, name, f"have shape (P, {head_dim}) with at least one position", tuple(tensor.shape))
        check_shape(op, name, tensor, cos.shape, " like cos")
        check_device(op, name, tensor, device)
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.dtype != cos.dtype:
            raise TypeError(message(op, name, "be float32", tensor.dtype))
        if not tensor.is_contiguous():
            fail(op, name, "be contiguous", f"strides {tensor.stride()}", "Call .contiguous() on it.")


def _fake_apply_rope_append(
    qkv: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    counts: Tensor | None = None,
    block_table: Tensor | None = None,
    interleaved: bool = True,
    slots: Tensor | None = None,
) -> None:
    op = "apply_rope_append_"
    check_floats(op, "qkv", qkv)
    if qkv.dim() != 4:
        fail(op, "qkv", "have shape (B, R, heads + 2 * kv_heads, D)", tuple(qkv.shape))
    batch, rows, all_heads, head_dim = qkv.shape
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_floats(op, name, tensor, like=qkv)
        if tensor.dim() != 4 or tensor.shape[3] != head_dim:
            fail(op, name, f"have shape (B or pages, slots, kv_heads, {head_dim})", tuple(tensor.shape))
        check_shape(op, name, tensor, k_cache.shape, " like k_cache")
    check_last_contiguous(op, qkv=qkv, k_cache=k_cache, v_cache=v_cache)
    kv_heads = k_cache.shape[2]
    heads = all_heads - 2 * kv_heads
    if kv_heads < 1 or heads < kv_heads or heads % kv_heads != 0:
        fail(op, "qkv", f"have heads + 2 * {kv_heads} heads, heads a multiple of the cache's {kv_heads}", all_heads)
    if head_dim < 2 or head_dim % 2 != 0:
        fail(op, "qkv", "have an even head_dim of at least 2", head_dim)
    if bias is not None:
        check_floats(op, "bias", bias, (heads + kv_heads, head_dim), like=qkv)
    _check_tables(op, cos, sin, head_dim, qkv.device)
    if block_table is None and k_cache.shape[0] != batch:
        fail(op, "k_cache", f"have a batch of {batch} like qkv", k_cache.shape[0])
    if block_table is not None and k_cache.shape[1] < 1:
        fail(op, "k_cache", "have a page size of at least 1", 0)
    check_cuda_batch(op, "qkv", qkv)
    check_index(op, "lengths", lengths, (batch,), qkv.device)
    check_indices(op, (batch,), qkv.device, counts=counts)
    check_indices(op, (batch, None), qkv.device, block_table=block_table)
    check_indices(op, (batch, rows), qkv.device, slots=slots)


def _reference_apply_rope_append(*arguments: Any) -> None:
    # The schema's defaults are passed only if a caller gives them.
    interleaved = arguments[9] if len(arguments) > 9 else True
    slots = arguments[10] if len(arguments) > 10 else None
    reference.apply_rope_append_(*arguments[:9], style="interleaved" if interleaved else "half", slots=slots)


def _fake_apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False) -> None:
    op = "apply_rope_"
    check_floats(op, "x", x)
    if x.dim() != 4:
        fail(op, "x", "have shape (B, R, heads, D)", tuple(x.shape))
    batch, rows, _, head_dim = x.shape
    if head_dim < 2 or head_dim % 2 != 0:
        fail(op, "x", "have an even head_dim of at least 2", head_dim)
    check_last_contiguous(op, x=x)
    _check_tables(op, cos, sin, head_dim, x.device)
    shared = isinstance(positions, Tensor) and positions.dim() == 1
    check_index(op, "positions", positions, (rows,) if shared else (batch, rows), x.device)


def _reference_apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False) -> None:
    reference.apply_rope_(x, cos, sin, positions, "interleaved" if interleaved else "half")


def _example_add_rms_norm(draw: Draw) -> dict[str, Any]:
    return {
        "x": draw.floats(5, 64),
        "residual": draw.floats(5, 64),
        "weight": draw.floats(64),
        "next_weight": draw.floats(64),
    }


def _example_gate(draw: Draw) -> dict[str, Any]:
    return {"x": draw.floats(5, 128)}


def _example_tables(draw: Draw) -> dict[str, Any]:
    return {name: draw.floats(20, 16, dtype=torch.float32) for name in ("cos", "sin")}


def _example_apply_rope_append(draw: Draw) -> dict[str, Any]:
    k, v, lengths = draw.floats(2, 20, 2, 16), draw.floats(2, 20, 2, 16), draw.ints(0, 16, 2)
    qkv, tables = draw.floats(2, 3, 6, 16), _example_tables(draw)
    return {"qkv": qkv, "bias": None, **tables, "k_cache": k, "v_cache": v, "lengths": lengths}


def _example_apply_rope(draw: Draw) -> dict[str, Any]:
    return {"x": draw.floats(2, 3, 6, 16), **_example_tables(draw), "positions": draw.ints(0, 19, 2, 3)}


add_rms_norm_op = define(
    "add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? next_weight=None, float eps=1e-6) -> (Tensor y, Tensor next)",
    fake=_fake_add_rms_norm,
    reference=reference.add_rms_norm,
    example=_example_add_rms_norm,
    gradients="own",
)
silu_and_mul_op = define(
    "silu_and_mul(Tensor x) -> (Tensor out)",
    fake=_fake_silu_and_mul,
    reference=reference.silu_and_mul,
    example=_example_gate,
    gradients="own",
)
gelu_and_mul_op = define(
    "gelu_and_mul(Tensor x) -> (Tensor out)",
    fake=_fake_gelu_and_mul,
    reference=reference.gelu_and_mul,
    example=_example_gate,
)
apply_rope_append_op = define(
    "apply_rope_append_(Tensor(a!) qkv, Tensor? bias, Tensor cos, Tensor sin, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor lengths, "
    "Tensor? counts=None, Tensor? block_table=None, bool interleaved=True, Tensor? slots=None) -> ()",
    fake=_fake_apply_rope_append,
    reference=_reference_apply_rope_append,
    example=_example_apply_rope_append,
)
apply_rope_op = define(
    "apply_rope_(Tensor(a!) x, Tensor cos, Tensor sin, Tensor positions, bool interleaved=False) -> ()",
    fake=_fake_apply_rope,
    reference=_reference_apply_rope,
    example=_example_apply_rope,
)
register()
