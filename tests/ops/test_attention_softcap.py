"""Capped scores in the attention ops: the attention of transformers' Gemma 2, under a dense mask, is the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels import masks
from pdkernels._attention import AttentionArguments, SpeculativeArguments
from pdkernels.reference.block_sparse_attention import block_sparse_attention as reference
from pdkernels.reference.speculative_attention import speculative_attention as speculative_reference
from tests.harness.error_budget import assert_within_budget

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MASK = masks.noise_aware_causal(20, 8, 5)
CAP = 1.5


def oracle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """Gemma 2, in float64."""
    gemma2 = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    module = SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2], training=False, head_dim=q.shape[3])
    hidden = torch.zeros(1, 1, *mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    # Its softmax is in float32: the scores are scaled to be exact there all the same.
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
    found: Tensor = gemma2.eager_attention_forward(module, *heads_first, hidden, scaling=scale, softcap=cap)[0]
    return found


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, head_dim", [((4, 2), 32), ((6, 2), 40), ((2, 1), 512), ((2, 2), 256)])
@pytest.mark.parametrize("cap", [CAP, 50.0])
def test_forward(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, cap: float) -> None:
    """Scores up to several caps."""
    n, scale = MASK.q_len, 4 * head_dim**-0.5
    q, k, v = (randn(i, 2, n, count, head_dim, dtype=dtype) for i, count in enumerate((heads[0], heads[1], heads[1])))
    given = AttentionArguments(q, k, v, *MASK.plan(32, 32).arguments, scale, None, cap)
    out, lse = torch.ops.pdkernels.block_sparse_attention(*given)
    exact, exact_lse = reference(*(x.double() for x in (q, k, v)), MASK.dense(), scale, None, cap)
    torch.testing.assert_close(exact, oracle(q, k, v, MASK.dense(), scale, cap), rtol=1e-6, atol=1e-6)
    same, same_lse = reference(q, k, v, MASK.dense(), scale, None, cap)
    assert_within_budget(out, exact, same, name="out")
    assert_within_budget(lse, exact_lse, same_lse, name="lse")
    assert (
        not torch.allclose(out, torch.ops.pdkernels.block_sparse_attention(*given[:-1])[0], rtol=1e-2, atol=1e-2)
        or cap == 50
    )


def with_cap(*arguments: Any) -> tuple[Any, ...]:
    """What the op that stores nothing takes."""
    return SpeculativeArguments(*arguments, softcap=CAP)[:-2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", [False, True])
def test_on_a_cache(dtype: torch.dtype, codes: bool) -> None:
    """One new row or nine, whose bits are those of each alone, also in pages; caches of 8 bits."""
    heads, dim, new, length, scale = 4, 64, 9, 150, 0.5
    q = randn(0, 1, new, heads, dim, dtype=dtype)
    cached = [randn(seed, 1, 176, 2, dim, dtype=dtype) for seed in (1, 2)]
    rows = [randn(seed, 1, new, 2, dim, dtype=dtype) for seed in (3, 4)]
    if codes:
        cached, rows = ([pd.kv_quantize(x) for x in tensors] for tensors in (cached, rows))
    plan = masks.causal(new).plan(16, 16)
    lengths = torch.tensor([length])
    whole = with_cap(q, *rows, *cached, lengths, *plan.arguments, scale)
    out, lse = torch.ops.pdkernels.speculative_attention(*whole)
    exact, same = (
        speculative_reference(
            q.to(to),
            *(x if codes else x.to(to) for x in (*rows, *cached)),
            lengths,
            plan.dense(),
            scale=scale,
            softcap=CAP,
        )
        for to in (torch.float64, dtype)
    )
    for name, *results in zip(("out", "lse"), (out, lse), exact, same):
        assert_within_budget(*results, name=name)
    one = masks.causal(1).plan(16, 16)
    for cache, row in zip(cached, rows, strict=True):
        cache[:, length : length + new] = row
    table = torch.arange(11).flip(0)[None]
    pages = [cache[0].unflatten(0, (11, 16)).flip(0) for cache in cached]
    for at in range(new):
        own = [x[:, at : at + 1] for x in (q, *rows)]
        here = lengths + at
        alone = with_cap(*own, *cached, here, *one.arguments, scale)
        assert torch.equal(torch.ops.pdkernels.speculative_attention(*alone)[0], out[:, at : at + 1])
        paged = with_cap(*own, *pages, here, *one.arguments, scale, table)
        assert torch.equal(torch.ops.pdkernels.speculative_attention(*paged)[0], out[:, at : at + 1])


def test_large_scores_stay_below_the_cap() -> None:
    """What overflows float16, an infinity and a NaN: a row that sees neither keeps its bits."""
    q, k, v = (randn(seed, 1, 40, 2, 32, dtype=torch.float16) for seed in range(3))
    plan = masks.causal(40).plan(32, 32)
    alone = pd.block_sparse_attention(q, k, v, plan, softcap=CAP)
    q[:, 39], k[:, 38] = 6e4, 6e4
    k[:, 39] = torch.nan
    out, lse = pd.block_sparse_attention(q, k, v, plan, softcap=CAP, return_lse=True)
    assert torch.equal(out[:, :38], alone[:, :38]) and out[:, 39].isnan().all()
    assert lse[..., 38].isfinite().all()


@pytest.mark.parametrize(
    "cap, error, text",
    [
        (0.0, ValueError, "softcap must be positive and finite in float32, got 0.0"),
        (-2, ValueError, "softcap must be positive and finite in float32, got -2"),
        (float("inf"), ValueError, "softcap must be positive and finite in float32, got inf"),
        (float("nan"), ValueError, "softcap must be positive and finite in float32, got nan"),
        ("3", TypeError, "softcap must be a number or None, got str"),
    ],
)
def test_caps_that_are_none(cap: Any, error: type[Exception], text: str) -> None:
    q = randn(0, 1, 4, 2, 32)
    plan = masks.causal(4).plan(16, 16)
    with pytest.raises(error, match=text):
        pd.block_sparse_attention(q, q, q, plan, softcap=cap)
    with pytest.raises(error, match=text):
        pd.speculative_attention(q, q, q, q, q, torch.tensor([0]), plan, softcap=cap)


def test_where_there_is_no_kernel() -> None:
    """Triton's kernels and gradients; the reference has them."""
    q = randn(0, 1, 4, 2, 32)
    plan = masks.causal(4).plan(16, 16)
    text = "softcap must be None for kernels of Triton and for gradients, got 1.5"
    with pytest.raises(NotImplementedError, match=text):
        pd.block_sparse_attention(q.clone().requires_grad_(), q, q, plan, softcap=CAP)
    from pdkernels.ops import block_sparse_attention as forward
    from pdkernels.ops import speculative_attention as cached

    arguments = AttentionArguments(q, q, q, *plan.arguments, 0.2, None, CAP)
    speculative = SpeculativeArguments(q, q, q, q, q, torch.tensor([0]), *plan.arguments, 0.2, softcap=CAP)
    import sys

    for run in (
        lambda: sys.modules[forward.__module__]._triton(arguments),
        lambda: sys.modules[cached.__module__].by_triton("speculative_attention", speculative),
    ):
        with pytest.raises(NotImplementedError, match=text):
            run()
    leaf = q.clone().requires_grad_()
    pd.block_sparse_attention(leaf, q, q, plan, softcap=CAP, backend="reference").sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
