"""The reference of speculative attention against one dense attention over concatenated keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.reference.speculative_attention import speculative_attention

TAILS = {
    "quadratic": pd.masks.quadratic(3),
    "quadratic causal": pd.masks.quadratic(3, 2, in_group="causal"),
    "candidates": pd.masks.candidates(3, 4),
    "tree": pd.masks.tree([-1, 0, 1, 0, -1, 4]),
    "block": pd.masks.full(8),
    "verify": pd.masks.causal(7),
    "planned": pd.masks.planned([pd.masks.Stage(2, (3, 2)), pd.masks.Stage(1)], sparse=True),
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(new: int, lengths: list[int], slots: int, group: int = 2) -> tuple[Tensor, ...]:
    q = randn(len(lengths), new, 2 * group, 8, seed=0)
    news = (randn(len(lengths), new, 2, 8, seed=seed) for seed in (1, 2))
    caches = (randn(len(lengths), slots, 2, 8, seed=seed) for seed in (3, 4))
    return q, *news, *caches, torch.tensor(lengths)


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One head of one sequence, row by row."""
    out, lse = torch.zeros_like(q), q.new_full((len(q),), -torch.inf)
    for i in range(len(q)):
        if mask[i].any():
            weights = (k[mask[i]] @ q[i] * scale).exp()
            out[i], lse[i] = weights @ v[mask[i]] / weights.sum(), weights.sum().log()
    return out, lse


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("group", [1, 3])
def test_equals_one_pass_over_all_keys(tail: str, group: int) -> None:
    mask, lengths = TAILS[tail].dense(), [0, 5, 11]
    q, k_new, v_new, k_cache, v_cache, lengths = inputs(len(mask), lengths, 11, group)
    out, lse = speculative_attention(q, k_new, v_new, k_cache, v_cache, lengths, mask, scale=0.3)
    for b, length in enumerate(lengths):
        whole = torch.cat([torch.ones(len(mask), length, dtype=torch.bool), mask], dim=1)
        for head in range(q.shape[2]):
            k, v = (
                torch.cat([cache[b, :length, head // group], new[b, :, head // group]])
                for cache, new in ((k_cache, k_new), (v_cache, v_new))
            )
            expected, log_sums = softmax_by_hand(q[b, :, head], k, v, whole, 0.3)
            torch.testing.assert_close(out[b, :, head], expected)
            torch.testing.assert_close(lse[b, head], log_sums)


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_pages_are_the_same_cache(page_size: int) -> None:
    q, k_new, v_new, k_cache, v_cache, lengths = inputs(5, [12, 7], 12)
    mask = pd.masks.causal(5).dense()
    expected = speculative_attention(q, k_new, v_new, k_cache, v_cache, lengths, mask)
    table = torch.randperm(2 * 12 // page_size + 2, generator=torch.Generator().manual_seed(0))[2:].view(2, -1)
    pools = []
    for cache in (k_cache, v_cache):
        pool = cache.new_full((table.numel() + 2, page_size, 2, 8), float("nan"))
        pool[table] = cache.unflatten(1, (-1, page_size))
        pools.append(pool)
    actual = speculative_attention(q, k_new, v_new, *pools, lengths.int(), mask, block_table=table.int())
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


def test_a_mask_for_each_sequence_and_the_default_scale() -> None:
    arguments = inputs(6, [4, 9], 9)
    masks = torch.stack([pd.masks.causal(6).dense(), pd.masks.candidates(2, 3).dense()])
    out, lse = speculative_attention(*arguments, masks)
    for b in range(2):
        alone = speculative_attention(*(x[b : b + 1] for x in arguments), masks[b], scale=8**-0.5)
        torch.testing.assert_close(out[b : b + 1], alone[0])
        torch.testing.assert_close(lse[b : b + 1], alone[1])


def test_what_is_past_the_length_is_not_read() -> None:
    q, k_new, v_new, k_cache, v_cache, lengths = inputs(4, [3, 0], 8)
    for cache in (k_cache, v_cache):
        cache[0, 3:], cache[1] = float("nan"), float("nan")
    out, lse = speculative_attention(q, k_new, v_new, k_cache, v_cache, lengths, pd.masks.causal(4).dense())
    assert out.isfinite().all() and lse.isfinite().all()


def test_rows_that_see_nothing_are_zero() -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    out, lse = speculative_attention(*inputs(4, [0, 2], 8), mask)
    assert (out[0] == 0).all() and lse[0].isneginf().all()
    assert out[1].any(-1).all() and lse[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_and_no_sequences(dtype: torch.dtype) -> None:
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    for lengths in ([2, 6], []):
        *tensors, lengths = inputs(3, lengths, 6)
        tensors = [x.to(dtype) for x in tensors]
        out, lse = speculative_attention(*tensors, lengths, pd.masks.full(3).dense())
        assert out.shape == tensors[0].shape and out.dtype == dtype
        assert lse.shape == (len(lengths), 4, 3) and lse.dtype == statistics
