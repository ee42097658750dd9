"""What the ops on recurrent states check, their empty results, and their examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._recurrent_state import ConvArguments, DeltaArguments, SelectiveArguments, StepArguments
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
from pdkernels.ops.library import Draw

ACTIVATIONS = ("none", "silu")
UPDATES = "pending_update"
"""What is kept of a row of the gated delta rule in place of an input, in the state's dtype."""


def _check_step(op: str, new: dict[str, Tensor], pending: dict[str, Tensor], step: StepArguments) -> None:
    """What all steps share. `new`: inputs whose own shapes were checked; `pending`: where those of their rows are kept,
    in the same order."""
    state_lengths, lengths, counts, cache_rows, pending_index, parents, keep = step
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
        if name == UPDATES:
            check_floats(op, name, tensor)
        else:
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


def _check_exact(op: str, name: str, tensor: Tensor, values: Tensor) -> None:
    """The dtype of states: that of a float64 reference is float64."""
    check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
    wanted = torch.float64 if values.dtype == torch.float64 else torch.float32
    check_type(tensor.dtype == wanted, op, name, f"be {wanted}", tensor.dtype, "Convert it with .to().")


def _check_state(
    op: str, state: Tensor, size: int, heads: int, keys: int, values: Tensor, k: str, key_heads: int
) -> None:
    _check_exact(op, "state", state, values)
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


def fake_delta(given: DeltaArguments) -> Tensor:
    op, q, k, v, g, beta = "gated_delta_", given.q, given.k, given.v, given.g, given.beta
    check_floats(op, "v", v, (None, None, None, None))
    batch, rows, heads = v.shape[:3]
    check_floats(op, "k", k, (batch, rows, None, None), like=v)
    check_floats(op, "q", q, k.shape, like=v)
    for name, tensor in (("g", g), ("beta", beta)):
        check_floats(op, name, tensor, (batch, rows, heads))
        check_device(op, name, tensor, v.device)
    pending = {UPDATES: given.pending_update, "pending_k": given.pending_k, "pending_g": given.pending_g}
    _check_exact(op, UPDATES, given.pending_update, v)
    _check_step(op, {"v": v, "k": k, "g": g}, pending, given.step)
    _check_state(op, given.state, given.lengths.shape[0], heads, k.shape[3], v, "k", k.shape[2])
    _check_rows(op, q=q, k=k, v=v)
    check_last_contiguous(op, "Allocate it so.", pending_k=given.pending_k, pending_update=given.pending_update)
    _check_heads(op, heads, v.device, A=given.A, dt_bias=given.dt_bias)
    lonely = given.A is None and given.dt_bias is not None
    refuse(lonely, op, "dt_bias belongs to a decay that A makes", "Pass A too.")
    if given.scale is not None:
        check_number(op, "scale", given.scale)
    if given.l2norm_eps is not None:
        check_number(op, "l2norm_eps", given.l2norm_eps, 0.0, expectation="be 0 or more")
    return v.new_empty(v.shape)


def fake_selective(given: SelectiveArguments) -> Tensor:
    op, x, B, C, dt, pending_dt = "selective_state_", given.x, given.B, given.C, given.dt, given.pending_dt
    check_floats(op, "x", x, (None, None, None, None))
    batch, rows, heads = x.shape[:3]
    check_floats(op, "B", B, (batch, rows, None, None), like=x)
    check_floats(op, "C", C, B.shape, like=x)
    new, pending = {"x": x, "B": B}, {"pending_x": given.pending_x, "pending_B": given.pending_B}
    if dt is not None:
        check_floats(op, "dt", dt, (batch, rows, heads))
        check_device(op, "dt", dt, x.device)
        check_type(pending_dt is not None, op, "pending_dt", "be a tensor where dt is given", "None")
        assert pending_dt is not None
        new["dt"], pending["pending_dt"] = dt, pending_dt
    else:
        check_type(pending_dt is None, op, "pending_dt", "be None where dt is None", "a tensor")
        said = given.dt_bias is not None or given.dt_softplus
        refuse(said, op, "dt_bias and dt_softplus belong to dt, which is None", "Pass dt.")
    _check_step(op, new, pending, given.step)
    _check_state(op, given.state, given.lengths.shape[0], heads, B.shape[3], x, "B", B.shape[2])
    _check_rows(op, x=x, B=B, C=C)
    check_last_contiguous(op, "Allocate it so.", pending_x=given.pending_x, pending_B=given.pending_B)
    check_type(isinstance(given.A, Tensor), op, "A", "be a tensor", type(given.A).__name__)
    _check_heads(op, heads, x.device, A=given.A, D=given.D, dt_bias=given.dt_bias)
    check_number(op, "dt_min", given.dt_min)
    if given.dt_max is not None:
        check_number(op, "dt_max", given.dt_max)
    return x.new_empty(x.shape)


def fake_conv(given: ConvArguments) -> Tensor:
    op, x, weight = "short_conv_", given.x, given.weight
    check_floats(op, "x", x, (None, None, None))
    check_floats(op, "weight", weight, (x.shape[2], None), like=x)
    if min(weight.shape) < 1:
        fail(op, "weight", "have at least one channel and one column", tuple(weight.shape))
    _check_step(op, {"x": x}, {"pending": given.pending}, given.step)
    check_floats(op, "state", given.state, (given.lengths.shape[0], weight.shape[1] - 1, x.shape[2]), like=x)
    _check_rows(op, x=x, weight=weight)
    check_last_contiguous(op, "Allocate it so.", state=given.state, pending=given.pending)
    if given.bias is not None:
        check_floats(op, "bias", given.bias, (x.shape[2],), like=x)
    check_choice(op, "activation", given.activation, ACTIVATIONS)
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
    return {
        "state": draw.floats(2, 2, 9, 20, dtype=torch.float32),
        "pending_k": draw.floats(2, 4, 1, 9),
        "pending_update": draw.floats(2, 4, 2, 20, dtype=torch.float32),
        "pending_g": -draw.floats(2, 4, 2).abs(),
        "q": draw.floats(2, 3, 1, 9),
        "k": draw.floats(2, 3, 1, 9),
        "v": draw.floats(2, 3, 2, 20),
        "g": -draw.floats(2, 3, 2).abs(),
        "beta": draw.floats(2, 3, 2).sigmoid(),
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
