"""Speculative attention by the CPU kernels of every vector unit: see test_block_sparse_attention_levels.py."""

from __future__ import annotations

import os

import pytest
import torch

from pdkernels.masks import SegmentMask, causal, full, pack
from pdkernels.reference.speculative_attention import speculative_attention as reference
from tests.harness.error_budget import assert_within_budget
from tests.ops.attention_cases import DTYPES
from tests.ops.kv_cases import copy_of
from tests.ops.speculative_cases import (
    TAILS,
    Inputs,
    Results,
    assert_stored,
    in_pages,
    make_inputs,
    make_rows,
    with_room,
)

SHAPES = [(16, 2, 2), (40, 4, 2), (64, 7, 1), (128, 2, 1)]
PAGES = [0, 1, 16]


def run(ops: object, inputs: Inputs, tail: str) -> Results:
    plan = TAILS[tail].plan(32, 48)
    parts = (*plan.arguments, inputs.q.shape[-1] ** -0.5)
    return Results(*ops.speculative_attention(*inputs[:6], *parts, inputs.block_table))


@pytest.mark.parametrize("tail", TAILS)
def test_within_the_error_budget(level_ops: object, tail: str) -> None:
    """Dtypes, shapes and pages cycle independently; AMX only adds bfloat16."""
    mask, turn = TAILS[tail], list(TAILS).index(tail)
    dtype = torch.bfloat16 if os.environ["PDKERNELS_CPU_ISA"] == "amx" else DTYPES[turn % len(DTYPES)]
    head_dim, heads, kv_heads = SHAPES[turn % len(SHAPES)]
    options = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": PAGES[turn % len(PAGES)]}
    inputs = make_inputs(mask.q_len, (0, 37, 150), dtype=dtype, **options)
    exact, same = (
        reference(*typed[:6], mask.dense(), block_table=typed.block_table)
        for typed in (inputs.to(torch.float64), inputs)
    )
    for name, *tensors in zip(Results._fields, run(level_ops, inputs, tail), exact, same):
        assert_within_budget(*tensors, name=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_splits_of_a_long_prefix(level_ops: object, dtype: torch.dtype) -> None:
    """Beyond 4096 slots there are several splits, whatever the length; a sequence by itself gets the same bits."""
    inputs = make_inputs(42, (4200, 0, 90), slots=4300, heads=2, kv_heads=1, head_dim=32, dtype=dtype)
    results = run(level_ops, inputs, "quadratic")
    dense = TAILS["quadratic"].dense()
    for name, *tensors in zip(
        Results._fields, results, reference(*inputs.to(torch.float64)[:6], dense), reference(*inputs[:6], dense)
    ):
        assert_within_budget(*tensors, name=name)
    alone = run(level_ops, inputs.sequence(2), "quadratic")
    assert all(torch.equal(a[2:], b) for a, b in zip(results, alone))


@pytest.mark.parametrize("page_size", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_stored(level_ops: object, dtype: torch.dtype, page_size: int) -> None:
    inputs = make_inputs(42, (37, 0, 150), slots=200, dtype=dtype)
    rows = make_rows(inputs, "both")
    inputs = with_room(inputs, rows, page_size) if page_size else inputs
    written, plan = inputs.map(copy_of), TAILS["quadratic"].plan(32, 48)
    parts = (*plan.arguments, inputs.q.shape[-1] ** -0.5)
    results = level_ops.speculative_attention_append_(
        *written[:6], *parts, written.block_table, None, None, 0, None, 0.0, *rows
    )
    assert all(torch.equal(a, b) for a, b in zip(results, run(level_ops, inputs, "quadratic")))
    assert_stored(written[3:5], inputs, rows)


GROUPS = [(dtype, 2, 40) for dtype in DTYPES]
GROUPS += [
    (torch.float32, 1, 64),
    (torch.float32, 3, 16),
    (torch.float16, 4, 88),
    (torch.float32, 5, 64),
    (torch.float32, 8, 24),
]


@pytest.mark.parametrize(("dtype", "group", "head_dim"), GROUPS, ids=str)
def test_a_causal_row_has_the_same_bits_in_any_call(
    level_ops: object, dtype: torch.dtype, group: int, head_dim: int
) -> None:
    """Whatever is cached, however many rows there are, in pages or not, and next to rows that see something else.

    A row by itself fills `group` lanes, for few of which there is a kernel of its own."""
    length = 150
    inputs = make_inputs(length, [0], slots=length, heads=2 * group, kv_heads=2, head_dim=head_dim, dtype=dtype)
    scale = inputs.q.shape[-1] ** -0.5
    whole = Results(*level_ops.speculative_attention(*inputs[:6], *causal(length).plan(48, 64).arguments, scale))

    def cached(first: int, rows: int, page_size: int, mask: SegmentMask) -> Results:
        """`rows` from `first` on after all earlier ones; rows of the mask after those are the last ones again."""
        index = torch.arange(first, first + mask.q_len).clamp(max=length - 1)
        caches = [torch.full_like(x, torch.nan) for x in inputs[1:3]]
        for cache, new in zip(caches, inputs[1:3]):
            cache[:, :first] = new[:, :first]
        given = Inputs(*(x[:, index] for x in inputs[:3]), *caches, torch.tensor([first]))
        given = in_pages(given, page_size) if page_size else given
        plan = (*mask.plan(32, 48).arguments, scale, given.block_table)
        out, lse = level_ops.speculative_attention(*given[:6], *plan)
        return Results(out[:, :rows], lse[:, :, :rows])

    cases = [(first, 1, 0, causal(1)) for first in (0, 31, 127, 128, 149)]
    cases += [(100, 50, 7, causal(50)), (120, 6, 0, TAILS["quadratic"]), (127, 9, 16, causal(9))]
    for first, rows, page_size, mask in cases:
        found = cached(first, rows, page_size, mask)
        assert torch.equal(found.out, whole.out[:, first : first + rows])
        assert torch.equal(found.lse, whole.lse[:, :, first : first + rows])


PATHS = [(dtype, tail) for dtype in DTYPES for tail in TAILS if tail not in ("block", "one token", "nothing")]


@pytest.mark.covering
@pytest.mark.parametrize(("dtype", "tail"), PATHS, ids=str)
def test_a_row_has_the_bits_of_a_forward_over_what_it_sees(level_ops: object, dtype: torch.dtype, tail: str) -> None:
    """Whatever lies between the new tokens that it sees, and wherever chunks of keys are cut: a row of a tree is a row of a chain."""
    mask, length = TAILS[tail], (3, 126, 97)[list(TAILS).index(tail) % 3]
    inputs = make_inputs(mask.q_len, [length], dtype=dtype, heads=6, kv_heads=2, head_dim=40)
    whole, scale = run(level_ops, inputs, tail), inputs.q.shape[-1] ** -0.5
    for row, shown in enumerate(mask.dense()):
        seen = shown.nonzero()[:, 0]
        alone, tokens = full(len(seen)) if len(seen) else pack([], length=1), seen if len(seen) else torch.tensor([0])
        given = inputs._replace(
            q=inputs.q[:, [row] * len(tokens)], k_new=inputs.k_new[:, tokens], v_new=inputs.v_new[:, tokens]
        )
        found = Results(*level_ops.speculative_attention(*given[:6], *alone.plan(32, 48).arguments, scale))
        assert torch.equal(found.out[:, 0], whole.out[:, row])
        assert torch.equal(found.lse[:, :, 0], whole.lse[:, :, row])
