"""Sharding rules of our ops for DTensors: each rank computes its own sequences, heads or rows, without communication.

A rule gives the dimensions of tensors that may be sharded together, and the sharded dimension of each result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pdkernels._attention import LAYOUTS
from pdkernels.ops.filter_logits import TENSORS
from pdkernels.ops.library import OPS

if TYPE_CHECKING:  # its import takes a second
    from torch.distributed.tensor import Placement


class Cut(NamedTuple):
    """One way to shard a call."""

    inputs: dict[str, int]
    """Sharded dimensions by names of tensors; the others are replicated."""
    outputs: Sequence[int | None]
    """Sharded dimensions of the results; None: a partial sum on every rank."""


Given = dict[str, Any]
"""The arguments of a call by name; tensors know their `shape` and `mesh`."""


def _fits(x: Any, dim: int) -> bool:
    """Whether every dimension of the mesh divides this dimension of the tensor evenly."""
    return all(x.shape[dim] % size == 0 for size in x.mesh.shape)


def _attention(arguments: Given, results: Sequence[int]) -> Iterator[Cut]:
    """Shards by sequences and by heads. Heads only if the ranks divide the KV heads."""
    layouts = {name: LAYOUTS[name] for name in arguments if name in LAYOUTS}
    batches, heads = (
        {name: layout.index(letter) for name, layout in layouts.items() if letter in layout} for letter in "bh"
    )
    stacked = {"plan_rows": 0} if len(arguments["plan_rows"].shape) == 3 else {}
    yield Cut({**batches, **stacked}, [0] * len(results))
    keys = arguments.get("k", arguments.get("k_new"))
    if _fits(keys, 2):
        yield Cut(heads, results)


def _speculative(arguments: Given) -> Iterator[Cut]:
    if arguments.get("cu_seqlens") is not None:  # the rows of all sequences are concatenated
        return
    ways = list(_attention(arguments, [2, 1]))
    # Pages are shared by all sequences.
    yield from ways if arguments.get("block_table") is None else ways[1:]


def _rows(arguments: Given, names: Sequence[str], results: int) -> Iterator[Cut]:
    """Shards by any row dimension of the first tensor; the other tensors of `names` have the same row dimensions."""
    for dim in range(len(arguments[names[0]].shape) - 1):
        yield Cut(dict.fromkeys(names, dim), [dim] * results)


def _linear(arguments: Given) -> Iterator[Cut]:
    last = len(arguments["x"].shape) - 1
    yield from _rows(arguments, ["x"], 1)
    yield Cut({"weight": 0, "bias": 0}, [last])
    if arguments.get("bias") is None:
        yield Cut({"x": last, "weight": 1}, [None])


def _norm_backward(arguments: Given) -> Iterator[Cut]:
    """The gradients of the weights are sums over rows."""
    for cut in _rows(arguments, ["x", "grad", "grad_next", "residual"], 1):
        yield Cut(cut.inputs, [*cut.outputs, None, None])


def _statistics(arguments: Given, name: str) -> Iterator[Cut]:
    """Shards by rows. Sampling needs positions, because otherwise it uses the index of the row, which differs on a
    rank; the rows of filters are for groups of rows."""
    uses_row_index = arguments.get("positions") is None and arguments.get("temperature", 0.0) > 0
    filtered = any(arguments.get(tensor) is not None for tensor in TENSORS)
    if arguments.get("row_index") is None and not uses_row_index and not filtered:
        yield from _rows(arguments, [name, "seeds", "steps", "positions"], 7)


def _sequences(arguments: Given, names: Sequence[str], results: int) -> Iterator[Cut]:
    yield Cut(dict.fromkeys(names, 0), [0] * results)


RULES: dict[str, Callable[[Given], Iterator[Cut]]] = {
    "block_sparse_attention": partial(_attention, results=[2, 1]),
    "block_sparse_attention_backward": partial(_attention, results=[2, 2, 2]),
    "speculative_attention": _speculative,
    "linear": _linear,
    "add_rms_norm_backward": _norm_backward,
    "silu_and_mul_backward": partial(_rows, names=["x", "grad"], results=1),
    "add_rms_norm": partial(_rows, names=["x", "residual"], results=2),
    "silu_and_mul": partial(_rows, names=["x"], results=1),
    "gelu_and_mul": partial(_rows, names=["x"], results=1),
    "kv_quantize": partial(_rows, names=["x"], results=1),
    "token_statistics": partial(_statistics, name="logits"),
    "linear_token_statistics": partial(_statistics, name="hidden"),
    "logit_divergence": partial(_rows, names=["logits", "previous"], results=4),
    "gather_rows": partial(_sequences, names=["x", "index"], results=1),
    "verify_draft": partial(_sequences, names=["draft", "predictions", "draft_lengths", "refill"], results=5),
}


def _ways(op: str, *args: Any, **kwargs: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
    """The result for `register_sharding`: placements of results and arguments, for each way to shard."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = OPS[op].arguments
    arguments = {**dict(zip(names, args)), **kwargs}
    tensors = [hasattr(value, "mesh") for value in arguments.values()]
    cuts = list(RULES[op](arguments))
    results = len(OPS[op].overload._schema.returns)
    replicated: tuple[list[Placement], list[Placement | None]] = (
        [Replicate()] * results,
        [Replicate() if tensor else None for tensor in tensors],
    )
    ways = [replicated]
    for cut in cuts:
        inputs: list[Placement | None] = [
            (Shard(cut.inputs[name]) if name in cut.inputs else Replicate()) if tensor else None
            for name, tensor in zip(arguments, tensors)
        ]
        outputs: list[Placement] = [Partial() if dim is None else Shard(dim) for dim in cut.outputs]
        ways.append((outputs, inputs))
    return ways


@cache
def register_dtensor() -> tuple[str, ...]:
    """Registers the sharding of our ops with DTensor; returns the names of the ops registered. Idempotent.

    Attention goes by sequences or by heads (if the mesh divides the KV heads), forward and backward; row-wise ops go by
    any dimension of rows; `linear` also by columns of its result and by the width that it sums over. A call on tensors
    that are sharded otherwise gathers them first, as DTensor does for any op. Ops that write into their arguments take
    no DTensor: call them on ``x.to_local()``. Plain tensors mixed with DTensors, such as those of a plan, need
    `torch.distributed.tensor.experimental.implicit_replication`.

    Example:
        >>> from pdkernels.distributed import register_dtensor
        >>> "block_sparse_attention" in register_dtensor()
        True
    """
    from torch.distributed.tensor import experimental

    for op in RULES:
        overload: torch._ops.OpOverload = OPS[op].overload
        experimental.register_sharding(overload)(partial(_ways, op))
    return tuple(RULES)
