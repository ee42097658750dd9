"""The Triton kernels of block-sparse attention against the dense reference, interpreted or on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pdkernels._attention import AttentionArguments, GradientArguments, PlanArguments
from pdkernels.reference.block_sparse_attention import block_sparse_attention as reference
from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import dot_dtypes, requires_triton, triton_device
from tests.masks.brute_force import brute_force

pytest.importorskip("triton", reason="needs triton")
from pdkernels.triton import block_sparse_attention as kernels
from pdkernels.triton._blocks import split_head_dim

# The interpreter computes in NumPy, which warns about log2(0) and exp2 of hidden scores.
pytestmark = [requires_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")]
DEVICE = triton_device()


def make_plan(mask: Tensor, block_q: int, block_k: int) -> PlanArguments:
    """A tile plan by brute force, as the kernels take it."""
    plan = brute_force(mask, block_q, block_k)
    shapes = {"rows": (-1, 4), "lists": (-1, 2), "bitmaps": (-1, block_q, -(-block_k // 32))}
    tensors = (torch.tensor(plan[name], dtype=torch.int32, device=DEVICE).view(s) for name, s in shapes.items())
    return PlanArguments(*tensors, block_q, block_k)


def without_ranges(plan: PlanArguments) -> PlanArguments:
    """The same plan with full tiles in the lists, among the others and in reverse."""
    rows, lists = plan.plan_rows.clone(), []
    for row in rows:
        begin, middle, end = row[:3].tolist()
        ranges = [[tile, -1] for first, last in plan.plan_lists[begin:middle].tolist() for tile in range(first, last)]
        row[:2] = len(lists)
        lists += sorted(ranges + plan.plan_lists[middle:end].tolist(), reverse=True)
        row[2] = len(lists)
    return plan._replace(plan_rows=rows, plan_lists=torch.tensor(lists, dtype=torch.int32, device=DEVICE).view(-1, 2))


def stack(plans: list[PlanArguments]) -> PlanArguments:
    """One plan per sequence, separated by words that must not be read."""
    rows, lists, bitmaps = [], [], []
    for plan in plans:
        shift = torch.tensor([sum(map(len, lists))] * 3 + [0], dtype=torch.int32, device=DEVICE)
        rows.append(plan.plan_rows + shift)
        pairs = plan.plan_lists.clone()
        for _, middle, end, _ in plan.plan_rows.tolist():
            pairs[middle:end, 1] += sum(map(len, bitmaps)) * (pairs[middle:end, 1] >= 0)
        lists.append(torch.cat([pairs, pairs.new_full((3, 2), 2**30)]))
        bitmaps.append(plan.bitmaps)
    return plans[0]._replace(plan_rows=torch.stack(rows), plan_lists=torch.cat(lists), bitmaps=torch.cat(bitmaps))


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def noise_aware(prompt: int, block: int, count: int) -> Tensor:
    """Prompt, clean, noisy stream; noisy block i sees the prompt, the clean blocks before i and itself."""
    clean = block * count
    mask = torch.zeros(prompt + 2 * clean, prompt + 2 * clean, dtype=torch.bool)
    mask[: prompt + clean, : prompt + clean] = causal(prompt + clean)
    for i in range(count):
        rows = slice(prompt + clean + i * block, prompt + clean + (i + 1) * block)
        mask[rows, : prompt + i * block] = True
        mask[rows, rows] = causal(block)
    return mask


def dual_stream(length: int, block: int) -> Tensor:
    """Noisy then clean; noisy blocks are bidirectional and see the clean blocks before, the clean stream is causal."""
    at = torch.arange(length) // block
    noisy = torch.cat([at[:, None] == at, at[:, None] > at], 1)
    return torch.cat([noisy, torch.cat([torch.zeros(length, length, dtype=torch.bool), causal(length)], 1)])


def random_segments(q_len: int, kv_len: int, seed: int) -> Tensor:
    """All or nothing between segments of random lengths, so that whole rows and columns may be empty."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 5, (q_len,), generator=generator).sort().values
    columns = torch.randint(0, 5, (kv_len,), generator=generator).sort().values
    return (torch.rand(5, 5, generator=generator) < 0.4)[rows][:, columns]


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def run_kernels(q, k, v, plan: PlanArguments, scale: float, grad_out, grad_lse) -> Results:
    given = AttentionArguments(q, k, v, *plan, scale)
    out, lse = kernels.forward(given)
    return Results(out, lse, *kernels.backward(GradientArguments(grad_out, grad_lse, out, lse, given)))


def run_reference(q, k, v, mask: Tensor, scale: float, grad_out, grad_lse, dtype: torch.dtype) -> Results:
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out, lse = reference(*leaves, mask.to(DEVICE), scale)
    grads = (grad_out.to(dtype), lse.new_zeros(lse.shape) if grad_lse is None else grad_lse.to(lse.dtype))
    return Results(out, lse, *torch.autograd.grad((out, lse), leaves, grads))


def check(
    mask: Tensor,
    blocks: tuple[int, int] = (32, 32),
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float16,
    scale: float | None = None,
    with_lse: bool = True,
    plan: PlanArguments | None = None,
) -> Results:
    q_len, kv_len = mask.shape[-2:]
    q = randn(batch, q_len, heads, head_dim, dtype=dtype, seed=0)
    k, v = (randn(batch, kv_len, kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    grad_out = randn(batch, q_len, heads, head_dim, dtype=dtype, seed=3)
    grad_lse = randn(batch, heads, q_len, dtype=torch.float32, seed=4) if with_lse else None
    scale = head_dim**-0.5 if scale is None else scale
    plan = make_plan(mask, *blocks) if plan is None else plan
    actual = run_kernels(q, k, v, plan, scale, grad_out, grad_lse)
    exact = run_reference(q, k, v, mask, scale, grad_out, grad_lse, torch.float64)
    same = run_reference(q, k, v, mask, scale, grad_out, grad_lse, dtype)
    for name in Results._fields:
        assert_within_budget(getattr(actual, name), getattr(exact, name), getattr(same, name), name=name)
    return actual


MASKS = {
    "causal": causal(70),
    "noise aware": noise_aware(11, 8, 4),
    "dual stream": dual_stream(32, 8),
    "random segments": random_segments(75, 51, 0),
    "full": torch.ones(64, 96, dtype=torch.bool),
}


@pytest.mark.covering
@pytest.mark.parametrize("dtype", dot_dtypes(), ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str, dtype: torch.dtype) -> None:
    check(MASKS[kind], dtype=dtype)


@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 96, 112, 128, 256])
def test_head_dims(head_dim: int) -> None:
    check(causal(37), head_dim=head_dim)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (2, 2), (4, 2), (7, 1)])
def test_groups_of_query_heads(heads: int, kv_heads: int) -> None:
    check(random_segments(33, 40, 1), batch=2, heads=heads, kv_heads=kv_heads)


# 512 is the kernels' own number: test_groups_of_query_heads.
@pytest.mark.parametrize(
    "enough, pieces", [(1, (1, 7)), (3, (2, 4)), pytest.param(512, (7, 1), marks=pytest.mark.slow)]
)
def test_query_heads_dealt_out_to_programs(enough: int, pieces: tuple[int, int], monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "BLOCKS_ENOUGH", enough)
    assert kernels.split_group(7, 2) == pieces
    check(random_segments(33, 40, 1), batch=2, heads=7, kv_heads=1)


@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (48, 96), (128, 128), (64, 16)])
def test_tile_sizes(blocks: tuple[int, int]) -> None:
    check(random_segments(131, 70, 2), blocks, heads=1)


@pytest.mark.parametrize("q_len,kv_len", [(1, 1), (1, 40), (40, 1), (33, 32), (64, 31)])
def test_lengths(q_len: int, kv_len: int) -> None:
    check(torch.ones(q_len, kv_len, dtype=torch.bool), head_dim=64, heads=8)


def test_lists_may_be_in_any_order() -> None:
    mask = noise_aware(17, 8, 3)
    plan = make_plan(mask, 16, 16)
    assert any(begin < middle for begin, middle, _, _ in plan.plan_rows.tolist())
    for ordered in (plan, without_ranges(plan)):
        check(mask, (16, 16), plan=ordered)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1.0])
def test_any_scale(scale: float) -> None:
    check(causal(40), scale=scale, dtype=torch.float32)


def test_without_gradient_of_the_log_sum_exp() -> None:
    check(causal(40), with_lse=False)


def test_a_plan_for_each_sequence() -> None:
    masks = torch.stack([causal(50), torch.ones(50, 50, dtype=torch.bool), random_segments(50, 50, 3)])
    check(masks, batch=3, plan=stack([make_plan(mask, 32, 32) for mask in masks]))


def test_rows_that_see_nothing() -> None:
    mask = causal(72)
    mask[5:9] = False  # inside a tile
    mask[32:64] = False  # a whole tile
    mask[:, 20:24] = False  # keys that no row sees
    results = check(mask)
    for rows in (slice(5, 9), slice(32, 64)):
        assert (results.out[:, rows] == 0).all() and results.lse[..., rows].isneginf().all()
        assert (results.dq[:, rows] == 0).all()
    assert (results.dk[:, 20:24] == 0).all() and (results.dv[:, 20:24] == 0).all()


@pytest.mark.parametrize("head_dim", [16, 40])
def test_rows_that_see_nothing_meet_no_infinite_value(head_dim: int) -> None:
    mask = causal(40)
    mask[5:9] = False  # in a tile with rows that see them
    q, k, v, grad = (randn(1, 40, 2, head_dim, dtype=torch.float16, seed=seed) for seed in range(4))
    v[:, 2], v[:, 20] = float("inf"), float("nan")
    results = run_kernels(q, k, v, make_plan(mask, 32, 32), 0.25, grad, None)
    assert (results.out[:, 5:9] == 0).all() and results.lse[..., 5:9].isneginf().all()
    assert (results.dq[:, 5:9] == 0).all()
    assert results.out[:, 30].isnan().all()


@pytest.mark.parametrize("batch,q_len,kv_len", [(0, 8, 8), (1, 0, 8), (1, 8, 0)])
def test_empty(batch: int, q_len: int, kv_len: int) -> None:
    check(torch.ones(q_len, kv_len, dtype=torch.bool), batch=batch)


def test_strided_inputs() -> None:
    mask, scale = noise_aware(9, 8, 3), 0.25
    length = mask.shape[0]
    packed = randn(length, 2, 3, 2, 48, dtype=torch.float16, seed=0)  # (length, batch, q k v, heads, head_dim)
    q, k, v = (packed[:, :, i, :, 5:37].transpose(0, 1) for i in range(3))
    grad_out = randn(1, 1, 1, 1, dtype=torch.float16, seed=1).expand(2, length, 2, 32)
    plan = make_plan(mask, 32, 32)
    strided = run_kernels(q, k, v, plan, scale, grad_out, None)
    plain = run_kernels(*(x.contiguous() for x in (q, k, v)), plan, scale, grad_out.contiguous(), None)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(strided, plain))


def test_repeats_bit_for_bit() -> None:
    first, second = (check(noise_aware(20, 8, 4), (32, 32)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    q, k, v, grad = (randn(3, 50, 2, 16, dtype=torch.float16, seed=seed) for seed in range(4))
    plan = make_plan(causal(50), 32, 32)
    together = run_kernels(q, k, v, plan, 0.25, grad, None)
    alone = run_kernels(q[1:2], k[1:2], v[1:2], plan, 0.25, grad[1:2], None)
    assert all(torch.equal(a[1:2], b) for a, b in zip(together, alone))


def test_nothing_is_read_or_written_outside() -> None:
    """NaN around the inputs stays out of the results."""
    mask = causal(41)
    q, k, v, grad = (
        torch.full((3, 41 + 87, 2, 16), float("nan"), dtype=torch.float16, device=DEVICE)[1:2, 20:61] for _ in range(4)
    )
    for seed, x in enumerate((q, k, v, grad)):
        x.copy_(randn(1, 41, 2, 16, dtype=torch.float16, seed=seed))
    results = run_kernels(q, k, v, make_plan(mask, 32, 32), 0.25, grad, None)
    assert all(x.isfinite().all() for x in results)


def test_large_scores() -> None:
    check(causal(40), scale=100.0)


def test_reference_gradients() -> None:
    mask = random_segments(5, 6, 4)
    mask[2] = False
    q, k, v = (torch.randn(2, n, h, 3, dtype=torch.float64, requires_grad=True) for n, h in ((5, 4), (6, 2), (6, 2)))
    seen = mask.any(1)
    assert torch.autograd.gradcheck(lambda *x: reference(*x, mask)[0], (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: reference(*x, mask)[1][..., seen], (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: reference(*x, torch.stack([mask, ~mask]), 0.7)[0], (q, k, v))


def test_a_head_is_cut_into_powers_of_two() -> None:
    for head_dim in range(16, 257, 8):
        first, second = split_head_dim(head_dim)
        assert head_dim <= first + second < 2 * head_dim
        assert all(part in (0, 16, 32, 64, 128, 256) for part in (first, second))
