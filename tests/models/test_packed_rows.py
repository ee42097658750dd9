"""A forward over packed rows gives every row, and what the cache keeps of it, the bits of a padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.models import TransformerConfig
from pdkernels.ops.quantize import quantize
from tests.models.test_row_invariance import CONFIG, DTYPES, a_model, configs, some_tokens
from tests.support.errors import refused


def compare(model: Any, prefix: list[int], counts: list[int], page_size: int) -> None:
    batch, width = len(counts), max(counts)
    room = max(prefix) + width
    caches = []
    for _ in range(2):
        cache = model.new_cache(batch, room, **({"kind": "paged", "page_size": page_size} if page_size else {}))
        if page_size:
            cache.reserve_([room] * batch)
        model(some_tokens(batch, max(prefix)), cache=cache, counts=torch.tensor(prefix))
        cache.commit_(torch.tensor(prefix))
        caches.append(cache)
    tokens, rows = some_tokens(batch, width), torch.tensor(counts)
    taken = torch.arange(width) < rows[:, None]
    begins = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
    padded = model(tokens, cache=caches[0], counts=rows)
    packed = model(tokens[taken][None], cache=caches[1], cu_seqlens=begins)
    assert torch.equal(packed[0], padded[taken])
    for cache in caches:
        cache.commit_(rows)
    for layer in range(model.config.layers):
        for kept in zip(*(cache.layer(layer, room) for cache in caches), strict=True):
            for b, (before, new) in enumerate(zip(prefix, counts, strict=True)):
                assert torch.equal(kept[0][b, : before + new], kept[1][b, : before + new])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole", ["1", "0"])
@given(
    config=configs(),
    rows=st.lists(st.tuples(st.integers(1, 140), st.integers(0, 5)), min_size=1, max_size=5),
    page_size=st.sampled_from([0, 5]),
)
@settings(max_examples=12)
def test_packed_rows_have_the_bits_of_padded_ones(
    dtype: torch.dtype, whole: str, config: TransformerConfig, rows: list[tuple[int, int]], page_size: int
) -> None:
    prefix, counts = [before for before, _ in rows], [new for _, new in rows]
    counts[0] += 1  # somebody has a row
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDKERNELS_WHOLE_STEP", whole)
        compare(a_model(config, dtype), prefix, counts, page_size)


def test_an_8_bit_cache_and_quantised_matrices() -> None:
    model = a_model(CONFIG, torch.float32)
    model.cache_dtype = torch.int8
    compare(model, [3, 60, 9], [1, 4, 2], 0)
    compare(quantize(a_model(CONFIG, torch.float32), "int8"), [3, 60, 9], [1, 4, 2], 5)


def test_what_does_not_fit_is_refused() -> None:
    model = a_model(CONFIG, torch.float32)
    cache, tokens, begins = model.new_cache(2, 9), some_tokens(1, 4), torch.tensor([0, 1, 4])
    with refused(r"cu_seqlens must ascend from 0 to the rows of tokens \(1, 4\), got \[0, 1, 3\]"):
        model(tokens, cache=cache, cu_seqlens=torch.tensor([0, 1, 3]))
    with refused("cu_seqlens must come without counts, positions, mask and adapted, got with them"):
        model(tokens, cache=cache, cu_seqlens=begins, counts=torch.tensor([1, 1]))
    with refused("cu_seqlens must come with a cache, for a model that packs_rows, got without"):
        model(tokens, cu_seqlens=begins)
    with refused("cu_seqlens must come with a cache, for a model that packs_rows, got without"):
        model.double()(tokens, cache=model.new_cache(2, 9), cu_seqlens=begins)
