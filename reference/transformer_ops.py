"""A transformer between its matrix products, as plain PyTorch.

Source: Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth Approach", section 3.2 (norms
around every sublayer), in the order of operations of the published model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_cache import _fail, _Slots


def _wide(x: Tensor) -> Tensor:
    """float32 for half precision: the dtype of intermediate sums and products."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` is wide. The normalised value is rounded to the dtype of the weight, then multiplied by it in that dtype."""
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(weight.dtype) * weight


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, next_weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """``y = rms_norm(x + residual) * weight`` and ``rms_norm(y) * next_weight``; shapes as in ``pdkernels.add_rms_norm``.

    The sum is not rounded before the norm; `y` is rounded before the next norm. Without a residual `x` itself is normalised;
    without a weight `y` is the sum. Without a next weight the second result is an empty tensor.

    >>> y, _ = add_rms_norm(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]), torch.ones(2))
    >>> y  # (3, 4) over the root of its mean square, 12.5
    tensor([0.8485, 1.1314])
    """
    total = _wide(x) if residual is None else _wide(x) + _wide(residual)
    y = total.to(x.dtype) if weight is None else _rms_norm(total, weight, eps)
    return y, x.new_empty(0) if next_weight is None else _rms_norm(_wide(y), next_weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate, up = x.chunk(2, -1)``, rounded once.

    >>> silu_and_mul(torch.tensor([0.0, 100.0, 2.0, 3.0]))
    tensor([  0., 300.])
    """
    gate, up = _wide(x).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor) -> Tensor:
    """``gelu(gate) * up`` of ``gate, up = x.chunk(2, -1)``, by the approximation with tanh, rounded once.

    >>> gelu_and_mul(torch.tensor([0.0, 100.0, 2.0, 3.0]))
    tensor([  0., 300.])
    """
    gate, up = _wide(x).chunk(2, -1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def add_rms_norm_backward(
    grad: Tensor | None,
    grad_next: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x` (the residual has the same), of the weight and of the next weight, from those of ``y`` and ``next``.

    A norm ``h w`` with ``h = s x`` passes ``s (g - h mean(g h))`` on to x, where ``g = w grad``, and the sum of ``grad h`` over
    rows to w. Roundings count as the identity. A gradient of nothing is empty.

    >>> x, weight, grad = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0]])
    >>> dx, dweight, _ = add_rms_norm_backward(grad, None, x, None, weight, None, 0.0)
    >>> dx, dweight
    (tensor([[ 0.1810, -0.1358]]), tensor([0.8485, 0.0000]))
    """

    def through(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        h, g = x * scale, grad * _wide(weight)
        by_row = grad * _wide(h.to(weight.dtype))
        return scale * (g - h * (g * h).mean(-1, keepdim=True)), by_row.reshape(-1, x.shape[-1]).sum(0)

    total = _wide(x) if residual is None else _wide(x) + _wide(residual)
    y, _ = add_rms_norm(x, residual, weight, None, eps)
    back = torch.zeros_like(total) if grad is None else _wide(grad)
    of_weights = [x.new_empty(0), x.new_empty(0)]
    if grad_next is not None and next_weight is not None:
        passed, of_weights[1] = through(_wide(grad_next), _wide(y), next_weight)
        back = back + passed
    if weight is not None:
        back, of_weights[0] = through(back, total, weight)
    return back.to(x.dtype), of_weights[0].to(x.dtype), of_weights[1].to(x.dtype)


def silu_and_mul_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x` from that of the result, rounded once.

    >>> silu_and_mul_backward(torch.tensor([1.0]), torch.tensor([0.0, 3.0]))
    tensor([1.5000, 0.0000])
    """
    gate, up = _wide(x).chunk(2, -1)
    wide, opened = _wide(grad), torch.sigmoid(gate)
    slope = opened * (1 + gate * torch.sigmoid(-gate))
    return torch.cat((wide * up * slope, wide * gate * opened), -1).to(x.dtype)


def _turned(wide: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """`wide` is ``(B, R, heads, D)``, the cosines and sines of its rows are ``(B, R, D)``."""
    swapped = (
        wide.roll(wide.shape[-1] // 2, -1) if style == "half" else wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    )
    return wide * cos.unsqueeze(2) + swapped * sin.unsqueeze(2)


def apply_rope_append_(
    qkv: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    counts: Tensor | None = None,
    block_table: Tensor | None = None,
    style: str = "interleaved",
    slots: Tensor | None = None,
) -> None:
    """q and k of row i get their bias and the rotation of position ``lengths[b] + slots[b, i]``, and k and v of the rows that
    count are stored there.

    Without slots it is ``lengths[b] + i``. A slot of -1 leaves the whole row unchanged. A row whose position is past the
    tables (only rows that do not count) uses their last entry.
    """
    op = "apply_rope_append_"
    batch, rows = qkv.shape[:2]
    kv_heads = k_cache.shape[2]
    turned_heads = qkv.shape[2] - kv_heads
    store = _Slots(op, k_cache, block_table)
    offsets = torch.arange(rows, device=qkv.device).expand(batch, -1) if slots is None else slots
    targets = {}
    for b, length in enumerate(lengths.tolist()):
        count = rows if counts is None else int(counts[b])
        store.check(b, length, 0, rows)
        if not 0 <= count <= rows:
            _fail(op, "counts", f"be in [0, {rows}]", count, b)
        if slots is None and length + count > min(store.capacity, len(cos)):
            _fail(op, "lengths + counts", "be at most the capacity and the positions of the tables", length + count, b)
        for i, slot in enumerate(offsets[b].tolist()):
            counted = slot >= 0 and i < count
            if slot < -1 or (counted and slot >= min(store.capacity, len(cos)) - length):
                _fail(op, "lengths + slots", "lie in the cache and in the tables", length + slot, b)
            if counted:
                targets[b, i] = store(b, length + slot)

    # A slot far past the tables must not overflow in the sum.
    positions = (lengths[:, None] + offsets.clamp(max=len(cos))).clamp(max=len(cos) - 1)
    turned = qkv[:, :, :turned_heads]
    wide = turned.to(cos.dtype) if bias is None else turned.to(cos.dtype) + bias.to(cos.dtype)
    rotated = _turned(wide, cos[positions], sin[positions], style)
    turned.copy_(torch.where((offsets < 0)[:, :, None, None], turned, rotated.to(qkv.dtype)))
    for (b, i), slot in targets.items():
        k_cache[slot] = qkv[b, i, turned_heads - kv_heads : turned_heads]
        v_cache[slot] = qkv[b, i, turned_heads:]


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, style: str = "half") -> None:
    """Row r of sequence b is rotated by position ``positions[b, r]``, or ``positions[r]`` if all sequences share them.

    >>> x = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
    >>> apply_rope_(x, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.tensor([0]))  # a quarter turn
    >>> x.flatten()
    tensor([-4.,  3.])
    """
    positions = positions.expand(x.shape[:2])
    for b, row in ((positions < 0) | (positions >= len(cos))).nonzero().tolist():
        _fail("apply_rope_", f"positions[{b}, {row}]", f"be in [0, {len(cos) - 1}]", int(positions[b, row]), b)
    x.copy_(_turned(x.to(cos.dtype), cos[positions], sin[positions], style))
