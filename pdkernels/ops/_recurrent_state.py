"""What the ops on recurrent states check, their empty results, and their examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import (
    check_choice,
    check_device,
    check_floats,
    check_index,
    check_indices,
    check_int,
    check_last_contiguous,
    check_number,
    check_type,
    fail,
    refuse,
)
from pdkernels.ops._library import Draw

ACTIVATIONS = ("none", "silu")


def _check_step(
    op: str,
    new: dict[str, Tensor],
    pending: dict[str, Tensor],
    state_lengths: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
    cache_rows: Tensor | None,
    pending_index: Tensor | None,
    parents: Tensor | None,
    keep: int | None,
) -> None:
    """What all steps share. `new`, `pending`: the inputs that are kept, in the same order, whose own shapes were checked."""
    first = next(iter(new.values()))
    (batch, rows), device = first.shape[:2], first.device
    check_index(op, "lengths", lengths, (None,), device)
    size = lengths.shape[0]
    if cache_rows is None and size != batch:
        fail(op, "lengths", f"have shape ({batch},) like the batch, or cache_rows be given", tuple(lengths.shape))
    check_index(op, "state_lengths", state_lengths, (size,), device)
    check_indices(op, (batch,), device, counts=counts, cache_rows=cache_rows)
    most: int | None = None
    for (name, tensor), (like, given) in zip(pending.items(), new.items(), strict=True):
        check_floats(op, name, tensor, like=given)
        if tensor.dim() != given.dim() or tensor.shape[0] != size or tensor.shape[2:] != given.shape[2:]:
            tail = "".join(f", {int(n)}" for n in given.shape[2:])
            fail(op, name, f"have shape ({size}, max_pending{tail}) like lengths and {like}", tuple(tensor.shape))
        most = tensor.shape[1] if most is None else most
        if tensor.shape[1] != most:
            fail(op, name, f"have {most} rows like the other pending inputs", tensor.shape[1])
    assert most is not None
    check_indices(op, (size, most), device, pending_index=pending_index)
    check_indices(op, (batch, rows), device, parents=parents)
    if keep is not None:
        check_int(op, "keep", keep, 0)
        if keep > most:
            fail(op, "keep", f"be at most max_pending ({most})", keep)
    elif counts is None and rows > most:
        remedy = "Keep more pending rows, or pass keep, which says how many of the last rows stay pending."
        fail(op, next(iter(new)), f"have at most max_pending ({most}) rows", rows, remedy)


def _check_state(
    op: str, state: Tensor, size: int, heads: int, keys: int, values: Tensor, k: str, key_heads: int
) -> None:
    check_type(isinstance(state, Tensor), op, "state", "be a tensor", type(state).__name__)
    # The state of a float64 reference is float64.
    wanted = torch.float64 if values.dtype == torch.float64 else torch.float32
    check_type(state.dtype == wanted, op, "state", f"be {wanted}", state.dtype, "Convert it with .to().")
    check_device(op, "state", state, values.device)
    expected = (size, heads, keys, values.shape[3])
    if tuple(state.shape) != expected:
        fail(op, "state", f"have shape {tuple(map(int, expected))}", tuple(state.shape))
    if min(state.shape[1:]) < 1:
        fail(op, "state", "have at least one head, key and value", tuple(state.shape))
    if key_heads < 1 or heads % key_heads:
        fail(op, k, f"have heads that divide the {int(heads)} heads of the state", key_heads)
    check_last_contiguous(op, "Allocate it so.", state=state)


def _check_heads(op: str, heads: int, device: torch.device, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            check_floats(op, name, tensor, (heads,))
            check_device(op, name, tensor, device)


def _check_rows(op: str, **tensors: Tensor) -> None:
    check_last_contiguous(op, "Call .contiguous() on it.", **tensors)


def fake_delta(
    state: Tensor,
    state_lengths: Tensor,
    pending_k: Tensor,
    pending_v: Tensor,
    pending_g: Tensor,
    pending_beta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lengths: Tensor,
    counts: Tensor | None = None,
    cache_rows: Tensor | None = None,
    pending_index: Tensor | None = None,
    parents: Tensor | None = None,
    keep: int | None = None,
    scale: float | None = None,
    l2norm_eps: float | None = None,
    A: Tensor | None = None,
    dt_bias: Tensor | None = None,
    sigmoid_beta: bool = False,
) -> Tensor:
    op = "gated_delta_"
    check_floats(op, "v", v, (None, None, None, None))
    batch, rows, heads = v.shape[:3]
    check_floats(op, "k", k, (batch, rows, None, None), like=v)
    check_floats(op, "q", q, k.shape, like=v)
    for name, tensor in (("g", g), ("beta", beta)):
        check_floats(op, name, tensor, (batch, rows, heads))
        check_device(op, name, tensor, v.device)
    new = {"v": v, "k": k, "g": g, "beta": beta}
    pending = {"pending_v": pending_v, "pending_k": pending_k, "pending_g": pending_g, "pending_beta": pending_beta}
    _check_step(op, new, pending, state_lengths, lengths, counts, cache_rows, pending_index, parents, keep)
    _check_state(op, state, lengths.shape[0], heads, k.shape[3], v, "k", k.shape[2])
    _check_rows(op, q=q, k=k, v=v)
    check_last_contiguous(op, "Allocate it so.", pending_k=pending_k, pending_v=pending_v)
    _check_heads(op, heads, v.device, A=A, dt_bias=dt_bias)
    refuse(A is None and dt_bias is not None, op, "dt_bias belongs to a decay that A makes", "Pass A too.")
    if scale is not None:
        check_number(op, "scale", scale)
    if l2norm_eps is not None:
        check_number(op, "l2norm_eps", l2norm_eps, 0.0, expectation="be 0 or more")
    return v.new_empty(v.shape)


def fake_selective(
    state: Tensor,
    state_lengths: Tensor,
    pending_x: Tensor,
    pending_B: Tensor,
    pending_dt: Tensor | None,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor | None,
    A: Tensor,
    lengths: Tensor,
    counts: Tensor | None = None,
    cache_rows: Tensor | None = None,
    pending_index: Tensor | None = None,
    parents: Tensor | None = None,
    keep: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float | None = None,
) -> Tensor:
    op = "selective_state_"
    check_floats(op, "x", x, (None, None, None, None))
    batch, rows, heads = x.shape[:3]
    check_floats(op, "B", B, (batch, rows, None, None), like=x)
    check_floats(op, "C", C, B.shape, like=x)
    new, pending = {"x": x, "B": B}, {"pending_x": pending_x, "pending_B": pending_B}
    if dt is not None:
        check_floats(op, "dt", dt, (batch, rows, heads))
        check_device(op, "dt", dt, x.device)
        check_type(pending_dt is not None, op, "pending_dt", "be a tensor where dt is given", "None")
        assert pending_dt is not None
        new["dt"], pending["pending_dt"] = dt, pending_dt
    else:
        check_type(pending_dt is None, op, "pending_dt", "be None where dt is None", "a tensor")
        refuse(
            dt_bias is not None or dt_softplus, op, "dt_bias and dt_softplus belong to dt, which is None", "Pass dt."
        )
    _check_step(op, new, pending, state_lengths, lengths, counts, cache_rows, pending_index, parents, keep)
    _check_state(op, state, lengths.shape[0], heads, B.shape[3], x, "B", B.shape[2])
    _check_rows(op, x=x, B=B, C=C)
    check_last_contiguous(op, "Allocate it so.", pending_x=pending_x, pending_B=pending_B)
    check_type(isinstance(A, Tensor), op, "A", "be a tensor", type(A).__name__)
    _check_heads(op, heads, x.device, A=A, D=D, dt_bias=dt_bias)
    check_number(op, "dt_min", dt_min)
    if dt_max is not None:
        check_number(op, "dt_max", dt_max)
    return x.new_empty(x.shape)


def fake_conv(
    state: Tensor,
    state_lengths: Tensor,
    pending: Tensor,
    x: Tensor,
    weight: Tensor,
    lengths: Tensor,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    cache_rows: Tensor | None = None,
    pending_index: Tensor | None = None,
    parents: Tensor | None = None,
    keep: int | None = None,
    activation: str = "none",
) -> Tensor:
    op = "short_conv_"
    check_floats(op, "x", x, (None, None, None))
    check_floats(op, "weight", weight, (x.shape[2], None), like=x)
    if min(weight.shape) < 1:
        fail(op, "weight", "have at least one channel and one column", tuple(weight.shape))
    _check_step(op, {"x": x}, {"pending": pending}, state_lengths, lengths, counts, cache_rows, pending_index, parents, keep)  # fmt: skip
    check_floats(op, "state", state, (lengths.shape[0], weight.shape[1] - 1, x.shape[2]), like=x)
    _check_rows(op, x=x, weight=weight)
    check_last_contiguous(op, "Allocate it so.", state=state, pending=pending)
    if bias is not None:
        check_floats(op, "bias", bias, (x.shape[2],), like=x)
    check_choice(op, "activation", activation, ACTIVATIONS)
    return x.new_empty(x.shape)


def _check_layers(op: str, state_lengths: list[Tensor], size: int, device: torch.device) -> None:
    layers = 0
    for i, tensor in enumerate(state_lengths):
        name = "state_lengths" if len(state_lengths) == 1 else f"state_lengths[{i}]"
        stacked = isinstance(tensor, Tensor) and tensor.dim() == 2
        check_index(op, name, tensor, (None, size) if stacked else (size,), device)
        layers += tensor.shape[0] if stacked else 1
    if layers == 0:
        fail(op, "state_lengths", "hold at least one layer", "none")


def fake_commit(
    lengths: Tensor,
    pending_index: Tensor,
    state_lengths: list[Tensor],
    counts: Tensor,
    source_index: Tensor | None = None,
    advance: bool = True,
) -> None:
    op = "state_commit_"
    check_index(op, "lengths", lengths, (None,), None)
    size, device = lengths.shape[0], lengths.device
    check_index(op, "pending_index", pending_index, (size, None), device)
    _check_layers(op, state_lengths, size, device)
    check_index(op, "counts", counts, (size,), device)
    if source_index is not None:
        check_index(op, "source_index", source_index, (size, None), device)


def fake_trim(lengths: Tensor, new_lengths: Tensor, state_lengths: list[Tensor]) -> None:
    op = "state_trim_"
    check_index(op, "lengths", lengths, (None,), None)
    size, device = lengths.shape[0], lengths.device
    check_index(op, "new_lengths", new_lengths, (size,), device)
    _check_layers(op, state_lengths, size, device)


def _example_step(draw: Draw) -> dict[str, Any]:
    """Two sequences of a cache, of which one has two accepted rows and the other none."""
    held = draw.ints(0, 9, 2)
    return {
        "state_lengths": held,
        "lengths": held + torch.tensor([2, 0]),
        "counts": torch.tensor([3, 2]),
        "pending_index": draw.ints(0, 3, 2, 4),
    }


def example_delta(draw: Draw) -> dict[str, Any]:
    def rows(batch: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates = draw.floats(batch, n, 2), draw.floats(batch, n, 2).sigmoid()
        return draw.floats(batch, n, 1, 9), draw.floats(batch, n, 2, 20), -gates[0].abs(), gates[1]

    pending, new = rows(2, 4), rows(2, 3)
    return {
        "state": draw.floats(2, 2, 9, 20, dtype=torch.float32),
        **dict(zip(("pending_k", "pending_v", "pending_g", "pending_beta"), pending)),
        "q": draw.floats(2, 3, 1, 9),
        **dict(zip(("k", "v", "g", "beta"), new)),
        "l2norm_eps": 1e-6,
        **_example_step(draw),
    }


def example_selective(draw: Draw) -> dict[str, Any]:
    return {
        "state": draw.floats(2, 2, 9, 20, dtype=torch.float32),
        "pending_x": draw.floats(2, 4, 2, 20),
        "pending_B": draw.floats(2, 4, 1, 9),
        "pending_dt": draw.floats(2, 4, 2),
        "x": draw.floats(2, 3, 2, 20),
        "B": draw.floats(2, 3, 1, 9),
        "C": draw.floats(2, 3, 1, 9),
        "dt": draw.floats(2, 3, 2),
        "A": -draw.floats(2).abs(),
        "D": draw.floats(2),
        "dt_softplus": True,
        **_example_step(draw),
    }


def example_conv(draw: Draw) -> dict[str, Any]:
    return {
        "state": draw.floats(2, 3, 40),
        "pending": draw.floats(2, 4, 40),
        "x": draw.floats(2, 3, 40),
        "weight": draw.floats(40, 4),
        "bias": draw.floats(40),
        "activation": "silu",
        **_example_step(draw),
    }


def example_commit(draw: Draw) -> dict[str, Any]:
    held = draw.ints(0, 9, 3)
    return {
        "lengths": held + torch.tensor([0, 1, 2]),
        "pending_index": draw.ints(0, 7, 3, 8),
        "state_lengths": held.expand(2, 3).clone(),
        "counts": torch.tensor([3, 0, 2]),
        "source_index": draw.rows(3, 4, of=6),
    }


def example_trim(draw: Draw) -> dict[str, Any]:
    held = draw.ints(0, 9, 2, 3)
    least = held.amax(0)
    return {"lengths": least + 4, "new_lengths": least + draw.ints(0, 4, 3), "state_lengths": held}
