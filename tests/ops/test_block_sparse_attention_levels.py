"""The CPU kernels of every vector unit, on whatever processor this is: all levels built without special instructions.

Not proved here: what the compiler generates from the same source for AVX-512, and that AMX instructions do what
csrc/cpu/simd/amx_emulation.h does.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from pdkernels import masks
from pdkernels.masks import TilePlan
from tests.harness.error_budget import assert_within_budget
from tests.ops.attention_cases import DTYPES, MASKS, Inputs, Results, make_inputs, run_dense
from tests.ops.implementations import LEVELS, emulated_ops

SHAPES = [(16, 2, 2), (40, 4, 2), (64, 7, 1), (128, 2, 1), (256, 1, 1)]
TILES = [(16, 16), (48, 80), (128, 128), (64, 32)]


def run(ops: object, inputs: Inputs, plan: TilePlan) -> Results:
    q, k, v, grad_out, grad_lse = inputs
    rest = (*plan.arguments, q.shape[-1] ** -0.5)
    out, lse = ops.block_sparse_attention(q, k, v, *rest)
    return Results(out, lse, *ops.block_sparse_attention_backward(grad_out, grad_lse, out, lse, q, k, v, *rest))


@pytest.mark.covering
@pytest.mark.parametrize("kind", MASKS)
def test_within_the_error_budget(level_ops: object, kind: str) -> None:
    """Dtypes, shapes and tiles cycle independently; AMX only adds bfloat16."""
    mask, turn = MASKS[kind], list(MASKS).index(kind)
    dtype = torch.bfloat16 if os.environ["PDKERNELS_CPU_ISA"] == "amx" else DTYPES[turn % len(DTYPES)]
    head_dim, heads, kv_heads = SHAPES[turn % len(SHAPES)]
    inputs = make_inputs(*mask.shape, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    actual = run(level_ops, inputs, mask.plan(*TILES[turn % len(TILES)]))
    exact, same = run_dense(inputs, mask.dense(), torch.float64), run_dense(inputs, mask.dense(), dtype)
    for name, *tensors in zip(Results._fields, actual, exact, same):
        assert_within_budget(*tensors, name=name)


def test_non_finite_values_stay_where_they_are_seen(level_ops: object) -> None:
    for dtype in DTYPES:
        inputs = make_inputs(50, 50, heads=2, kv_heads=2, dtype=dtype)
        inputs.q[:, 20, 1] = torch.nan
        results = run(level_ops, inputs, masks.causal(50).plan(32, 32))
        assert results.out[:, 20, 1].isnan().all() and results.out.isnan().sum() == 2 * 32
        assert results.lse[:, 1, 20].isnan().all() and results.lse.isnan().sum() == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_pairs_have_no_effect(level_ops: object, dtype: torch.dtype) -> None:
    """A hidden pair has a weight of 0, and 0 times infinity is NaN: forward and backward, whatever is not finite."""
    mask = masks.pack([masks.causal(45), masks.dual_stream(20, 8)], length=100)
    seen, plan = mask.dense(), mask.plan(32, 48)
    names = ("q", "k", "v", "grad_out")
    for name, value in ((name, value) for name in names for value in (torch.nan, torch.inf)):
        inputs = make_inputs(*mask.shape, heads=2, kv_heads=2, dtype=dtype)
        clean = run(level_ops, inputs, plan)
        getattr(inputs, name)[0, 20, 1, 3] = value
        results = run(level_ops, inputs, plan)
        rows = seen[:, 20] if name in ("k", "v") else torch.arange(len(seen)) == 20  # that may show it
        columns = seen[rows].any(0)  # that these rows see
        for field, touched in (("out", rows), ("dq", rows), ("dk", columns), ("dv", columns)):
            found, wanted = getattr(results, field), getattr(clean, field)
            apart = ~torch.zeros(found.shape[:3], dtype=torch.bool)
            apart[0, touched, 1] = False
            assert found[apart].isfinite().all(), (name, field)
            close = (found[apart].float() - wanted[apart].float()).abs() <= 0.02 * (1 + wanted[apart].float().abs())
            assert close.all(), (name, field)
        assert not (results.dk.isfinite().all() and results.dv.isfinite().all())
        if name == "v":
            assert (~results.out[0, rows, 1, 3].isfinite()).all()


def test_rows_that_see_nothing_are_zero_whatever_the_values(level_ops: object) -> None:
    """Weights of 0 times infinity would be NaN."""
    mask = masks.pack([masks.pack([masks.causal(9)], length=20), masks.dual_stream(30, 8)], length=160)
    blind = ~mask.dense().any(1)
    for dtype in DTYPES:
        inputs = make_inputs(*mask.shape, dtype=dtype)
        inputs.v.fill_(torch.inf)
        results = run(level_ops, inputs, mask.plan(64, 32))
        assert (results.out[:, blind] == 0).all() and results.lse[..., blind].isneginf().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_batch_nor_threads_change_a_bit(level_ops: object, dtype: torch.dtype) -> None:
    inputs = make_inputs(150, 150, batch=3, head_dim=64, dtype=dtype)
    plan = MASKS["causal"].plan(32, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = run(level_ops, inputs, plan)
        torch.set_num_threads(1)
        alone = run(level_ops, inputs.map(lambda x: x[1:2].contiguous()), plan)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a[1:2], b) for a, b in zip(together, alone))


def test_levels_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above may have run one kernel four times."""
    results: list[Tensor] = []
    for level in LEVELS:
        monkeypatch.setenv("PDKERNELS_CPU_ISA", level)
        inputs = make_inputs(150, 150, head_dim=64, dtype=torch.bfloat16)
        results.append(
            torch.cat([x.float().flatten() for x in run(emulated_ops(), inputs, MASKS["causal"].plan(64, 64))])
        )
    assert not torch.equal(results[2], results[3])
