"""What an op writes has a place for each entry: of an expanded tensor only the last write would be left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.ops._library import SCHEMAS

PLAN = pd.masks.causal(4).plan(16, 16)
TABLE = torch.ones(8, 16)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def kv(slots: int = 8, heads: int = 2) -> Tensor:
    return torch.randn(2, slots, heads, 16)


def attention(k_cache: Tensor, v_cache: Tensor, backend: str) -> None:
    new = (kv(4), kv(4), kv(4))
    pd.speculative_attention_append_(*new, k_cache, v_cache, ints(2), PLAN, backend=backend)


def apply_rope_append(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, backend: str) -> None:
    pd.apply_rope_append_(qkv, None, TABLE, TABLE, k_cache, v_cache, ints(2), backend=backend)


def advance(
    tokens: Tensor,
    recurrences: Tensor,
    stable: Tensor,
    width: Tensor,
    cursor: Tensor,
    advance: Tensor,
    steps: Tensor,
    remaining: Tensor,
    backend: str,
) -> None:
    before = (tokens, ints(2, 4), recurrences, stable, width, cursor, advance, steps, remaining)
    pd.recurrence_advance_(*before, inner_recurrence=1, backend=backend)


def unmask(tokens: Tensor, backend: str) -> None:
    pd.unmask_(tokens, torch.full((2, 4), 3), torch.rand(2, 4), mask_token=0, quota=2, backend=backend)


# Each op with the tensors that it writes.
CALLS: dict[str, tuple[Callable[..., None], dict[str, Tensor]]] = {
    "kv_append_": (
        lambda k_cache, v_cache, backend: pd.kv_append_(
            k_cache, v_cache, kv(3)[None], kv(3)[None], ints(2), backend=backend
        ),
        {"k_cache": kv()[None], "v_cache": kv()[None]},
    ),
    "kv_commit_": (
        lambda k_cache, v_cache, lengths, backend: pd.kv_commit_(
            k_cache, v_cache, lengths, ints(2) + 1, ints(2, 1) + 1, backend=backend
        ),
        {"k_cache": kv(), "v_cache": kv(), "lengths": ints(2)},
    ),
    "kv_trim_": (lambda lengths, backend: pd.kv_trim_(lengths, ints(2), backend=backend), {"lengths": ints(2) + 1}),
    "speculative_attention_append_": (attention, {"k_cache": kv(), "v_cache": kv()}),
    "apply_rope_append_": (apply_rope_append, {"qkv": kv(4, 6), "k_cache": kv(), "v_cache": kv()}),
    "apply_rope_": (lambda x, backend: pd.apply_rope_(x, TABLE, TABLE, ints(4), backend=backend), {"x": kv(4)}),
    "unmask_": (unmask, {"tokens": ints(2, 4)}),
    "select_stale_rows_": (
        lambda v_cache, backend: pd.select_stale_rows_(kv(4), v_cache, ints(2), count=2, backend=backend),
        {"v_cache": kv()},
    ),
    "add_cached_rows_": (
        lambda cached, backend: pd.add_cached_rows_(kv()[:, :, 0], cached, kv(1)[:, :, 0], ints(2, 1), backend=backend),
        {"cached": kv()[:, :, 0]},
    ),
    "recurrence_advance_": (
        advance,
        {
            "tokens": ints(2, 5),
            "recurrences": ints(2, 4),
            "stable": ints(2, 4),
            "width": ints(2) + 4,
            "cursor": ints(2),
            "advance": ints(2),
            "steps": ints(2),
            "remaining": ints(2) + 9,
        },
    ),
}
CASES = [
    (op, name, dim)
    for op, (_, tensors) in CALLS.items()
    for name, tensor in tensors.items()
    for dim in range(tensor.dim())
    if tensor.shape[dim] > 1
    and (tensor.dim() < 3 or dim < tensor.dim() - 1)  # of rows of numbers the last one is contiguous
]


def test_every_op_that_writes_is_looked_at() -> None:
    writes = {name for name, schema in SCHEMAS.items() if "!" in schema}
    assert writes == {*CALLS, "log_step_"}  # which takes contiguous tensors alone


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("op, name, dim", CASES)
def test_expanded_is_refused_and_left_alone(op: str, name: str, dim: int, backend: str) -> None:
    run, tensors = CALLS[op]
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    expanded = tensors[name].narrow(dim, 0, 1).expand_as(tensors[name])
    tensors[name] = expanded
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    text = rf"pdkernels\.{op}: {name} must have a place in memory for each entry, got shape .* with strides .*\. It is written; pass a copy"
    with pytest.raises(ValueError, match=text):
        run(**tensors, backend=backend)
    assert all(torch.equal(tensors[key], before[key]) for key in tensors)


@pytest.mark.parametrize("op", CALLS)
def test_whole_tensors_and_views_are_taken(op: str) -> None:
    """Every other entry of a larger tensor is a place of its own."""
    run, tensors = CALLS[op]
    apart = {key: tensor.repeat_interleave(2, 0)[::2] for key, tensor in tensors.items()}
    run(**apart, backend="auto")


def test_layers_in_one_place() -> None:
    layers, new, one = kv()[None].expand(3, -1, -1, -1, -1), kv(3)[None].expand(3, -1, -1, -1, -1), kv()[None]
    with pytest.raises(ValueError, match="v_cache must have a place in memory for each entry"):
        pd.kv_append_(layers.contiguous(), layers, new, new, ints(2))
    pd.kv_append_(layers.contiguous(), layers.contiguous(), new, new, ints(2))  # what is read may lie anywhere
    pd.kv_append_(one.expand(1, -1, -1, -1, -1), one.clone(), new[:1], new[:1], ints(1).expand(2))


def test_nothing_may_lie_anywhere() -> None:
    pd.unmask_(ints(1, 0).expand(2, 0), ints(2, 0), mask_token=0)
    pd.kv_append_(kv(0)[:1].expand(2, 0, 2, 16), kv(0), kv(0), kv(0), ints(2))


def test_pages_in_one_place() -> None:
    pages, table = kv(), torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="k_cache must have a place in memory for each entry"):
        pd.kv_append_(pages[:1].expand_as(pages), pages.clone(), kv(3), kv(3), ints(2), block_table=table)


def test_attention_that_writes_nothing_reads_it() -> None:
    """A prefix that all sequences share."""
    one, new = kv()[:1], (kv(4), kv(4), kv(4))
    shared = pd.speculative_attention(*new, one.expand(2, -1, -1, -1), one.expand(2, -1, -1, -1), ints(2) + 5, PLAN)
    apart = pd.speculative_attention(*new, one.repeat(2, 1, 1, 1), one.repeat(2, 1, 1, 1), ints(2) + 5, PLAN)
    assert torch.equal(shared, apart)
