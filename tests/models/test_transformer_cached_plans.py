"""New tokens after a cached prefix, under their own mask: the forward without a cache under the whole mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels.masks import SegmentMask, TilePlan
from pdkernels.models import Transformer
from pdkernels.models.architectures import transformer
from pdkernels.models.architectures.attention import cached_visibility
from tests.models.test_transformer import CONFIG, VARIANTS, build, close, random_tokens
from tests.support.errors import kind_of

CAPACITY = 40


def caches(model: Transformer, prefixes: list[int], page_size: int | None) -> Any:
    """A cache that holds the first `prefixes[b]` of each row of `random_tokens(batch, CAPACITY)`."""
    batch = len(prefixes)
    if page_size is None:
        cache = model.new_cache(batch, CAPACITY)
    else:
        cache = model.new_cache(batch, CAPACITY, kind="paged", page_size=page_size)
        cache.reserve_([CAPACITY] * batch)
    lengths = torch.tensor(prefixes)
    model(random_tokens(batch, CAPACITY)[:, : max(1, *prefixes)], cache=cache, counts=lengths)
    cache.commit_(lengths)
    return cache


def full_mask(prefix: int, tail: torch.Tensor) -> torch.Tensor:
    """Causal prefix, and a tail that sees all of it."""
    mask = torch.ones(prefix + len(tail), prefix + len(tail), dtype=torch.bool).tril()
    mask[prefix:, prefix:] = tail
    return mask


def alone(
    model: Transformer, prefix: int, row: int, batch: int, tail: torch.Tensor, mask: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Logits of the tail of one sequence, without a cache."""
    tokens = torch.cat([random_tokens(batch, CAPACITY)[row, :prefix], tail])
    positions = torch.cat([torch.arange(prefix), prefix + offsets])
    return model(tokens[None], positions=positions, mask=full_mask(prefix, mask))[0, prefix:]


MASKS: dict[str, SegmentMask] = {
    "block": pd.masks.full(6),
    "quadratic": pd.masks.quadratic(3, 2),
    "interleaved": pd.masks.quadratic(2, 3, in_group="causal", layout="interleaved"),
    "candidates": pd.masks.candidates(3, 4),
    "tree": pd.masks.tree([-1, 0, 1, 0, 0, 4]),
    "causal": pd.masks.causal(5),
    "one": pd.masks.full(1),
}


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(MASKS)),
    form=st.sampled_from(["dense", "batch of dense", "plan", "stacked plans"]),
    variant=st.sampled_from(sorted(VARIANTS)),
    prefixes=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    page_size=st.sampled_from([None, None, 1, 3, 16]),
    batched_positions=st.booleans(),
)
def test_equals_a_forward_without_a_cache(
    name: str, form: str, variant: str, prefixes: list[int], page_size: int | None, batched_positions: bool
) -> None:
    model, mask, batch = build(VARIANTS[variant]), MASKS[name], len(prefixes)
    rows, plan = mask.q_len, mask.plan(16, 16)
    given_mask = {
        "dense": mask.dense(),
        "batch of dense": mask.dense().expand(batch, rows, rows),
        "plan": plan,
        "stacked plans": TilePlan.stack([plan] * batch),
    }[form]
    positions = mask.positions.expand(batch, rows) if batched_positions else mask.positions
    tokens = random_tokens(batch, rows, seed=1)
    cache = caches(model, prefixes, page_size)
    actual = model(tokens, cache=cache, mask=given_mask, positions=positions)
    assert cache.lengths.tolist() == prefixes
    for row, prefix in enumerate(prefixes):
        close(actual[row], alone(model, prefix, row, batch, tokens[row], mask.dense(), mask.positions))

    # Some of the rows become part of the prefix, at their positions: later rows see them there.
    kept = torch.tensor([(3 * row + 1) % (rows + 1) for row in range(batch)])
    cache.commit_(kept)
    following = model(random_tokens(batch, 2, seed=2), cache=cache)
    for row, prefix in enumerate(prefixes):
        before = prefix + int(kept[row])
        all_tokens = torch.cat(
            [random_tokens(batch, CAPACITY)[row, :prefix], tokens[row], random_tokens(batch, 2, seed=2)[row]]
        )
        whole = torch.zeros(prefix + rows + 2, prefix + rows + 2, dtype=torch.bool)
        whole[: prefix + rows, : prefix + rows] = full_mask(prefix, mask.dense())
        whole[-2:, :before] = True
        whole[-2:, -2:] = torch.ones(2, 2, dtype=torch.bool).tril()
        row_positions = torch.cat([torch.arange(prefix), prefix + mask.positions, before + torch.arange(2)])
        close(following[row], model(all_tokens[None], positions=row_positions, mask=whole)[0, -2:])


@pytest.mark.parametrize("page_size", [None, 3])
def test_counts_say_what_is_stored_and_not_what_is_seen(page_size: int | None) -> None:
    model, mask, prefixes = build(), MASKS["block"], [4, 0, 9]
    tokens = random_tokens(3, 6, seed=1)
    cache = caches(model, prefixes, page_size)
    expected = model(tokens, cache=cache, mask=mask.dense())
    cache = caches(model, prefixes, page_size)
    before = [cache.layer(layer, CAPACITY) for layer in range(2)]
    before = [(k.clone(), v.clone()) for k, v in before]
    counts = torch.tensor([2, 6, 0])
    close(model(tokens, cache=cache, mask=mask.dense(), counts=counts), expected)
    for layer, (k, v) in enumerate(before):
        for old, new in zip((k, v), cache.layer(layer, CAPACITY), strict=True):
            for row, (prefix, count) in enumerate(zip(prefixes, counts.tolist(), strict=True)):
                changed = (old[row] != new[row]).flatten(1).any(1)
                assert changed.nonzero().flatten().tolist() == list(range(prefix, prefix + count))


@pytest.mark.parametrize("page_size", [None, 4])
def test_rows_that_are_not_stored_need_no_room(page_size: int | None) -> None:
    model = build()
    cache = caches(model, [CAPACITY - 1, CAPACITY], page_size)
    tokens, mask = random_tokens(2, 6, seed=1), MASKS["block"].dense()
    actual = model(tokens, cache=cache, mask=mask, counts=torch.tensor([1, 0]))
    for row, prefix in enumerate([CAPACITY - 1, CAPACITY]):
        close(actual[row], alone(model, prefix, row, 2, tokens[row], mask, torch.arange(6)))
    with pytest.raises(ValueError):
        model(tokens, cache=cache, mask=mask)


def test_positions_without_a_mask_are_offsets_of_causal_rows() -> None:
    model, offsets, tokens = build(), torch.tensor([0, 1, 1, 0]), random_tokens(2, 4, seed=1)
    actual = model(tokens, cache=caches(model, [5, 2], None), positions=offsets)
    for row, prefix in enumerate([5, 2]):
        close(actual[row], alone(model, prefix, row, 2, tokens[row], pd.masks.causal(4).dense(), offsets))


def test_a_device_that_the_host_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole capacity is read, under a mask."""
    model, mask, tokens = build(), MASKS["quadratic"], random_tokens(2, 9, seed=1)
    expected = model(tokens, cache=caches(model, [3, 7], 4), mask=mask.dense(), positions=mask.positions)
    monkeypatch.setattr(
        transformer, "cached_visibility", lambda cache, lengths, *rest: cached_visibility(cache, None, *rest)
    )
    close(model(tokens, cache=caches(model, [3, 7], 4), mask=mask.dense(), positions=mask.positions), expected)


# ---- the drafter's adapter


def with_adapter(scale: float = 2.0, rank: int = 3) -> tuple[Transformer, Transformer]:
    """A model with an adapter, and one with the adapter merged into its output projections."""
    model, merged = build(), build()
    generator = torch.Generator().manual_seed(5)
    width, hidden = CONFIG.heads * CONFIG.head_dim, CONFIG.hidden_size
    pairs = [
        (
            torch.randn(rank, width, generator=generator).double(),
            torch.randn(hidden, rank, generator=generator).double() / 4,
        )
        for _ in range(CONFIG.layers)
    ]
    model.attach_adapter_(pairs, scale)
    for layer, (a, b) in zip(merged.layers, pairs, strict=True):
        layer.output += scale * b @ a
    return model, merged


def test_all_rows_take_the_adapter_or_none() -> None:
    model, merged = with_adapter()
    tokens = random_tokens(2, 7)
    assert model.has_adapter and not merged.has_adapter
    close(model(tokens), build()(tokens))
    close(model(tokens, adapted=True), merged(tokens))
    assert not torch.allclose(model(tokens), merged(tokens), atol=1e-3)
    cache, other = caches(model, [3, 1], None), caches(build(), [3, 1], None)
    block = MASKS["block"].plan(16, 16)
    close(model(tokens[:, :6], cache=cache, mask=block), build()(tokens[:, :6], cache=other, mask=block))
    other = caches(merged, [0, 0], None)
    close(model(tokens, cache=caches(model, [0, 0], None), adapted=True), merged(tokens, cache=other))


def test_some_rows_take_the_adapter() -> None:
    """Row by row: K and V of later layers come from the rows as they are, whichever rows read them."""
    model, merged = with_adapter()
    tokens, adapted = random_tokens(1, 6), torch.tensor([False, False, True, False, True, True])
    x = torch.nn.functional.embedding(tokens, model.embedding)
    mask, row_positions = pd.masks.quadratic(2, 2), torch.tensor([0, 1, 1, 2, 2, 3])
    rotation = model._uncached_rotation(tokens, row_positions)
    rows = model._new_rows(rotation, transformer.uncached_visibility(mask.dense()))
    for plain, other in zip(model.layers, merged.layers, strict=True):
        outputs = [sum(layer(x, None, lambda qkv: rows.attend_(qkv, 0), None)) for layer in (plain, other)]
        x = torch.where(adapted[:, None], outputs[1], outputs[0])
    options = {"positions": row_positions, "mask": mask.dense()}
    close(model(tokens, adapted=adapted, **options), model.logits(x))
    both = model(tokens.expand(2, 6), adapted=torch.stack([adapted, ~adapted]), **options)
    close(both, torch.cat([model(tokens, adapted=rows, **options) for rows in (adapted, ~adapted)]))


def test_rows_that_see_no_adapted_one_are_untouched() -> None:
    model, _ = with_adapter()
    mask, tokens = pd.masks.quadratic(3, 2), random_tokens(2, 9, seed=1)
    adapted = torch.arange(9) >= 3
    some = model(tokens, cache=caches(model, [4, 0], 3), mask=mask.dense(), positions=mask.positions, adapted=adapted)
    plain = model(tokens, cache=caches(model, [4, 0], 3), mask=mask.dense(), positions=mask.positions)
    assert torch.equal(some[:, :3], plain[:, :3])
    assert not torch.isclose(some[:, 3:], plain[:, 3:]).all(-1).any()


def test_an_adapter_is_part_of_the_model() -> None:
    model, _ = with_adapter()
    assert {"layers.0.adapter_in", "layers.1.adapter_out"} <= set(model.state_dict())
    assert model.float().layers[0].adapter_in.dtype == torch.float32
    assert "layers.0.adapter_in" not in build().state_dict()


# ---- the head in two phases


def test_hidden_rows_and_their_logits() -> None:
    model, tokens = build(replace(CONFIG, tied_head=False)), random_tokens(2, 6)
    hidden = model.hidden(tokens)
    assert hidden.shape == (2, 6, CONFIG.hidden_size)
    close(model.logits(hidden[:, 2:5]), model(tokens, rows=slice(2, 5)))
    trained = build().requires_grad_(True)
    assert trained.hidden(tokens).requires_grad
    assert not trained.hidden(tokens, cache=trained.new_cache(2, 6)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_stored_rows_may_lie_behind_their_slots(dtype: torch.dtype) -> None:
    """As those of a text with a gap: positions are given, K and V follow each other."""
    model, tokens, offset = build().to(dtype), random_tokens(2, 6), 4
    cache = model.new_cache(2, 12)
    model(tokens[:, :3], cache=cache)
    cache.commit_(torch.tensor([3, 3]))
    rows = []
    for column in range(3, 6):
        one = tokens[:, column : column + 1]
        rows.append(model(one, cache=cache, positions=torch.tensor([offset])))
        cache.commit_(torch.tensor([1, 1]))
    gap = torch.tensor([0, 1, 2, 3 + offset, 4 + offset, 5 + offset])
    expected = model(tokens, positions=gap)[:, 3:]
    torch.testing.assert_close(torch.cat(rows, 1), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"positions must lie in \[-length, 13 - length\) with a cache, got 7..7"):
        model(tokens[:, :1], cache=cache, positions=torch.tensor([7]))


# ---- errors

BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"mask": torch.ones(3, 4, dtype=torch.bool)}, "mask must have shape (3, 3) or (2, 3, 3), got (3, 4)."),
    ({"mask": torch.ones(3, 3)}, "TypeError: mask must be bool (True = visible), got torch.float32."),
    ({"mask": pd.masks.full(4).plan(16, 16)}, "mask must be a plan of 3 x 3 tokens, got 4 x 4."),
    (
        {"mask": pd.masks.full(3)},
        "TypeError: mask must be a bool tensor or a TilePlan, got SegmentMask. A segment mask has "
        "both: mask.dense() and mask.plan().",
    ),
    ({"positions": torch.zeros(4, dtype=torch.int64)}, "positions must have shape (3,) or (2, 3), got (4,)."),
    (
        {"positions": torch.tensor([0, 1, 11])},
        "positions must lie in [-length, 11 - length) with a cache, got 0..11. There they count from the cached length.",
    ),
    (
        {"adapted": True},
        "adapted must be False for a model without an adapter, got True. Give it one with attach_adapter_.",
    ),
]


@pytest.mark.parametrize("arguments, message", BAD_CALLS, ids=[m[:40] for _, m in BAD_CALLS])
def test_errors(arguments: dict[str, Any], message: str) -> None:
    error, message = kind_of(message)
    model = build()
    cache = model.new_cache(2, 8)
    with pytest.raises(error) as caught:
        model(random_tokens(2, 3), cache=cache, **arguments)
    assert str(caught.value) == f"pdkernels.Transformer: {message}"
    assert cache.lengths.tolist() == [0, 0]


def test_adapter_errors() -> None:
    model, _ = with_adapter()
    op = r"pdkernels\.Transformer"
    with pytest.raises(ValueError, match=op + r": adapted must have shape \(3,\) or \(2, 3\), got \(4,\)\."):
        model(random_tokens(2, 3), adapted=torch.ones(4, dtype=torch.bool))
    with pytest.raises(TypeError, match=op + r": adapted must be a bool or a bool tensor, got torch\.float32\."):
        model(random_tokens(2, 3), adapted=torch.ones(3))
    a, b = torch.zeros(3, 32), torch.zeros(24, 3)
    with pytest.raises(
        ValueError, match=op + r"\.attach_adapter_: pairs must be one pair for each of 2 layers, got 1\."
    ):
        model.attach_adapter_([(a, b)])
    with pytest.raises(ValueError, match=r"pairs must hold a of shape \(rank, 32\), got \(3, 31\)\."):
        model.attach_adapter_([(a[:, 1:], b)] * 2)
    with pytest.raises(ValueError, match=r"pairs must hold b of shape \(24, 3\), got \(24, 4\)\."):
        model.attach_adapter_([(a, torch.zeros(24, 4))] * 2)
    with pytest.raises(ValueError, match=r"mask_token must be an id below vocab_size \(13\), got 13\."):
        Transformer(CONFIG, mask_token=13)
