"""Fast-dLLM v2: tokens, forwards and filled positions of the plain reference; a cache that is exact for finished blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.cache import WindowedCache
from pdkernels.decoding import available, generate, supports
from pdkernels.decoding.methods import METHODS
from pdkernels.masks import block_causal
from pdkernels.models import Transformer, TransformerConfig, load
from pdkernels.models.architectures.windows import Window
from pdkernels.reference.fast_dllm_v2 import fast_dllm_v2
from tests.harness.sessions import error_of
from tests.support.base import KeepsCache, page_sizes, seeds, streams
from tests.support.causal import SCRIPTS, FakeModel
from tests.support.errors import kind_of
from tests.support.masked import MASK, Remembering, deep_masked, hashed, with_parts
from tests.support.masked_promises import assert_same_or_waiting

METHOD = "fast_dllm_v2"


def model_of(seed: int, head_dim: int = 8, predicts: str = "next") -> Transformer:
    return deep_masked(seed, predicts, head_dim, "causal")


def reference(model: Transformer, batch: list[list[int]], limit: int, **options: Any) -> list[Any]:
    return [
        fast_dllm_v2(with_parts(model), prompt, limit, mask_token=MASK, **options)
        for prompt, options in streams(batch, options)
    ]


@settings(max_examples=100)
@given(
    weights=st.integers(0, 1),
    batch=st.lists(st.lists(st.integers(0, MASK), min_size=1, max_size=9), min_size=1, max_size=3),
    limit=st.integers(0, 12),
    sizes=st.sampled_from([(4, 2), (4, 2), (4, 4), (4, 3), (2, 1), (1, 1), (6, 2), (32, 8)]),
    threshold=st.sampled_from([0.9, 0.6, 0.35, 0.0, 1.0]),
    steps=st.sampled_from([None, None, 1, 2, 3, 9]),
    predicts=st.sampled_from(["next", "own"]),
    block_cache=st.sampled_from([True, True, False]),
    distribution=st.sampled_from(
        [(0.0, 1.0, None, 0.0), (0.0, 0.5, 2, 0.9), (0.8, 1.0, None, 0.0), (0.8, 0.6, None, 0.0), (0.8, 0.6, 3, 0.1)]
    ),
    ends=st.lists(st.integers(0, MASK - 1), max_size=3),
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_reference(
    weights, batch, limit, sizes, threshold, steps, predicts, block_cache, distribution, ends, seed, page_size
) -> None:
    options: dict[str, Any] = {
        "block_size": sizes[0],
        "small_block_size": sizes[1],
        "threshold": threshold,
        "steps": steps,
        "block_cache": block_cache,
        "temperature": distribution[0],
        "top_p": distribution[1],
        "top_k": distribution[2],
        "min_p": distribution[3],
        "end_tokens": ends,
        "seed": seed,
    }
    model = model_of(weights, predicts=predicts)
    result = generate(model, batch, METHOD, max_new_tokens=limit, trace=True, page_size=page_size, **options)
    assert_same_or_waiting(result, reference(model, batch, limit, **options), waits=True)


@pytest.mark.parametrize("predicts", ["next", "own"])
@pytest.mark.parametrize("page_size", [None, 3])
def test_the_cache_of_finished_blocks_is_exact(page_size: int | None, predicts: str) -> None:
    """All but the last block equal those of one block-causal forward."""
    keeper, batch = KeepsCache(model_of(0, predicts=predicts)), [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11]]
    options: dict[str, Any] = {"max_new_tokens": 11, "block_size": 4, "small_block_size": 2, "threshold": 0.3}
    result = generate(keeper, batch, METHOD, page_size=page_size, **options)
    for index, (prompt, tokens) in enumerate(zip(batch, result.tokens, strict=True)):
        text = prompt + tokens.tolist()
        length = (len(text) - 1) // 4 * 4
        fresh = keeper.model.new_cache(1, length)
        keeper.model(torch.tensor([text[:length]]), cache=fresh, mask=block_causal(length, 4).dense())
        for layer in range(3):
            for actual, expected in zip(keeper.cache.layer(layer, length), fresh.layer(layer, length), strict=True):
                torch.testing.assert_close(actual[index], expected[0], rtol=1e-10, atol=1e-10)


class Blockwise(Remembering):
    """A causal one: the prompt's blocks come through `hidden`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, predicts="next", **options)
        self.config.attention = "causal"

    def rows(self, text: list[int]) -> Tensor:
        """The last one is about the position after the text."""
        out = super().rows(text)
        out[-1] = super().rows([*text, MASK])[-2]
        return out

    def hidden(self, tokens: Tensor, *, cache: Any, counts: Tensor, mask: Any) -> Tensor:
        out = torch.full((*tokens.shape, MASK + 1), torch.nan, dtype=self.dtype)
        for b, count in enumerate(counts.tolist()):
            cache.texts[b, :count] = tokens[b, :count]
            if count:
                out[b, :count] = self.rows(tokens[b, :count].tolist())
        self.forwards.append([(0, count) for count in counts.tolist()])
        return out


def test_which_rows_a_forward_takes() -> None:
    """Prompts of more than two blocks, of one, and of less: each is in its own phase."""
    model = Blockwise(lambda text: [(7, 0.95 if position % 4 else 0.5) for position in range(len(text))])
    options: dict[str, Any] = {"max_new_tokens": 7, "block_size": 4, "small_block_size": 4}
    result = generate(model, [[1] * 9, [2] * 4, [3] * 2], METHOD, **options)
    # The prompts; the open part of the block; the block once more, for the next one's first token; the open part of that;
    # none.
    first, second, third = ([forward[row] for forward in model.forwards] for row in range(3))
    assert first == [(0, 8), (8, 12), (8, 12), (12, 16), (12, 12)]
    assert second == [(0, 4), (4, 8), (4, 8), (8, 11), (8, 8)]
    assert third == [(0, 0), (0, 4), (0, 4), (4, 8), (4, 8)]  # waits while the others' prompts run
    assert result.stats.accepted == [[0, 3, 1, 3], [1, 3, 1, 2], [2, 1, 3, 1]]
    assert result.stats.forwards == 5 and result.stats.tokens_per_forward == 21 / 12
    assert max(model.head_rows) <= 4


@pytest.mark.parametrize("block_cache", [True, False])
def test_a_small_block_runs_alone_once_its_first_position_is_filled(block_cache: bool) -> None:
    """Not confident anywhere, from left to right: the first forward of each small block takes the whole block."""
    model = Blockwise(lambda text: [(7, 0.5)] * len(text))
    generate(model, [1], METHOD, max_new_tokens=7, block_size=8, small_block_size=3, block_cache=block_cache)
    narrow = [(0, 8), (0, 3), (0, 8), (3, 6), (3, 6), (0, 8), (6, 8)]
    assert [forward[0] for forward in model.forwards] == (narrow if block_cache else [(0, 8)] * 7)


def test_rows_that_predict_their_own_token_give_none_of_the_next_block() -> None:
    """Two blocks of a prompt, what is left of it in the first block that is filled, and nothing after the last one."""
    trace = {}
    for predicts in ("next", "own"):
        result = generate(
            model_of(0, predicts=predicts),
            [1] * 10,
            METHOD,
            max_new_tokens=6,
            block_size=4,
            small_block_size=4,
            threshold=1.0,
            trace=True,
        )
        assert result.stats.trace is not None
        trace[predicts] = [(step.window, len(step.committed)) for step in result.stats.trace[0]]
    nothing, first, second = ((10, 10), 0), [((8, 12), 1)] * 2, [((12, 16), 1)] * 4
    assert trace["next"] == [nothing, *first, ((12, 13), 1), *second[:3]]
    assert trace["own"] == [nothing, *first, ((12, 12), 0), *second]


@pytest.mark.parametrize(("steps", "accepted"), [(1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (7, [1] * 7), (20, [1] * 7)])
def test_steps_share_a_small_block(steps: int, accepted: list[int]) -> None:
    model = model_of(0, predicts="own")
    options: dict[str, Any] = {"max_new_tokens": 6, "block_size": 7, "small_block_size": 7, "threshold": 1.0}
    result = generate(model, [1], METHOD, steps=steps, **options)
    left, expected = 6, []
    for count in accepted:
        expected += [min(count, left)] if left else []
        left -= min(count, left)
    assert result.stats.accepted == [expected]


def test_no_other_method_takes_rows_that_predict_their_own_token() -> None:
    model = model_of(0, predicts="own")
    for method in available():
        if method == METHOD:
            assert supports(method, model)
            continue
        assert not supports(method, model)
        absent = ", ".join(sorted(METHODS[method].requires - {"block_causal", "own_prediction"}))
        words = (
            f"method must fit the model (block_causal, own_prediction), got '{method}', which requires {absent}. "
            f"These fit: {METHOD}."
        )
        with pytest.raises(TypeError) as raised:
            generate(model, [1], method, max_new_tokens=2)
        assert str(raised.value) == f"pdkernels.decoding.generate: {words}"


def test_a_threshold_is_exceeded_or_the_most_confident_position_is_filled() -> None:
    """One half is exact: two tokens have it each, whatever the others."""

    class Halves(Blockwise):
        def rows(self, text: list[int]) -> Tensor:
            out = torch.full((len(text), MASK + 1), -torch.inf, dtype=self.dtype)
            out[:, [3, 5]] = 0.0
            return out

    for threshold, accepted in ((0.5, [1, 1, 1]), (0.49, [3])):
        model = Halves(lambda text: [])
        result = generate(model, [1], METHOD, max_new_tokens=3, block_size=4, small_block_size=4, threshold=threshold)
        assert result.stats.accepted == [accepted] and result.tokens.tolist() == [3, 3, 3]


def test_a_trained_model_with_a_mask_token_runs() -> None:
    result = generate(load("tiny-trimode"), "def ", METHOD, max_new_tokens=40)
    assert len(result.tokens) <= 40 and isinstance(result.text, str) and result.stats.forwards > 1


END = 4


@pytest.mark.parametrize("limit", [0, 4])
@pytest.mark.parametrize(
    "options, text",
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0."),
        ({"small_block_size": 0}, "small_block_size must be at least 1, got 0."),
        ({"small_block_size": 9, "block_size": 8}, "small_block_size must be at most block_size (8), got 9."),
        ({"steps": 0}, "steps must be at least 1, got 0."),
        ({"threshold": None}, "TypeError: threshold must be a number, got NoneType."),
        ({"block_cache": 1}, "TypeError: block_cache must be a bool, got int."),
        ({"top_p": 1.5}, "top_p must be in 0 .. 1, got 1.5."),
        ({"top_k": 0}, "top_k must be at least 1, got 0."),
        ({"min_p": -1}, "min_p must be in 0 .. 1, got -1."),
        ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0."),
        ({"seed": 1.5}, "TypeError: seed must be an int or a list of ints, got float."),
        ({"mask_token": 13}, "mask_token must be an id in 0 .. 12, got 13."),
    ],
)
def test_errors(options: dict[str, Any], text: str, limit: int) -> None:
    error, text = kind_of(text)
    with pytest.raises(error) as raised:
        generate(Blockwise(hashed(0)), [1], METHOD, max_new_tokens=limit, **options)
    assert str(raised.value) == error_of("fast_dllm_v2", text)


def test_errors_of_the_model() -> None:
    with pytest.raises(
        TypeError, match=r"method must fit the model \(bidirectional, own_prediction\), got 'fast_dllm_v2'"
    ):
        generate(deep_masked(0), [1], METHOD)
    model = Blockwise(hashed(0))
    model.config.predicts = "both"
    with pytest.raises(TypeError, match="model must be a causal one, got attention 'causal' and predicts 'both'"):
        generate(model, [1], METHOD)
    with pytest.raises(TypeError, match=r"model must have the member `config.attention` .*, got FakeModel without it"):
        generate(FakeModel(SCRIPTS["position"]), [1], METHOD)
    with pytest.raises(ValueError, match="the model has no mask token"):
        model = Blockwise(hashed(0))
        model.mask_token = None
        generate(model, [1], METHOD)


def test_filters_have_the_order_of_transformers() -> None:
    """One guess after the prompt, drawn many times: of the distribution that top-k leaves, top-p keeps two tokens of three."""
    transformers = pytest.importorskip("transformers", minversion="4.57")
    warpers = transformers.generation.logits_process
    model, prompt, draws = model_of(0), [1, 2, 3, 4], 400
    text = torch.tensor([prompt])
    logits = model(text, mask=block_causal(4, 4).dense())[:, -1].clone()
    logits[:, MASK] = -torch.inf
    order = [warpers.TemperatureLogitsWarper(2.0), warpers.TopKLogitsWarper(3), warpers.TopPLogitsWarper(0.7)]
    law = transformers.LogitsProcessorList(order)(text, logits).softmax(-1)[0]
    settings = {"temperature": 2.0, "top_k": 3, "top_p": 0.7, "block_size": 4, "small_block_size": 4}
    found = generate(model, [prompt] * draws, METHOD, max_new_tokens=1, end_tokens=(), **settings).tokens
    seen = torch.bincount(torch.cat(list(found)), minlength=len(law)).double()
    assert 1 < (law > 0).sum() < 3 and (seen[law == 0] == 0).all()
    assert ((seen / draws - law).abs() < 4 * (law * (1 - law) / draws).sqrt() + 1e-9).all()


# ---- windows


def with_windows(model: Transformer, windows: tuple[Window | None, ...]) -> Transformer:
    config = TransformerConfig(**{**vars(model.config), "windows": windows, "max_positions": 1024})
    copied = Transformer(config, mask_token=MASK).requires_grad_(False)
    copied.load_state_dict(model.state_dict())
    return copied


def windowed_parts(model: Transformer, windows: tuple[Window | None, ...]) -> Any:
    """The plain model, whose rows see the last positions alone in layers with a window."""
    plain = copy.copy(with_parts(model))
    attend, recompute, starts = plain.attend, plain.recompute, [0]

    def seen(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, keys = starts[0] + torch.arange(len(q)), torch.arange(len(k))
        window = windows[layer]
        return attend(layer, q, k, v, None if window is None else keys >= window.first(rows)[:, None])

    def started(tokens: Any, start: int, past: Any) -> torch.Tensor:
        starts[0] = start
        return recompute(tokens, start, past)

    vars(plain).update(attend=seen, recompute=started)
    return plain


@pytest.mark.parametrize("window", [1, 7, 16])
@pytest.mark.parametrize("predicts", ["next", "own"])
@pytest.mark.parametrize("sizes", [(8, 8), (12, 4)])
@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.covering
def test_layers_with_windows_keep_the_last_rows(
    window: int, predicts: str, sizes: tuple[int, int], page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, windows = model_of(1, 16, predicts), (Window(window), None, Window(window))
    model, caches, make = with_windows(plain, windows), list[Any](), Transformer.new_cache

    def noting(self: Transformer, *arguments: Any, **options: Any) -> Any:
        caches.append(make(self, *arguments, **options))
        return caches[-1]

    monkeypatch.setattr(Transformer, "new_cache", noting)
    draw = torch.Generator().manual_seed(7)
    texts = [torch.randint(MASK, (length,), generator=draw).tolist() for length in (400, 3, 391)]
    options: dict[str, Any] = {"block_size": sizes[0], "small_block_size": sizes[1], "threshold": 0.4}
    expected = [
        fast_dllm_v2(windowed_parts(plain, windows), text, 40, mask_token=MASK, **options).tokens for text in texts
    ]
    more = {"max_new_tokens": 40, "mask_token": MASK, "page_size": page_size, **options}
    found = generate(model, texts, METHOD, **more).tokens
    assert [tokens.tolist() for tokens in found] == expected
    speculating = {**more, "speculate": 2, "block_cache": False}
    whole = generate(model, texts, METHOD, **{**more, "block_cache": False}).tokens
    assert [tokens.tolist() for tokens in generate(model, texts, METHOD, **speculating).tokens] == [
        tokens.tolist() for tokens in whole
    ]
    assert len(caches) == 4 and all(isinstance(cache, WindowedCache) for cache in caches)
    for cache in caches:
        pages = cache.turning[window]
        assert pages.pages * pages.page_size <= window + 2 * sizes[0] + 127 + 2 * 16


@pytest.mark.parametrize("window", [1, 7, 16])
def test_rows_have_the_bits_of_a_cache_that_keeps_all(window: int) -> None:
    model = with_windows(model_of(2, 16), (Window(window), None, Window(16))).to(torch.bfloat16)
    caches = [model.new_cache(2, 400, drafts=8), model.new_cache(2, 400)]
    assert isinstance(caches[0], WindowedCache) and not isinstance(caches[1], WindowedCache)
    draw, starts = torch.Generator().manual_seed(1), torch.tensor([0, 5])
    while int(starts.max()) < 390:
        tokens = torch.randint(MASK, (2, 6), generator=draw)
        ends = starts + torch.tensor([6, 3])
        counts = ends - starts
        found = [model.recompute(tokens, each, starts, counts=counts, visible=ends) for each in caches]
        again = [
            model.recompute(tokens[:, 1:3], each, starts, slots=torch.tensor([[1, 2], [2, -1]]), visible=ends)
            for each in caches
        ]
        for mine, all_rows in (found, again):
            rows = torch.arange(mine.shape[1]) < (counts if mine.shape[1] == 6 else torch.tensor([2, 1]))[:, None]
            assert torch.equal(mine[rows], all_rows[rows])
        starts = ends if int(torch.randint(3, (1,), generator=draw)) else starts
    fault = "rewrite_: starts must be at most 8 before the furthest row of a text"
    with pytest.raises(ValueError, match=fault):
        model.recompute(tokens, caches[0], starts - 20, visible=ends)
    with pytest.raises(ValueError, match=fault):
        model.recompute(torch.zeros(2, 9, dtype=torch.int64), caches[0], starts, visible=starts + 9)
