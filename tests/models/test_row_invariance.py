"""A forward over n rows on a cache is n forwards of one row, bit for bit: logits, statistics, and K and V that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import masks
from pdkernels.models import RecurrentDepth, RecurrentDepthConfig, Transformer, TransformerConfig

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABULARY = 50
CONFIG = TransformerConfig(
    vocab_size=VOCABULARY, hidden_size=48, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate_size=40
)


@st.composite
def configs(draw: st.DrawFn) -> TransformerConfig:
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1), (9, 3), (2, 2), (18, 1)]))
    return TransformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=draw(st.sampled_from([16, 33, 48, 200])),
        layers=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 24, 64])),
        intermediate_size=draw(st.sampled_from([24, 37, 800])),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied_head=draw(st.booleans()),
        rope_style=draw(st.sampled_from(["half", "interleaved"])),
    )


def a_model(config: Any, dtype: torch.dtype, kind: Any = Transformer) -> Any:
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 + (parameter.dim() == 1))
    return model.to(dtype).requires_grad_(False)


def feed(
    model: Any, tokens: torch.Tensor, parts: Sequence[int], page_size: int = 0, room: int = 0, **options: Any
) -> list[torch.Tensor]:
    """Logits, K and V of `tokens` `(batch, n)` in forwards over so many rows each, on a cache with `room` to spare."""
    batch, length = tokens.shape
    kind = {"kind": "paged", "page_size": page_size} if page_size else {}
    cache = model.new_cache(batch, length + room, **kind)
    if page_size:
        cache.reserve_([length] * batch)
    logits, at = [], 0
    for rows in parts:
        logits.append(model(tokens[:, at : at + rows], cache=cache, **options))
        cache.commit_(torch.full((batch,), rows))
        at += rows
    layers = [part for layer in range(len(cache.k)) for part in cache.layer(layer, length)]
    return [torch.cat(logits, 1), *(part.clone() for part in layers)]


def assert_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.isfinite(b).all() and torch.equal(a, b)


def some_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    parts: list[int] = []
    while (left := length - sum(parts)) > 0:
        parts.append(draw(st.integers(1, left)))
    return parts


@settings(max_examples=40)
@given(data=st.data(), config=configs(), dtype=st.sampled_from(DTYPES[:2]), length=st.integers(2, 24))
def test_any_model_in_any_parts(
    data: st.DataObject, config: TransformerConfig, dtype: torch.dtype, length: int
) -> None:
    model, tokens = a_model(config, dtype), some_tokens(2, length)
    expected = feed(model, tokens, [1] * length)
    page_size, room = data.draw(st.sampled_from([0, 1, 5, 16])), data.draw(st.sampled_from([0, 3]))
    assert_same_bits(feed(model, tokens, data.draw(cuts(length)), page_size, room), expected)
    alone = feed(model, tokens[1:], [length])
    assert_same_bits(alone, [part[1:] for part in expected])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_texts(dtype: torch.dtype) -> None:
    """Beyond the block sizes of the kernels; threads share the rows differently."""
    model, tokens = a_model(CONFIG, dtype), some_tokens(1, 300)
    threads = torch.get_num_threads()
    expected = feed(model, tokens, [1] * 300)
    try:
        for count, parts in ((1, [300]), (2, [127, 3, 1, 129, 40]), (2, [63, 64, 173])):
            torch.set_num_threads(count)
            assert_same_bits(feed(model, tokens, parts, page_size=7 if count == 2 else 0), expected)
    finally:
        torch.set_num_threads(threads)


def test_splits_begin_at_positions() -> None:
    """A cache of several splits: the first two hold 4096 keys each, whatever is cached and whatever the capacity."""
    model, tokens = a_model(CONFIG, torch.bfloat16), some_tokens(1, 4102)
    expected = feed(model, tokens, [4090, *[1] * 12])
    for parts, room in (([4090, 12], 0), ([4095, 1, 6], 9000), ([4102], 5000)):
        assert_same_bits(feed(model, tokens, parts, room=room), expected)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_unequal_sequences_and_padding(dtype: torch.dtype) -> None:
    """A batch of prefixes of 5 and 1, of which the second has two rows of padding in the next forward."""
    model, tokens = a_model(CONFIG, dtype), some_tokens(2, 9)
    expected = feed(model, tokens, [1] * 9)[0]
    cache = model.new_cache(2, 12)
    model(tokens[:, :5], cache=cache, counts=torch.tensor([5, 1]))
    cache.commit_(torch.tensor([5, 1]))
    rows = torch.stack([tokens[0, 5:9], tokens[1, 1:5]])
    logits = model(rows, cache=cache, counts=torch.tensor([4, 2]))
    assert torch.equal(logits[0], expected[0, 5:9]) and torch.equal(logits[1, :2], expected[1, 1:3])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_causal_rows_next_to_others(dtype: torch.dtype) -> None:
    """The drafts of a quadratic plan come first and are causal; the groups of masks change nothing for them."""
    model, tokens = a_model(CONFIG, dtype), some_tokens(1, 140)
    mask, draft, cached = masks.quadratic(5), 5, 125
    expected = feed(model, tokens, [cached, *[1] * draft])[0]
    cache = model.new_cache(1, 200)
    model(tokens[:, :cached], cache=cache)
    cache.commit_(torch.tensor([cached]))
    rows = torch.cat([tokens[:, cached : cached + draft], some_tokens(1, mask.q_len - draft)], 1)
    offsets = torch.arange(mask.q_len) % draft
    options = {"mask": mask.plan(64, 64), "positions": offsets, "counts": torch.tensor([0])}
    assert torch.equal(model(rows, cache=cache, rows=slice(draft), **options), expected[:, cached:])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_statistics_of_a_row_do_not_depend_on_others(dtype: torch.dtype) -> None:
    model = a_model(CONFIG, dtype)
    hidden = torch.randn(37, CONFIG.hidden_size).to(dtype)
    whole = model.statistics(hidden, temperature=0.7, positions=torch.arange(37))
    for row in (0, 5, 36):
        alone = model.statistics(hidden[row : row + 1], temperature=0.7, positions=torch.tensor([row]))
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, whole))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_recurrent_depth_of_one_recurrence(dtype: torch.dtype) -> None:
    """With more, later rows read another recurrence of earlier ones: see docs/recurrent_depth.md."""
    config = RecurrentDepthConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        heads=3,
        head_dim=16,
        intermediate_size=40,
        prelude_layers=1,
        core_layers=2,
        coda_layers=1,
    )
    model, tokens = a_model(config, dtype, RecurrentDepth), some_tokens(2, 20)
    expected = feed(model, tokens, [1] * 20, recurrences=1)
    for parts in ([20], [7, 1, 12]):
        assert_same_bits(feed(model, tokens, parts, recurrences=1), expected)
