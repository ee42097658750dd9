"""Sequences with more rows than blocks share them: each block takes several, and its check of the sequence stays linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops import test_apply_rope_append as rope
from tests.ops import test_feature_cache as features
from tests.ops.feature_cache_cases import CPU, make_selection, make_sum
from tests.ops.implementations import implementation
from tests.ops.recurrence_cases import make_rows
from tests.ops.test_recurrence import check_inject

# The most blocks of a sequence in csrc/cuda/transformer_ops.cu and csrc/cuda/feature_cache.cu.
ROPE, ROWS = 192, 1024


def rope_case(rows: int, **options: Any) -> rope.Case:
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 2, "capacity": 3 * rows}
    return rope.make_case(3, rows=rows, **sizes | options)


WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {"counts": False},
    "pages": {"page_size": 7},
    "slots": {"slots": True},
    "slots in pages": {"slots": True, "page_size": 16},
}


@pytest.mark.parametrize("way", WAYS)
def test_rope_append(impl, way: str) -> None:
    case = rope_case(ROPE + 90, **WAYS[way])
    rope.check(case, case.moved(impl.device).run(impl.apply_rope_append_))


@pytest.mark.parametrize("way", ["pages", "slots in pages"])
def test_rope_append_leaves_a_sequence_alone_for_its_last_row(impl, way: str) -> None:
    case = rope_case(ROPE + 90, **WAYS[way])
    slots, stored = case.where()
    last = int((case.lengths[0] + slots[0])[stored[0]].max())
    case.block_table[0, last // WAYS[way]["page_size"]] = 10**6
    actual = case.moved(impl.device)
    if impl.raises:
        with pytest.raises(ValueError, match="block_table"):
            actual.run(impl.apply_rope_append_)
    else:
        actual.run(impl.apply_rope_append_)
    assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), case.bytes()))


@pytest.mark.parametrize("update", ["all", "selected", "none"])
def test_select_stale_rows(impl, update: str) -> None:
    sizes = {"batch": 1, "kv_heads": 1, "rows": ROWS + 70, "capacity": ROWS + 90, "page_size": 3}
    features.check_run(impl, make_selection(4, max_selected=9, update=update, counts=False, quota=False, **sizes))


def test_select_leaves_a_sequence_alone_for_its_last_page(impl) -> None:
    case = make_selection(4, batch=1, kv_heads=1, rows=ROWS + 70, capacity=ROWS + 90, page_size=3, counts=False)
    case.block_table[0, (int(case.starts[0]) + ROWS + 69) // 3] = -1
    actual = case.moved(impl.device)
    if impl.raises:
        with pytest.raises(ValueError, match="block_table"):
            actual.run(impl.select_stale_rows_)
    else:
        assert (actual.run(impl.select_stale_rows_) == -1).all()
    assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), case.bytes()))


@pytest.mark.parametrize("rows", [ROWS + 1, 2 * ROWS + 1])
def test_add_cached_rows(impl, rows: int) -> None:
    features.check_sum(impl, make_sum(6, batch=1, rows=rows, replaced=40, width=8, dtype=torch.float16))


def rows_of(op: str) -> Callable[[Any, int], Callable[[], object]]:
    """A call on so many rows."""
    if op == "apply_rope_append_":
        return lambda impl, rows: lambda: rope_case(rows, slots=True, page_size=4).run(impl.apply_rope_append_)
    if op == "add_cached_rows_":
        return lambda impl, rows: lambda: make_sum(1, batch=1, rows=rows, width=8).moved(CPU).run(impl.add_cached_rows_)

    def select(impl: Any, rows: int) -> Callable[[], object]:
        v, cache = torch.randn(1, rows, 1, 8), torch.randn(rows, 1, 1, 8)
        table = torch.arange(rows)[None]
        return lambda: impl.select_stale_rows_(v, cache, torch.tensor([0]), max_selected=3, block_table=table)

    return select


@pytest.mark.parametrize(
    ("op", "most"), [("apply_rope_append_", ROPE), ("select_stale_rows_", ROWS + 1), ("add_cached_rows_", ROWS)]
)
def test_the_blocks_that_check_a_sequence_are_bounded(op: str, most: int) -> None:
    """Every block checks all rows: with a block a row that would be quadratic."""
    impl, call = implementation("cudasim"), rows_of(op)
    assert impl.blocks(call(impl, 40)) <= 41
    assert impl.blocks(call(impl, most + 300)) <= most


def test_a_prompt_may_have_more_rows_than_the_second_dimension_of_a_grid(impl) -> None:
    check_inject(impl, make_rows(2, batch=1, rows=2**16 + 5, size=1), noise=0.0)
