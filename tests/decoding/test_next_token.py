"""The end of a step as one op gives what PyTorch's ops give, whatever the logits are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import _native
from pdkernels.cache import ContiguousKVCache
from pdkernels.decoding.steps.entry import Entry
from pdkernels.generation import next_token
from pdkernels.generation.noise import greedy

pytestmark = pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")

NUMBERS = [-torch.inf, torch.inf, torch.nan, 0.0, 1.0, 2.0]


@settings(max_examples=150)
@given(
    pending=st.lists(st.integers(0, 1), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**16),
    ends=st.sampled_from([None, [2], [0, 3]]),
    suppress=st.sampled_from([(), (1,), (0, 4)]),
    chosen=st.booleans(),
)
def test_has_the_numbers_of_the_plain_form(
    pending: list[int], dtype: torch.dtype, seed: int, ends: list[int] | None, suppress: tuple[int, ...], chosen: bool
) -> None:
    batch, generator = len(pending), torch.Generator().manual_seed(seed)
    # Mostly finite: a row with a NaN has no choice.
    weights = torch.tensor([4.0, 1.0, 1.0, 20.0, 20.0, 20.0]).expand(batch, -1)
    logits = torch.tensor(NUMBERS)[weights.multinomial(6, replacement=True, generator=generator)][:, None].to(dtype)
    remaining = torch.randint(1, 4, (batch,), generator=generator) * torch.tensor(pending)
    found = []
    for by_op in (True, False):
        cache, entry = ContiguousKVCache(1, batch, 5, 1, 16), Entry(batch, torch.device("cpu"), draft=1)
        cache.lengths.copy_(torch.arange(batch))
        entry.pending.copy_(torch.tensor(pending))
        entry.accepted.fill_(7)
        entry.draft.fill_(1)
        state = entry, remaining.clone(), cache, logits
        end_tokens = None if ends is None else torch.tensor(ends)
        tokens = greedy(logits, suppress)
        if not by_op:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_native, "has_native", lambda: False)
                next_token.write_next_token_(*state, tokens, end_tokens)
        elif chosen:
            next_token.write_next_token_(*state, tokens, end_tokens)
        else:
            assert next_token.write_likeliest_(*state, end_tokens, suppress)
        found.append((entry.table.tolist(), state[1].tolist(), cache.lengths.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("length", [-1, 5])
def test_a_full_cache_is_refused_and_nothing_is_written(length: int) -> None:
    cache, entry = ContiguousKVCache(1, 2, 5, 1, 16), Entry(2, torch.device("cpu"), draft=1)
    cache.lengths[1] = length
    entry.pending.fill_(1)
    remaining = torch.tensor([3, 3])
    state: Any = entry, remaining, cache, torch.randn(2, 1, 6)
    before = entry.table.clone()
    assert not next_token.write_likeliest_(*state, None, ())
    with pytest.raises(ValueError, match="lengths"):
        next_token.write_next_token_(*state, torch.tensor([[1], [2]]), None)
    assert torch.equal(entry.table, before) and remaining.tolist() == [3, 3] and cache.lengths.tolist() == [0, length]


def test_versions_of_what_it_writes_count() -> None:
    cache, entry = ContiguousKVCache(1, 1, 5, 1, 16), Entry(1, torch.device("cpu"), draft=1)
    remaining = torch.tensor([3])
    versions = [tensor._version for tensor in (entry.table, remaining, cache.lengths)]
    assert next_token.write_likeliest_(entry, remaining, cache, torch.randn(1, 1, 6), None, ())
    assert [tensor._version for tensor in (entry.table, remaining, cache.lengths)] == [n + 1 for n in versions]
