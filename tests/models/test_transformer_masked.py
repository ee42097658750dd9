"""Bidirectional models, and rows that are recomputed in their slots of a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.models import Transformer, to_hf_state_dict
from pdkernels.models.architectures import recompute
from reference.masked_model import MaskedTransformerReference
from tests.harness.error_budget import assert_within_budget
from tests.models.test_transformer import CONFIG, VARIANTS, build, close, random_tokens

CAPACITY = 12
MASKED = {name: replace(config, attention="bidirectional", predicts="own") for name, config in VARIANTS.items()}
PLAIN = replace(MASKED["gqa"], tied_head=False)
"""Published names exist for it."""


def assert_same(actual: Tensor, expected: Tensor, exact: Tensor) -> None:
    """To 1e-11 in float64; in float32 within the error of `expected`, which computes the same another way."""
    if actual.dtype == torch.float64:
        close(actual, expected, 1e-11)
    else:
        assert_within_budget(actual, exact, expected, name="hidden or logits")


# ---- forwards without a cache


@pytest.mark.parametrize("variant", MASKED)
def test_all_rows_see_all(variant: str) -> None:
    model, tokens = build(MASKED[variant]), random_tokens(2, 7)
    everything = torch.ones(7, 7, dtype=torch.bool)
    close(model(tokens), model(tokens, mask=everything))
    # Training takes another path, and so does an explicit mask.
    close(model.requires_grad_(True)(tokens), model(tokens, mask=everything))
    causal = build(VARIANTS[variant])
    close(model(tokens, mask=everything.tril()), causal(tokens))
    assert not torch.allclose(model(tokens)[:, 0], causal(tokens)[:, 0])


def test_after_a_cache_new_rows_see_each_other_causally_unless_a_mask_is_given() -> None:
    model, tokens = build(MASKED["gqa"]), random_tokens(1, 6)
    close(model(tokens, cache=model.new_cache(1, 8)), build(CONFIG)(tokens))
    close(model(tokens, cache=model.new_cache(1, 8), mask=torch.ones(6, 6, dtype=torch.bool)), model(tokens))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("attention", "pdkernels.TransformerConfig: attention must be 'causal' or 'bidirectional', got 'both'."),
        ("predicts", "pdkernels.TransformerConfig: predicts must be 'next' or 'own', got 'both'."),
    ],
)
def test_config_errors(field: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        replace(CONFIG, **{field: "both"})
    assert str(caught.value) == message


# ---- recompute


class Recompute(NamedTuple):
    """Arguments of one call."""

    tokens: Tensor
    starts: Tensor
    slots: Tensor | None
    counts: Tensor | None
    visible: Tensor

    def run(self, model: Transformer, cache: Any) -> Tensor:
        return model.recompute(
            self.tokens, cache, self.starts, slots=self.slots, counts=self.counts, visible=self.visible
        )

    def counted(self, sequence: int) -> list[tuple[int, int]]:
        """Rows of a sequence that are not padding, and their slots."""
        batch, rows = self.tokens.shape
        slots = torch.arange(rows).expand(batch, -1) if self.slots is None else self.slots
        count = rows if self.counts is None else int(self.counts[sequence])
        start = int(self.starts[sequence])
        return [(row, start + int(slots[sequence, row])) for row in range(count) if slots[sequence, row] >= 0]

    def alone(self, sequence: int) -> Recompute:
        return Recompute(*(None if part is None else part[sequence : sequence + 1] for part in self))


def draw(seed: int, batch: int, rows: int, by_slots: bool, by_counts: bool) -> Recompute:
    """Any slots, in any order, with padding anywhere; a sequence may see only part of what it writes, or none of it."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    starts = integers(0, CAPACITY - rows, batch)
    slots = None
    if by_slots:
        slots = torch.stack([torch.randperm(CAPACITY - int(start), generator=generator)[:rows] for start in starts])
        slots[torch.rand(batch, rows, generator=generator) < 0.2] = -1
    counts = integers(0, rows, batch) if by_counts else None
    return Recompute(
        integers(0, CONFIG.vocab_size - 1, batch, rows), starts, slots, counts, integers(1, CAPACITY, batch)
    )


def new_cache(model: Transformer, batch: int, page_size: int | None, seed: int | None = 0) -> Any:
    """A cache full of random rows; zeros without a seed."""
    if page_size is None:
        cache = model.new_cache(batch, CAPACITY)
    else:
        cache = model.new_cache(batch, CAPACITY, kind="paged", page_size=page_size)
        cache.reserve_([CAPACITY] * batch)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for side in (cache.k, cache.v):
            side.copy_(torch.randn(side.shape, generator=generator))
    return cache


def stored(cache: Any) -> Tensor:
    """K and V of all slots in order: (2, layers, batch, CAPACITY, kv_heads, head_dim)."""
    return torch.stack([torch.stack(cache.layer(layer, CAPACITY)) for layer in range(cache.layers)], 1)


def plain_recompute(model: MaskedTransformerReference, past: Tensor, call: Recompute, sequence: int) -> Tensor:
    """Logits of the rows that count; `past` (2, layers, slots, kv_heads, head_dim) is changed."""
    rows = call.counted(sequence)
    places = torch.tensor([place for _, place in rows], dtype=torch.int64)
    x = model.embed(call.tokens[sequence, [row for row, _ in rows]])
    seen = int(call.visible[sequence])
    for layer in range(model.layers):
        q, past[0, layer, places], past[1, layer, places] = model.qkv(layer, x, places)
        x = x + model.attend(layer, q, past[0, layer, :seen], past[1, layer, :seen])
        x = x + model.feed_forward(layer, x)
    return model.logits(x)


@settings(max_examples=60)
@given(
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3),
    batch=st.integers(1, 3),
    rows=st.integers(1, 6),
    by_slots=st.booleans(),
    by_counts=st.booleans(),
    page_size=st.sampled_from([None, 1, 5, 16]),
)
def test_equals_the_plain_computation(
    seeds: list[int], batch: int, rows: int, by_slots: bool, by_counts: bool, page_size: int | None
) -> None:
    model = build(PLAIN)
    plain = MaskedTransformerReference(to_hf_state_dict(model.state_dict(), PLAIN), heads=PLAIN.heads, names="qwen2")
    cache = new_cache(model, batch, page_size)
    past = stored(cache).clone()
    for seed in seeds:  # each sees what the one before wrote
        call = draw(seed, batch, rows, by_slots, by_counts)
        logits = model.logits(call.run(model, cache))
        for sequence in range(batch):
            expected = plain_recompute(plain, past[:, :, sequence], call, sequence)
            close(logits[sequence, [row for row, _ in call.counted(sequence)]], expected, 1e-9)
    close(stored(cache), past, 1e-9)
    assert not cache.lengths.any()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    by_slots=st.booleans(),
    by_counts=st.booleans(),
    page_size=st.sampled_from([None, 1, 5, 16]),
    variant=st.sampled_from(sorted(MASKED)),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
)
def test_kernels_are_within_the_error_of_dense_masks(
    seed: int, by_slots: bool, by_counts: bool, page_size: int | None, variant: str, dtype: torch.dtype
) -> None:
    batch, rows = 5, 6  # a budget needs some hundred values
    config = replace(MASKED[variant], head_dim=16)
    model = build(config, dtype)
    exact, call = build(config, dtype).double(), draw(seed, batch, rows, by_slots, by_counts)
    cache, dense_cache, exact_cache = (new_cache(m, batch, page_size) for m in (model, model, exact))
    # In a half precision the stored rows are rounded: the exact model gets them as they are.
    exact_cache.k.copy_(cache.k)
    exact_cache.v.copy_(cache.v)
    actual = call.run(model, cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "takes_head_dim", lambda head_dim: False)
        dense, expected = call.run(model, dense_cache), call.run(exact, exact_cache)
    counted = [call.counted(sequence) for sequence in range(batch)]
    kept = tuple(torch.tensor([(sequence, row) for sequence in range(batch) for row, _ in counted[sequence]]).T)
    assert_within_budget(actual[kept], expected[kept], dense[kept], name="hidden")
    for actual, expected, dense in zip(stored(cache), stored(exact_cache), stored(dense_cache), strict=True):
        assert_within_budget(actual, expected, dense, name="K or V")
    written = torch.zeros(batch, CAPACITY, dtype=torch.bool)
    for sequence in range(batch):
        written[sequence, [place for _, place in counted[sequence]]] = True
    before = stored(new_cache(model, batch, page_size))
    assert torch.equal(stored(cache)[:, :, ~written], before[:, :, ~written])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", MASKED)
def test_a_whole_text_is_a_forward_without_a_cache(variant: str, dtype: torch.dtype) -> None:
    model, exact = (build(replace(MASKED[variant], head_dim=16), kind) for kind in (dtype, torch.float64))
    texts, tokens = [9, 4], random_tokens(2, 9)
    cache, lengths = new_cache(model, 2, 4), torch.tensor(texts)
    zeros = torch.zeros(2, dtype=torch.int64)
    logits = model.logits(model.recompute(tokens, cache, zeros, counts=lengths, visible=lengths))
    # In two halves: the second sees both, and then so does the first.
    model.recompute(tokens[:, :5], cache, zeros, counts=lengths.clamp(max=5), visible=lengths)
    model.recompute(tokens[:, 5:], cache, zeros + 5, counts=(lengths - 5).clamp(min=0), visible=lengths)
    assert stored(cache).isfinite().all()
    alone = [torch.cat([m(tokens[i : i + 1, :length])[0] for i, length in enumerate(texts)]) for m in (model, exact)]
    assert_same(torch.cat([logits[i, :length] for i, length in enumerate(texts)]), *alone)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sequence_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    model, exact = (build(replace(PLAIN, head_dim=16), kind) for kind in (dtype, torch.float64))
    call = draw(3, 3, 5, by_slots=True, by_counts=True)
    call = call._replace(counts=torch.tensor([5, 0, 3]), visible=torch.tensor([12, 0, 7]))
    cache = new_cache(model, 3, None)
    together, before = call.run(model, cache), new_cache(model, 3, None)
    kept = {sequence: [row for row, _ in call.counted(sequence)] for sequence in (0, 2)}
    assert all(kept.values())
    alone = []
    for some in (model, exact):
        rows = []
        for sequence, own_rows in kept.items():
            own = new_cache(some, 1, None)
            own.k[:, 0], own.v[:, 0] = before.k[:, sequence], before.v[:, sequence]
            rows.append(call.alone(sequence).run(some, own)[0, own_rows])
        alone.append(torch.cat(rows))
    assert_same(torch.cat([together[sequence, rows] for sequence, rows in kept.items()]), *alone)
    # One without rows is left alone.
    assert torch.equal(cache.k[:, 1], before.k[:, 1]) and torch.equal(cache.v[:, 1], before.v[:, 1])


@pytest.mark.parametrize("page_size", [None, 5])
def test_kernels_read_in_place_and_only_what_is_visible(page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = build(replace(PLAIN, head_dim=16), torch.float32), draw(5, 2, 4, by_slots=True, by_counts=False)
    call = call._replace(visible=torch.tensor([9, 3]))
    clean, poisoned = (new_cache(model, 2, page_size) for _ in range(2))
    for sequence, seen in enumerate([9, 3]):
        for place in range(seen, CAPACITY):
            page = sequence if page_size is None else int(poisoned.block_table[sequence, place // page_size])
            slot = place if page_size is None else place % page_size
            poisoned.k[:, page, slot] = poisoned.v[:, page, slot] = torch.nan

    def refuse(*arguments: object) -> None:
        raise AssertionError("the rows of a cache were taken out of it")

    monkeypatch.setattr(ContiguousKVCache, "layer", refuse)
    monkeypatch.setattr(PagedKVCache, "layer", refuse)
    assert torch.equal(call.run(model, clean), call.run(model, poisoned))


def test_index_dtypes() -> None:
    model, call = build(PLAIN), draw(7, 2, 4, by_slots=True, by_counts=True)
    narrow = Recompute(*(part.int() for part in call))
    for own in (model, build(replace(PLAIN, head_dim=16), torch.float32)):
        caches = [new_cache(own, 2, 5) for _ in range(2)]
        assert torch.equal(narrow.run(own, caches[0]), call.run(own, caches[1]))
        assert torch.equal(caches[0].k, caches[1].k)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "tokens must have shape (batch, length), got (3,)."),
        ({"tokens": torch.zeros(3, 2, dtype=torch.int64)}, "tokens must have the batch size of the cache (2), got 3."),
        ({"tokens": torch.zeros(2, 2)}, "tokens must be int64 or int32, got torch.float32."),
        ({"starts": torch.zeros(3, dtype=torch.int64)}, "starts must have shape (2), got (3,)."),
        ({"starts": torch.tensor([0, -1])}, "starts must not be negative, got -1."),
        ({"slots": torch.zeros(2, 3, dtype=torch.int64)}, "slots must have shape (2, 2), got (2, 3)."),
        ({"slots": torch.tensor([[0, 1], [0, -2]])}, "slots must be -1 or more, got -2."),
        ({"starts": torch.tensor([0, 11])}, "slots must stay below the cache's capacity (12), got 12."),
        (
            {"counts": torch.zeros(2)},
            "counts must be an int32 or int64 tensor, got torch.float32. Convert it with .to(torch.int64).",
        ),
        ({"visible": torch.tensor([5, 13])}, "visible must lie in [0, 12], the cache's capacity, got 5..13."),
        ({"visible": torch.tensor([-1, 3])}, "visible must lie in [0, 12], the cache's capacity, got -1..3."),
        ({"tokens": torch.tensor([[1, 2], [13, 0]])}, "tokens must hold ids in [0, 13), got 0..13."),
    ],
)
def test_errors_come_before_anything_is_written(changes: dict[str, Tensor], message: str) -> None:
    for head_dim, dtype in ((8, torch.float64), (16, torch.float32)):
        model = build(replace(PLAIN, head_dim=head_dim), dtype)
        cache, two = new_cache(model, 2, None), torch.zeros(2, 2, dtype=torch.int64)
        arguments = {"tokens": two, "starts": two[0], "visible": two[0] + 4} | changes
        with pytest.raises((ValueError, TypeError)) as caught:
            model.recompute(arguments.pop("tokens"), cache, arguments.pop("starts"), **arguments)
        assert str(caught.value).endswith(message) and str(caught.value).startswith("pdkernels.Transformer")
        assert torch.equal(stored(cache), stored(new_cache(model, 2, None)))


def test_slots_need_pages() -> None:
    for config, dtype in ((PLAIN, torch.float64), (replace(PLAIN, head_dim=16), torch.float32)):
        model = build(config, dtype)
        cache = model.new_cache(2, CAPACITY, kind="paged", page_size=4)
        cache.reserve_([12, 5])
        tokens, zeros = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        model.recompute(tokens, cache, torch.tensor([9, 5]), visible=torch.tensor([12, 8]))
        before = stored(cache).clone()
        for starts, seen, needed in ((zeros + 6, zeros + 8, [9, 9]), (zeros, torch.tensor([12, 9]), [12, 9])):
            with pytest.raises(ValueError) as caught:
                model.recompute(tokens, cache, starts, visible=seen)
            assert str(caught.value) == (
                f"pdkernels.Transformer.recompute: cache must own pages of {needed} positions, got [12, 8]. "
                "Call cache.reserve_ before."
            )
        assert torch.equal(stored(cache), before)
