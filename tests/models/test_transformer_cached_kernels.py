"""Forwards on a cache in dtypes that kernels take: the cache is read in place, and results are those of dense masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import pdkernels as pd
from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.masks import TilePlan
from pdkernels.models import Transformer
from pdkernels.models.architectures import attention
from tests.harness.error_budget import assert_within_budget, measured
from tests.models.test_transformer import VARIANTS, build, random_tokens
from tests.models.test_transformer_cached_plans import CAPACITY, MASKS, alone, caches

CONFIGS = {name: replace(config, head_dim=16, vocab_size=256) for name, config in VARIANTS.items()}


def models(variant: str, dtype: torch.dtype = torch.float32) -> tuple[Transformer, Transformer]:
    """The same weights in `dtype` and, to compare with, in fp64."""
    return build(CONFIGS[variant], dtype), build(CONFIGS[variant], dtype).double()


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward may request the rows of a cache, which are copies with pages or dense masks."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the rows of a cache were taken out of it")

    monkeypatch.setattr(ContiguousKVCache, "layer", refuse)
    monkeypatch.setattr(PagedKVCache, "layer", refuse)


@settings(max_examples=60)
@given(
    name=st.sampled_from([None, *sorted(MASKS)]),
    stacked=st.booleans(),
    width=st.integers(1, 9),
    variant=st.sampled_from(sorted(CONFIGS)),
    prefixes=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    page_size=st.sampled_from([None, None, 1, 3, 16]),
)
def test_within_the_error_of_dense_masks(
    name: str | None, stacked: bool, width: int, variant: str, prefixes: list[int], page_size: int | None
) -> None:
    model, exact = models(variant)
    mask = pd.masks.causal(width) if name is None else MASKS[name]
    batch, rows = len(prefixes), mask.q_len
    plan = None if name is None else mask.plan(16, 16)
    if plan is not None and stacked:
        plan = TilePlan.stack([plan] * batch)
    tokens = random_tokens(batch, rows, seed=1)
    actual = model(tokens, cache=caches(model, prefixes, page_size), mask=plan, positions=mask.positions)
    expected, pytorch = (
        torch.stack(
            [
                alone(m, prefix, row, batch, tokens[row], mask.dense(), mask.positions)
                for row, prefix in enumerate(prefixes)
            ]
        )
        for m in (exact, model)
    )
    found = measured(actual, expected, pytorch, name="logits")
    assert found.kernel_rms <= found.allowed_rms, found


@pytest.mark.parametrize("variant", sorted(CONFIGS))
def test_largest_errors_of_all_masks(variant: str) -> None:
    """Those of one example are down to luck, so they are checked together."""
    (model, exact), every = models(variant), []
    for name in (None, *sorted(MASKS)):
        mask = pd.masks.causal(5) if name is None else MASKS[name]
        plan = None if name is None else mask.plan(16, 16)
        for seed in range(6):
            tokens, prefixes = random_tokens(2, mask.q_len, seed=seed), [3 * seed, 6]
            found = model(tokens, cache=caches(model, prefixes, 3), mask=plan, positions=mask.positions)
            by_both = (
                torch.stack(
                    [
                        alone(m, prefix, row, 2, tokens[row], mask.dense(), mask.positions)
                        for row, prefix in enumerate(prefixes)
                    ]
                )
                for m in (exact, model)
            )
            every.append([t.flatten() for t in (found, *by_both)])
    assert_within_budget(*(torch.cat(parts) for parts in zip(*every)), name=f"logits of {variant}")


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("name", [None, "quadratic"])
def test_a_cache_is_read_in_place(name: str | None, page_size: int | None, in_place: None) -> None:
    model = models("gqa")[0]
    cache = caches(model, [5, 2], page_size)
    tokens, mask = random_tokens(2, 9, seed=1), None if name is None else MASKS[name].plan(16, 16)
    assert model(tokens, cache=cache, mask=mask).isfinite().all()
    # A single row as well, if lengths differ or rows are in pages.
    assert model(tokens[:, :1], cache=cache).isfinite().all()


@pytest.mark.parametrize("counts", [None, [2, 0]])
@pytest.mark.parametrize("page_size", [None, 3])
def test_attention_stores_rows_on_its_way(page_size: int | None, counts: list[int] | None) -> None:
    """One op per layer, whether all rows, some, or none of a sequence are stored."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend([op._opname] if op.namespace == "pdkernels" else [])
            return op(*args, **kwargs or {})

    model, _ = models("gqa")
    cache = caches(model, [5, 2], page_size)
    with Watch():
        model(random_tokens(2, 4), cache=cache, counts=None if counts is None else torch.tensor(counts))
    first = ["add_rms_norm", "linear", "apply_rope_", "speculative_attention_append_", "linear"]
    layer = [*first, "add_rms_norm", "linear", "silu_and_mul", "linear"]
    assert seen == layer * model.config.layers + ["add_rms_norm", "linear"]


def test_a_bool_mask_is_its_plan() -> None:
    model, exact = models("gqa")
    tokens, mask, prefixes = random_tokens(2, 9, seed=1), MASKS["quadratic"], [5, 2]
    dense = model(tokens, cache=caches(model, prefixes, 3), mask=mask.dense())
    plan = model(tokens, cache=caches(model, prefixes, 3), mask=mask.plan(16, 16))
    assert_within_budget(plan, exact(tokens, cache=caches(exact, prefixes, 3), mask=mask.dense()), dense, name="logits")


def test_a_bool_mask_takes_a_copy(in_place: None) -> None:
    model = models("gqa")[0]
    with pytest.raises(AssertionError, match="taken out"):
        model(random_tokens(2, 6, seed=1), cache=caches(model, [5, 2], None), mask=MASKS["block"].dense())


def test_a_lone_row_on_either_path() -> None:
    model, exact = models("gqa")
    tokens = random_tokens(2, 1, seed=1)
    view = model(tokens, cache=caches(model, [7, 7], None))
    paged = model(tokens, cache=caches(model, [7, 7], 4))
    expected = exact(tokens, cache=caches(exact, [7, 7], None))
    assert_within_budget(paged, expected, view, name="logits")
    # Counted, it may be one that is not kept.
    counts, cache = torch.tensor([1, 0]), caches(model, [7, 7], None)
    assert_within_budget(model(tokens, cache=cache, counts=counts), expected, view, name="logits")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, exact = models("gqa", dtype)
    tokens, mask = random_tokens(2, 9, seed=1), MASKS["quadratic"]
    dense, plan = (model(tokens, cache=caches(model, [6, 3], 4), mask=m) for m in (mask.dense(), mask.plan(16, 16)))
    # Both read K and V that the model rounded: the exact one gets them as they are.
    cache, rounded = caches(exact, [6, 3], 4), caches(model, [6, 3], 4)
    cache.k.copy_(rounded.k)
    cache.v.copy_(rounded.v)
    assert_within_budget(plan, exact(tokens, cache=cache, mask=mask.dense()), dense, name="logits")


def test_what_is_past_the_lengths_is_not_read() -> None:
    model, tokens = models("gqa")[0], random_tokens(2, 6, seed=1)
    for page_size in (None, 4):
        clean, poisoned = (caches(model, [5, 2], page_size) for _ in range(2))
        for layer in range(2):
            for row, prefix in enumerate([5, 2]):
                for position in range(prefix, CAPACITY):
                    slot = (row, position)
                    if page_size is not None:
                        slot = (int(poisoned.block_table[row, position // page_size]), position % page_size)
                    poisoned.k[layer][slot] = poisoned.v[layer][slot] = torch.nan
        assert torch.equal(model(tokens, cache=clean), model(tokens, cache=poisoned))


def test_what_no_kernel_takes_uses_a_dense_mask() -> None:
    for config, dtype in ((CONFIGS["gqa"], torch.float64), (VARIANTS["gqa"], torch.float32)):
        model = build(config, dtype)
        seen = attention.cached_visibility(model.new_cache(2, 8), [3, 1], None, 4, None)
        assert isinstance(seen.mask, torch.Tensor) and seen.mask.shape == (2, 1, 4, 3 + 4) and seen.prefix == 3
