from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.models import RecurrentDepth
from pdkernels.models.architectures import fused
from tests.harness.error_budget import assert_within_budget
from tests.models.test_recurrent_depth import (
    CONFIG,
    PUBLISHED,
    WIDE,
    build,
    close,
    plain_logits,
    random_tokens,
    reference_of,
)

# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["uncached", "contiguous", "paged"])
def test_as_exact_as_pytorch(dtype: torch.dtype, kind: str) -> None:
    model, tokens = build(WIDE, dtype), random_tokens(2, 13, 61)
    pieces = [13] if kind == "uncached" else [9, 1, 3]
    pytorch, oracle = (
        torch.stack([plain_logits(reference_of(model, wide), row.tolist(), pieces, 1) for row in tokens])
        for wide in (dtype, torch.float64)
    )
    if kind == "uncached":
        actual = model(tokens, recurrences=1)
    else:
        cache = model.new_cache(2, 16, kind=kind, page_size=4)
        actual = torch.cat(list(in_pieces(model, cache, tokens, pieces, 1)), 1)
    assert actual.dtype == dtype
    assert_within_budget(actual, oracle, pytorch, name=f"logits, {kind}")


def in_pieces(
    model: RecurrentDepth, cache: ContiguousKVCache | PagedKVCache, tokens: Tensor, pieces: list[int], recurrences: int
) -> Iterator[Tensor]:
    """Logits of pieces of `tokens`, each committed before the next."""
    if cache.block_table is not None:
        cache.reserve_([tokens.shape[1]] * len(tokens))
    for piece in tokens.split(pieces, 1):
        yield model(piece, cache=cache, recurrences=recurrences)
        cache.commit_(torch.full((len(tokens),), piece.shape[1]))


# ---- on a cache


def drive(
    model: RecurrentDepth,
    lengths: list[int],
    steps: list[list[int]],
    kind: str,
    page_size: int,
    slack: int,
    recurrences: int,
    tolerance: float = 1e-10,
) -> None:
    """Feed row b in pieces of `steps[s][b]` tokens, padded to the widest, and compare every row that counts."""
    batch, tokens = len(lengths), random_tokens(len(lengths), max(lengths), model.config.vocab_size)
    plain = reference_of(model)
    pieces = [[step[b] for step in steps if step[b]] for b in range(batch)]
    expected = [plain_logits(plain, tokens[b, : lengths[b]].tolist(), pieces[b], recurrences) for b in range(batch)]
    cache = model.new_cache(batch, max(lengths) + slack, kind=kind, page_size=page_size)
    if kind == "paged":
        cache.reserve_(lengths)
    # Finite, since the copy used for fp64 multiplies what a sequence does not see by 0.
    cache.k.fill_(1e3)
    cache.v.fill_(-1e3)
    done = [0] * batch
    for step in steps:
        piece = torch.zeros(batch, max(step), dtype=torch.int64)
        for b, count in enumerate(step):
            piece[b, :count] = tokens[b, done[b] : done[b] + count]
        counts = None if len(set(step)) == 1 else torch.tensor(step)
        logits = model(piece, cache=cache, counts=counts, recurrences=recurrences)
        assert cache.lengths.tolist() == done
        for b, count in enumerate(step):
            close(logits[b, :count], expected[b][done[b] : done[b] + count], tolerance)
            done[b] += count
        cache.commit_(torch.tensor(step))
    assert done == lengths and cache.lengths.tolist() == lengths


@given(data=st.data())
@settings(max_examples=12)
def test_a_cache_equals_a_plain_past(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3), "batch")
    count = data.draw(st.integers(1, 4), "steps")
    step = st.lists(st.integers(0, 5), min_size=batch, max_size=batch)
    steps = data.draw(st.lists(step.filter(any), min_size=count, max_size=count), "pieces")
    lengths = [max(sum(step[b] for step in steps), 0) for b in range(batch)]
    steps.append([0 if length else 1 for length in lengths])
    steps = [step for step in steps if any(step)]
    lengths = [sum(step[b] for step in steps) for b in range(batch)]
    kind, page_size = data.draw(st.sampled_from(["contiguous", "paged"])), data.draw(st.integers(1, 5))
    drive(build(), lengths, steps, kind, page_size, data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4)))


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("recurrences", [1, 4])
def test_kernels_read_the_cache_in_place(kind: str, recurrences: int) -> None:
    drive(build(WIDE, torch.float32), [9, 7, 12], [[4, 7, 1], [5, 0, 1], [0, 0, 10]], kind, 4, 1, recurrences, 2e-3)
    drive(build(WIDE, torch.float32), [9, 9], [[6, 6], [1, 1], [1, 1], [1, 1]], kind, 4, 0, recurrences, 2e-3)
    heads_of_96 = build(replace(CONFIG, hidden_size=288, head_dim=96), torch.float32)
    drive(heads_of_96, [5, 3], [[3, 2], [1, 1], [1, 0]], kind, 2, 0, recurrences, 2e-3)


@pytest.mark.parametrize("pieces", [[1, 1, 1, 1, 1, 1], [4, 2], [1, 5]])
def test_with_one_recurrence_a_text_may_come_in_any_pieces(pieces: list[int]) -> None:
    model, tokens = build(), random_tokens(2, 6)
    logits = torch.cat(list(in_pieces(model, model.new_cache(2, 6), tokens, pieces, 1)), 1)
    close(logits, model(tokens, recurrences=1))


def test_recurrences_overwrite_the_same_slots() -> None:
    model, tokens = build(PUBLISHED), random_tokens(1, 5)
    cache, longer = model.new_cache(1, 9), model.new_cache(1, 9)
    assert cache.layers == len(cache.k) == model.config.layers == 8
    for slots in (cache.k, cache.v, longer.k, longer.v):
        slots.fill_(7.0)
    cache.lengths.fill_(2)
    longer.lengths.fill_(2)
    model(tokens, cache=cache, recurrences=1)
    model(tokens, cache=longer, recurrences=3)
    for few, many in ((cache.k, longer.k), (cache.v, longer.v)):
        same = [torch.equal(a, b) for a, b in zip(few, many)]
        assert same == [True] * 2 + [False] * 6
        untouched = torch.tensor([True] * 2 + [False] * 5 + [True] * 2)
        assert torch.equal((few == 7).all(-1).all(-1).all(1).all(0), untouched)
        assert torch.equal((many == 7).all(-1).all(-1).all(1).all(0), untouched)
    # The slots hold what the last recurrence alone would leave.
    context = model.context(5, cache)
    state, term = model.begin(model.prelude(tokens, context), context)
    for _ in range(3):
        state = model.core(state, term, context)
    model.coda(state, context)
    close(cache.k, longer.k)
    close(cache.v, longer.v)


def test_parts_leave_the_lengths_alone_and_can_be_repeated() -> None:
    model, tokens = build(dtype=torch.float32), random_tokens(2, 4)
    cache = model.new_cache(2, 10, kind="paged", page_size=3)
    cache.reserve_([8, 8])
    model(tokens, cache=cache)
    cache.commit_(torch.tensor([4, 3]))
    first = model(tokens[:, :3], cache=cache)
    assert torch.equal(model(tokens[:, :3], cache=cache), first)
    assert cache.lengths.tolist() == [4, 3]


# ---- fused ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["uncached", "contiguous", "paged"])
def test_fused_layers_are_as_exact_as_plain_ones(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = build(WIDE, dtype), random_tokens(2, 8, 61)
    exact = copy.deepcopy(model).double()

    def run(model: RecurrentDepth, enabled: bool) -> list[Tensor]:
        """The prelude of pieces of the text: all rows, some of them, a single one; and what it leaves in its slot."""
        monkeypatch.setattr(fused, "enabled", lambda x: enabled)
        if kind == "uncached":
            return [model.prelude(tokens, model.context(8))]
        cache = model.new_cache(2, 12, kind=kind, page_size=4)
        if kind == "paged":
            cache.reserve_([8, 8])
        counts = torch.tensor([8, 5])
        first = model.prelude(tokens, model.context(8, cache, counts))[:, :5]
        cache.commit_(counts)
        cache.trim_(4)
        if kind == "paged":
            cache.reserve_([7, 7])
        second = model.prelude(tokens[:, :3], model.context(3, cache))
        cache.commit_(torch.tensor([1, 1]))
        third = model.prelude(tokens[:, 7:], model.context(1, cache))
        return [first, second, third, cache.k[0].clone(), cache.v[0].clone()]

    for ours, oracle, plain in zip(run(model, True), run(exact, False), run(model, False), strict=True):
        assert not ours.requires_grad and ours.dtype == dtype
        assert_within_budget(ours, oracle, plain, name=kind)


def test_ops_are_for_inference_in_kernel_dtypes() -> None:
    x = torch.ones(1)
    assert not fused.enabled(x)
    with torch.no_grad():
        assert fused.enabled(x) and fused.enabled(x.bfloat16()) and not fused.enabled(x.double())


def test_a_full_cache_takes_no_more() -> None:
    model = build(dtype=torch.float32)
    cache = model.new_cache(1, 4)
    with pytest.raises(ValueError, match="4"):
        model(random_tokens(1, 5), cache=cache)
