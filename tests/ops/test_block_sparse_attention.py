"""block_sparse_attention on every backend against the dense reference in float64, forward and backward, mask by mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import pdkernels as pd
from pdkernels import masks
from pdkernels._attention import AttentionArguments, GradientArguments
from pdkernels.masks import TilePlan
from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import interpreted, requires_triton
from tests.masks.strategies import random_masks
from tests.ops.attention_cases import (
    BACKWARD,
    DTYPES,
    MASKS,
    OP,
    Inputs,
    Results,
    backend,
    check,
    kernels,
    make_inputs,
    on_device,
    raw,
    run,
    run_dense,
)

__all__ = ["backend", "kernels"]  # fixtures

HEAD_DIMS = [16, 24, 64, 80, 96, 128, 256]
GROUPS = [(1, 1), (4, 2), (4, 1), (7, 1), (3, 3)]
TILES = [(32, 32), (64, 32), (16, 48), (128, 128), (16, 16), (64, 64), (48, 96), (128, 64)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(backend: str, kind: str, dtype: torch.dtype) -> None:
    """All masks in all dtypes; head dimensions, groups and tiles cycle independently."""
    mask, turn = MASKS[kind], list(MASKS).index(kind) * len(DTYPES) + DTYPES.index(dtype)
    (heads, kv_heads), tiles = GROUPS[turn % len(GROUPS)], TILES[turn % len(TILES)]
    inputs = make_inputs(
        *mask.shape, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIMS[turn % len(HEAD_DIMS)], dtype=dtype
    )
    check(backend, inputs, mask.plan(*tiles), mask.dense())


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 40, 112, 200])
def test_head_dims(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    mask = masks.noise_aware_causal(11, 8, 5)
    check(backend, make_inputs(*mask.shape, head_dim=head_dim, dtype=dtype), mask.plan(32, 64), mask.dense())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Inputs, TilePlan, Tensor]:
    """Any masks, shared or one per sample, any number of rows and columns, tiles of any shape."""
    tiles = [draw(st.sampled_from([16, 32, 48, 64, 80, 128])) for _ in range(2)]
    mask = draw(random_masks(90))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (7, 1)]))
    # Some hundred values of each kind: see assert_within_budget.
    batch = draw(st.integers(1, 3)) + 300 // (heads * max(1, mask.q_len)) + 300 // (16 * kv_heads * max(1, mask.kv_len))
    inputs = make_inputs(
        *mask.shape,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 24, 32])),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    if draw(st.booleans()):
        return inputs, mask.plan(*tiles), mask.dense()
    others = [mask, masks.full(*mask.shape), masks.causal(max(mask.shape))[: mask.q_len, : mask.kv_len]]
    chosen = [others[draw(st.integers(0, 2))] for _ in range(min(batch, 4))]
    chosen += [mask] * (batch - len(chosen))
    return (
        inputs,
        TilePlan.stack([each.plan(*tiles) for each in chosen]),
        torch.stack([each.dense() for each in chosen]),
    )


@settings(max_examples=60)
@given(case=cases())
def test_any_shape(backend: str, case: tuple[Inputs, TilePlan, Tensor]) -> None:
    check(backend, *case)


@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 1])
@pytest.mark.parametrize("through_lse", [False, True])
def test_scale_and_gradients(backend: str, scale: float | None, through_lse: bool) -> None:
    mask = masks.dual_stream(40, 8)
    check(backend, make_inputs(*mask.shape), mask.plan(32, 32), mask.dense(), scale, through_lse)


def test_gradient_through_the_log_sum_exp_alone(backend: str) -> None:
    mask = masks.dual_stream(40, 8)
    inputs = make_inputs(*mask.shape)
    expected = run_dense(inputs._replace(grad_out=torch.zeros_like(inputs.grad_out)), mask.dense(), torch.float64)
    device, name = on_device(backend)
    q, k, v = (x.to(device).requires_grad_(i < 2) for i, x in enumerate(inputs[:3]))
    _, lse = pd.block_sparse_attention(q, k, v, mask.plan(32, 32).to(device), return_lse=True, backend=name)
    lse.backward(inputs.grad_lse.to(device))
    assert v.grad is None
    torch.testing.assert_close(
        (q.grad.cpu().double(), k.grad.cpu().double()), (expected.dq, expected.dk), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch_with_a_dense_mask(backend: str, dtype: torch.dtype) -> None:
    mask = masks.noise_aware_causal(37, 8, 7)
    inputs = make_inputs(*mask.shape, dtype=dtype)

    def sdpa(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(), enable_gqa=True).transpose(1, 2)
        return [out, *torch.autograd.grad(out, leaves, inputs.grad_out.to(dtype))]

    actual = run(backend, inputs, mask.plan(32, 32), through_lse=False)
    for name, *tensors in zip(("out", "dq", "dk", "dv"), actual[:1] + actual[2:], sdpa(torch.float64), sdpa(dtype)):
        assert_within_budget(*tensors, name=name)


def test_the_reference_computes_in_float64() -> None:
    mask = masks.pack([masks.causal(3), masks.full(2)], length=7)
    q, k, v = (torch.randn(1, 7, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    plan = mask.plan(16, 16)
    assert torch.autograd.gradcheck(
        lambda *x: pd.block_sparse_attention(*x, plan, backend="reference"), (q, k, v), fast_mode=True
    )


# --- memory ------------------------------------------------------------------------------------------------------------


def strided(inputs: Inputs, how: str) -> Inputs:
    """Equal values in other strides."""
    if how == "heads before rows":
        return inputs.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    if how == "sliced from one projection":
        fused = torch.cat([inputs.q, inputs.k, inputs.v], 2)
        q, k, v = fused.split([x.shape[2] for x in inputs[:3]], 2)
        return Inputs(q, k, v, F.pad(inputs.grad_out, (8, 8))[..., 8:-8], inputs.grad_lse.mT.contiguous().mT)
    return inputs.map(lambda x: x[:1].expand(x.shape))  # one sample for the whole batch, stride 0


@pytest.mark.parametrize("how", ["heads before rows", "sliced from one projection", "expanded"])
def test_strides(backend: str, how: str) -> None:
    mask = masks.noise_aware_causal(20, 8, 4)
    inputs = strided(make_inputs(*mask.shape, dtype=torch.float16), how)
    results = check(backend, inputs, mask.plan(32, 32), mask.dense())
    assert results.out.is_contiguous() and (backend == "reference" or all(x.is_contiguous() for x in results))


def test_gradients_of_any_strides(backend: str) -> None:
    """Such as those of a sum: one number, expanded."""
    mask = masks.causal(50)
    inputs = make_inputs(50, 50)
    expanded = inputs._replace(
        grad_out=torch.ones(1, 1, 1, 1).expand_as(inputs.grad_out),
        grad_lse=torch.ones(1, 1, 1).expand_as(inputs.grad_lse),
    )
    turned = inputs._replace(grad_out=inputs.grad_out.transpose(1, 3).contiguous().transpose(1, 3))
    for each in (expanded, turned):
        check(backend, each, mask.plan(32, 32), mask.dense())


def test_rows_that_see_nothing(backend: str) -> None:
    mask = masks.pack([masks.pack([masks.causal(9)], length=20), masks.dual_stream(30, 8)], length=160)
    blind = ~mask.dense().any(1)
    unseen = ~mask.dense().any(0)
    for tiles in ((16, 16), (64, 32)):
        results = check(backend, make_inputs(*mask.shape), mask.plan(*tiles), mask.dense())
        assert (results.out[:, blind] == 0).all() and results.lse[..., blind].isneginf().all()
        assert (results.dq[:, blind] == 0).all()
        assert (results.dk[:, unseen] == 0).all() and (results.dv[:, unseen] == 0).all()
        assert not any(x.isnan().any() for x in results)


@pytest.mark.parametrize("batch, q_len, kv_len", [(0, 20, 20), (2, 0, 20), (2, 20, 0), (2, 0, 0), (1, 1, 1)])
def test_empty(backend: str, batch: int, q_len: int, kv_len: int) -> None:
    mask = masks.full(q_len, kv_len)
    results = run(backend, make_inputs(q_len, kv_len, batch=batch), mask.plan(16, 16))
    assert results.out.shape == (batch, q_len, 4, 32) and results.dk.shape == (batch, kv_len, 2, 32)
    assert results.lse.shape == (batch, 4, q_len)
    if kv_len == 0:
        assert (results.out == 0).all() and results.lse.isneginf().all() and (results.dq == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["large", "far below zero", "far above zero"])
def test_extreme_scores(backend: str, case: str, dtype: torch.dtype) -> None:
    mask = masks.causal(90)
    inputs = make_inputs(90, 90, dtype=dtype)
    if case == "large":
        inputs = inputs._replace(q=inputs.q * 64)
        scale = 25.0  # scores of some 10^4
    else:
        sign = -1 if case == "far below zero" else 1
        inputs = inputs._replace(q=torch.full_like(inputs.q, 32.0) * sign, k=(10 + inputs.k / 64).to(dtype))
        scale = 1.0
    results = check(backend, inputs, mask.plan(32, 32), mask.dense(), scale)
    assert all(x.isfinite().all() for x in results)


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["pack", "nothing", "dual stream, causal, noisy_first"])
def test_nothing_is_read_outside_and_everything_written(kernels: str, kind: str) -> None:
    """NaN around the inputs and in fresh outputs stays out of the results."""
    mask = MASKS[kind]
    clean = make_inputs(*mask.shape, dtype=torch.float16)

    def surrounded(x: Tensor) -> Tensor:
        around = torch.full([size + 2 * 16 for size in x.shape], float("nan"), dtype=x.dtype)
        inside = around[tuple(slice(16, 16 + size) for size in x.shape)]
        return inside.copy_(x)

    with fresh_memory_is_nan():
        actual = run(kernels, clean.map(surrounded), mask.plan(32, 32))
    assert all(torch.equal(a, b) for a, b in zip(actual, run(kernels, clean, mask.plan(32, 32))))
    assert not any(x.isnan().any() for x in actual)


def test_skipped_tiles_are_not_read(kernels: str) -> None:
    mask = masks.pack([masks.causal(64)], length=128)
    inputs = make_inputs(128, 128)
    for x in inputs:
        x.narrow(2 if x is inputs.grad_lse else 1, 64, 64).fill_(float("nan"))
    results = run(kernels, inputs, mask.plan(32, 32))
    assert all((x.narrow(1, 64, 64) == 0).all() for x in (results.out, results.dq, results.dk, results.dv))
    assert not any(x.isnan().any() for x in results)


def test_inputs_stay_as_they_are(backend: str) -> None:
    mask = masks.noise_aware_causal(20, 8, 4)
    inputs, plan = make_inputs(*mask.shape), mask.plan(32, 32)
    before = [x.clone() for x in (*inputs, *plan._tensors())]
    run(backend, inputs, plan)
    assert all(torch.equal(a, b) for a, b in zip(before, (*inputs, *plan._tensors())))


# --- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_whatever_the_threads(kernels: str, dtype: torch.dtype) -> None:
    mask = masks.noise_aware_causal(37, 8, 12)
    inputs = make_inputs(*mask.shape, dtype=dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(run(kernels, inputs, mask.plan(32, 32)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sample_does_not_depend_on_its_batch(kernels: str, dtype: torch.dtype) -> None:
    both = [masks.causal(100), masks.dual_stream(50, 8)]
    inputs = make_inputs(100, 100, batch=3, dtype=dtype)
    plans = [both[b % 2].plan(32, 32) for b in range(3)]
    together = run(kernels, inputs, TilePlan.stack(plans))
    for b, plan in enumerate(plans):
        for alone in (plan, TilePlan.stack([plan])):
            result = run(kernels, inputs.map(lambda x, b=b: x[b : b + 1]), alone)
            assert all(torch.equal(a[b : b + 1], r) for a, r in zip(together, result))


# --- torch integration -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not pd.has_native(), reason="needs the compiled library")
def test_the_library_holds_the_cpu_kernels() -> None:
    for op in (OP, BACKWARD):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(kernels: str, dtype: torch.dtype) -> None:
    mask = masks.noise_aware_causal(20, 8, 4)
    device, _ = on_device(kernels)
    forward, backward = raw(mask, make_inputs(*mask.shape, dtype=dtype), device)
    torch.library.opcheck(OP, forward, rtol=2e-2, atol=2e-2)
    torch.library.opcheck(BACKWARD, backward)
    torch.library.opcheck(BACKWARD, (backward[0], None, *backward[2:]))


# Otherwise sizes that happen to be equal in the first call have to stay equal, offsets into the plan's memory among
# them.
@torch.fx.experimental._config.patch(use_duck_shape=False)
def test_fullgraph_without_recompiles(kernels: str) -> None:
    """One op in the graph, one graph for all batches, heads, lengths and plans."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, plan):
        out, lse = pd.block_sparse_attention(q, k, v, plan, return_lse=True)
        return out.sin(), lse

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    device, _ = on_device(kernels)
    for batch, heads, kv_heads, prompt, blocks in [
        (2, 4, 2, 20, 4),
        (3, 9, 3, 37, 9),
        (4, 6, 2, 70, 3),
        (5, 8, 4, 130, 7),
    ]:
        mask = masks.noise_aware_causal(prompt, 8, blocks, layout="interleaved")
        plan = mask.plan(32, 32, device)
        leaves = [
            x.to(device).requires_grad_()
            for x in make_inputs(*mask.shape, batch=batch, heads=heads, kv_heads=kv_heads)[:3]
        ]
        results = []
        for function in (compiled, step):
            out, lse = function(*leaves, plan)
            results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results))
    assert counter.frame_count == 1
    called = [node.target for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count(OP) == 1


@requires_triton
@pytest.mark.skipif(not interpreted(), reason="the compiled kernels run above")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(
    "kind",
    [
        "pack",
        "causal, cached",
        pytest.param("noise aware, window, interleaved", marks=pytest.mark.slow),
        pytest.param("dual stream, block, noisy_first", marks=pytest.mark.slow),
    ],
)
def test_triton_kernels_read_the_planners_lists(kind: str) -> None:
    from pdkernels.triton import block_sparse_attention as triton

    mask = MASKS[kind]
    plan, inputs = (
        mask.plan(32, 32),
        make_inputs(*mask.shape, batch=1, heads=2, kv_heads=1, head_dim=16, dtype=torch.float16),
    )
    q, k, v, grad_out, grad_lse = inputs
    given = AttentionArguments(q, k, v, *plan.arguments, 0.25)
    out, lse = triton.forward(given)
    actual = Results(out, lse, *triton.backward(GradientArguments(grad_out, grad_lse, out, lse, given)))
    exact, same = (run_dense(inputs, mask.dense(), dtype, 0.25) for dtype in (torch.float64, torch.float16))
    for name, *tensors in zip(Results._fields, actual, exact, same):
        assert_within_budget(*tensors, name=name)
