"""Models of transformers whose layers have windows, on texts longer than these."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.cache import WindowedCache

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="5.20")
from pdkernels.integrations.transformers import PdCache, from_transformers, generate, register, wrap  # noqa: E402
from pdkernels.integrations.transformers._probe import _window_of  # noqa: E402
from pdkernels.models.architectures.windows import Window  # noqa: E402
from tests.decoding.lossless_sweep import METHODS  # noqa: E402
from tests.integrations.test_shadow import small  # noqa: E402
from tests.support.drafters import dflash_head, eagle_head, small_drafter  # noqa: E402
from tests.support.transformers_names import CACHE  # noqa: E402

MIXED = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 16},
    "Gemma3Text": {"layer_types": MIXED, "head_dim": 16, "query_pre_attn_scalar": 16},
    "GptOss": EXPERTS,
    "Olmo3": {"layer_types": MIXED},
    "Phi3": {},
    "Cohere2": {"layer_types": MIXED},
    "Exaone4": {"layer_types": MIXED},
    "Llama4Text": {"layer_types": ["chunked_attention", "full_attention"], **EXPERTS, "intermediate_size_mlp": 48},
}
CONVERTED = ("Mistral", "Gemma3Text", "GptOss", "Qwen2")
LONG = [(7 * i) % 50 + 3 for i in range(140)]
PROMPTS = [[5, 9, 2, 33, 17, 8, 4], [7], LONG[:21]]
NEW = 30


def model_with(family: str, window: int) -> Any:
    field = "attention_chunk_size" if family == "Llama4Text" else "sliding_window"
    return small(family, **{**FAMILIES[family], field: window, "max_position_embeddings": 512})


def theirs(model: Any, prompt: list[int], cached: bool = True, **more: Any) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0, "use_cache": cached}
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, **settings, **more)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.covering(of=["family"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [1, 7, 16, 128])
@pytest.mark.filterwarnings("ignore")
def test_greedy_tokens_are_those_of_transformers(family: str, window: int) -> None:
    """A sliding cache of transformers with a window of 1 keeps all rows instead of none, so there it has no cache."""
    model = model_with(family, window)
    wrapped = wrap(model)
    assert wrapped.config.max_positions == 512
    assert {found.size for found in wrapped.config.windows.values()} == {window}
    makers: dict[str, Any] = {"draft_model": small_drafter, "eagle": eagle_head, "dflash": dflash_head}
    wrapped.drafters = {method: make(wrapped) for method, make in makers.items()}
    prompts = [*PROMPTS[:2], LONG] if window == 128 else PROMPTS
    expected = [theirs(model, prompt, cached=window > 1) for prompt in prompts]
    for number, method in enumerate(("autoregressive", "jacobi", "jacobi_multiblock", "suffix", *makers)):
        for options in METHODS.get(method, [{}])[::-1]:
            more = {"page_size": (None, 7)[number % 2], **options}
            found = pd.decoding.generate(wrapped, prompts, method, max_new_tokens=NEW, end_tokens=(), **more).tokens
            assert [tokens.tolist() for tokens in found] == expected, method


@pytest.mark.covering(of=["family"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [1, 7, 16, 128])
@pytest.mark.filterwarnings("ignore")
def test_texts_longer_than_what_their_pages_keep(family: str, window: int) -> None:
    model, prompts = model_with(family, window), [[(11 * i) % 50 + 3 for i in range(420)], [7]]
    expected = [theirs(model, prompt, cached=window > 1) for prompt in prompts]
    models = [wrap(model), *([from_transformers(model)] if family in CONVERTED else [])]
    for own in models:
        cache: Any = own.new_cache(1, 450, kind="paged", page_size=7, drafts=12)
        assert {size: pages.pages <= 48 for size, pages in cache.turning.items()} == {window: True}
        methods: dict[str, Any] = {"autoregressive": {}, "jacobi": {"block_size": 12}, "suffix": {}}
        for method, page_size in product(methods, (7, None)):
            settings: dict[str, Any] = {"max_new_tokens": NEW, "end_tokens": (), "page_size": page_size}
            settings |= methods[method]
            for texts, tokens in ((prompts, expected), (prompts[:1], expected[:1])):
                found = pd.decoding.generate(own, texts, method, **settings).tokens
                assert [row.tolist() for row in found] == tokens, method


@pytest.mark.parametrize("family", ["Mistral", "GptOss", "Gemma3Text"])
@pytest.mark.filterwarnings("ignore")
def test_bits_do_not_depend_on_the_method(family: str) -> None:
    model = model_with(family, 7).to(torch.bfloat16)
    wrapped = wrap(model)
    greedy = [pd.decoding.generate(wrapped, prompt, max_new_tokens=NEW, end_tokens=()).tokens for prompt in PROMPTS]
    for options in ({"block_size": 12}, {"draft": "lookup", "page_size": 7}):
        found = pd.decoding.generate(wrapped, PROMPTS, "jacobi", max_new_tokens=NEW, end_tokens=(), **options).tokens
        assert all(torch.equal(a, b) for a, b in zip(found, greedy, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_custom_generate_passes_the_window() -> None:
    model = model_with("GptOss", 16)
    assert theirs(model, PROMPTS[2], custom_generate=generate) == theirs(model, PROMPTS[2])


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "GptOss"])
@pytest.mark.parametrize("window", [7, 16])
@pytest.mark.filterwarnings("ignore")
def test_our_cache_with_windows(family: str, kind: Any, window: int) -> None:
    """Their own generation on it, and a draft that is cropped again further back than the window."""
    model = model_with(family, window)
    expected = [theirs(model, prompt) for prompt in PROMPTS]
    register()
    model.set_attn_implementation("pdkernels")
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        cache = PdCache(model.config, 1, 64, kind=kind, page_size=4)
        assert theirs(model, prompt, **{CACHE: cache}) == tokens
    ids = torch.tensor([LONG[:60]])
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = PdCache(model.config, 1, 64, kind=kind, page_size=4)
        model(ids[:, :30], **{CACHE: cache})
        model(ids[:, 40:60], **{CACHE: cache})
        cache.crop(-40)  # back to 10, which is further than the window
        for first, last in ((10, 11), (11, 45), (45, 60)):
            logits = model(ids[:, first:last], **{CACHE: cache}).logits
            torch.testing.assert_close(logits, whole[:, first:last], atol=3e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_gradients_through_a_window_on_a_cache() -> None:
    model = model_with("Mistral", 7)
    register()
    model.set_attn_implementation("pdkernels")
    ids, grads = torch.tensor([LONG[:30]]), []
    for implementation in ("pdkernels", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(ids[:, :20], **{CACHE: cache})
        model(ids[:, 20:], **{CACHE: cache}).logits.square().mean().backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_converted_models_have_the_windows(family: str) -> None:
    more = {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 16} if family.startswith("Qwen") else {}
    model = small(family, **more, sliding_window=7, max_position_embeddings=512)
    converted = from_transformers(model)
    for prompt in PROMPTS:
        found = pd.decoding.generate(converted, prompt, "jacobi", max_new_tokens=NEW, end_tokens=(), block_size=9)
        assert found.tokens.tolist() == theirs(model, prompt)


def test_a_rule_that_is_no_window_ends_texts_where_it_hides_something() -> None:
    device = torch.device("cpu")
    assert _window_of(lambda b, h, q, k: k > q - 9, 9, 100, device) == Window(9)
    assert _window_of(lambda b, h, q, k: k // 9 == q // 9, 9, 100, device) == Window(9, chunked=True)
    assert _window_of(lambda b, h, q, k: (k > q - 9) | (k == 0), 9, 100, device) is None
    assert _window_of(lambda b, h, q, k: (k > q - 9) & ((q < 50) | (k > q - 5)), 9, 100, device) is None


@pytest.mark.parametrize("family", ["Mistral", "GptOss", "Gemma3Text"])
@pytest.mark.parametrize("window", [1, 7, 16, 128])
@pytest.mark.filterwarnings("ignore")
def test_an_engine_keeps_the_last_rows(family: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests and of earlier prompts, which later ones go on with."""
    model = model_with(family, window)
    wrapped, made = wrap(model), list[Any]()
    make, another = type(wrapped).new_cache, WindowedCache.another

    def noting(self: Any, *arguments: Any, **options: Any) -> Any:
        made.append(make(self, *arguments, **options))
        return made[-1]

    def kept(self: WindowedCache, batch: int, capacity: int) -> WindowedCache:
        cache = another(self, batch, capacity)
        made.append(cache)
        return cache

    monkeypatch.setattr(type(wrapped), "new_cache", noting)
    monkeypatch.setattr(WindowedCache, "another", kept)
    first = [(11 * i) % 50 + 3 for i in range(400)]
    # A prompt that goes on with all of the first, one that leaves it, and another.
    prompts = [first, [*first, 5, 9, 11, 30], [*first[:350], 4, 4, 8, 21], [7]]
    expected = [theirs(model, prompt, cached=window > 1) for prompt in prompts]
    sizes: dict[str, Any] = {
        "max_running": 3,
        "max_prompt_tokens": 430,
        "max_new_tokens": NEW,
        "prompt_tokens_per_step": 90,
    }
    with pd.Engine(wrapped, **sizes) as engine:
        for method, options in (("autoregressive", {}), ("jacobi", {"block_size": window + 9 if window < 128 else 20})):
            made.clear()
            settings: dict[str, Any] = {"max_new_tokens": NEW, "end_tokens": (), **options}
            handles = [engine.submit(prompt, method, **settings) for prompt in prompts]
            assert [handle.result().tokens.tolist() for handle in handles] == expected
            later = engine.submit(prompts[1], method, **settings)
            assert later.result().tokens.tolist() == expected[1] and later.reused >= 400
            assert made and all(isinstance(cache, WindowedCache) for cache in made if cache.capacity > 400)
            for cache in made:
                rows = [pages.pages * pages.page_size for pages in getattr(cache, "turning", {}).values()]
                assert all(count <= window + 2 * max(cache.drafts, 90) + 128 + 2 * 16 for count in rows)


# ---- `PdCache` keeps the last rows


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("attention", ["pdkernels", "sdpa", "eager"])
@pytest.mark.parametrize("window", [1, 7, 16])
@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "GptOss", "Llama4Text"])
@pytest.mark.covering
@pytest.mark.filterwarnings("ignore")
def test_a_text_of_any_length_on_our_cache(family: str, window: int, attention: str, kind: Any) -> None:
    model, texts = model_with(family, window), [[(11 * i + k) % 50 + 3 for i in range(420)] for k in (0, 5)]
    expected = [theirs(model, text, cached=window > 1) for text in texts]
    attention = "eager" if family == "GptOss" and attention == "sdpa" else attention
    register()
    model.set_attn_implementation(attention)
    for text, tokens in zip(texts, expected, strict=True):
        cache = PdCache(model.config, 1, 460, kind=kind, page_size=4)
        for again in range(2):
            assert theirs(model, text, **{CACHE: cache}) == tokens, again
            kept = [layer.keys.shape[2] for layer in cache.layers if layer.is_sliding]
            assert kept and max(kept) <= window - 1 + 127 and {cache.get_seq_length(n) for n in (0, 1)} == {449}
            cache.reset()
        for name, count in (("prompt_lookup_num_tokens", 12), ("prompt_lookup_num_tokens", 40)):
            more: Any = {name: count, CACHE: PdCache(model.config, 1, 500, kind=kind, page_size=4)}
            assert theirs(model, text, **more) == tokens


@pytest.mark.parametrize("window", [1, 7, 16])
@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "GptOss"])
@pytest.mark.filterwarnings("ignore")
def test_our_cache_has_the_bits_of_our_own(family: str, window: int) -> None:
    model, text = model_with(family, window).to(torch.bfloat16), [(11 * i) % 50 + 3 for i in range(420)]
    own = pd.decoding.generate(wrap(model), text, max_new_tokens=NEW, end_tokens=()).tokens.tolist()
    register()
    model.set_attn_implementation("pdkernels")
    assert theirs(model, text, **{CACHE: PdCache(model.config, 1, 460)}) == own


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "GptOss", "Llama4Text"])
@pytest.mark.parametrize("window", [1, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.covering
@pytest.mark.filterwarnings("ignore")
def test_rows_have_the_bits_of_a_cache_that_keeps_all(
    family: str, kind: Any, window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with(family, window).to(dtype)
    register()
    model.set_attn_implementation("pdkernels")
    ids = torch.tensor([[(11 * i) % 50 + 3 for i in range(500)], [(7 * i) % 50 + 3 for i in range(500)]])
    pieces = [(130, 0), (1, 0), (1, 0), (20, 13), (7, 7), (1, 0), (100, 5), (1, 0), (21, 20), (150, 0), (1, 0), (9, 0)]

    def logits() -> torch.Tensor:
        cache, found, at = PdCache(model.config, 2, 512, kind=kind, page_size=4, drafts=20), [], 0
        for rows, back in pieces:
            with torch.no_grad():
                found.append(model(ids[:, at : at + rows], **{CACHE: cache}).logits)
            at += rows - back
            if back:
                cache.crop(-back)
        sizes = [layer.room for layer in cache.layers if layer.is_sliding]
        assert all(size == window - 1 + 20 + 127 + 128 for size in sizes)
        kept.append(len(sizes))
        return torch.cat(found, 1)

    kept: list[int] = []
    few = logits()
    monkeypatch.setattr("pdkernels.integrations.transformers._cache.room_of", lambda *_: 1000)
    assert torch.equal(few, logits()) and kept[0] > 0 == kept[1]


@pytest.mark.filterwarnings("ignore")
def test_beams_on_a_cache_that_keeps_the_last_rows() -> None:
    model, text = model_with("Mistral", 7), [(11 * i) % 50 + 3 for i in range(420)]
    expected = theirs(model, text, num_beams=3)
    register()
    model.set_attn_implementation("pdkernels")
    assert theirs(model, text, num_beams=3, **{CACHE: PdCache(model.config, 3, 460)}) == expected


@pytest.mark.filterwarnings("ignore")
def test_how_far_a_window_goes_back() -> None:
    model, ids = model_with("Gemma3Text", 7), torch.tensor([[(11 * i) % 50 + 3 for i in range(420)]])
    cache = PdCache(model.config, 1, 460, drafts=5)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        sliding = next(layer for layer in cache.layers if layer.is_sliding)
        assert sliding.earliest == 384 + 6 <= 420 - 5
        fault = "tokens_to_remove must leave 0 tokens or at least 390, since rows before its windows are gone, got 389"
        with pytest.raises(ValueError, match=f"{fault}. Make it with more drafts"):
            cache.crop(-31)
        assert {cache.get_seq_length(n) for n in (0, 1)} == {420}
        cache.crop(-30)
        copied = copy.deepcopy(cache)
        logits = [model(ids[:, 390:], **{CACHE: each}).logits for each in (cache, copied)]
        whole = model(ids, use_cache=False).logits[:, 390:]
        assert torch.equal(*logits)
        torch.testing.assert_close(logits[0], whole, atol=3e-5, rtol=0)
        cache.crop(-420)
        assert sliding.earliest == 0 and torch.equal(model(ids, **{CACHE: cache}).logits[:, 390:], whole)


@pytest.mark.filterwarnings("ignore")
def test_what_a_window_refuses() -> None:
    cache = PdCache(model_with("Mistral", 7).config, 1, 300)
    rows = torch.randn(1, 2, 3, 16)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="cannot require a gradient"):
        cache.update(rows.clone().requires_grad_(), rows, 0)
    cache.update(rows, rows, 0)
    with pytest.raises(ValueError, match="same key and value heads in all layers"):
        cache.update(rows[:, :1], rows[:, :1], 0)
    with pytest.raises(ValueError, match="batch must be that of the model's inputs, got 1 for 2"):
        cache.update(rows.expand(2, -1, -1, -1), rows.expand(2, -1, -1, -1), 0)
    with pytest.raises(ValueError, match="capacity must be at least 304, got 300"):
        cache.update(torch.randn(1, 2, 301, 16), torch.randn(1, 2, 301, 16), 0)
    with pytest.raises(ValueError, match="drafts must be 0 or more, got -1"):
        PdCache(model_with("Mistral", 7).config, 1, 300, drafts=-1)
