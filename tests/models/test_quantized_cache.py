"""Models on 8-bit caches: rows have the same bits in any forward, nobody sees numbers, and what cannot follow refuses by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels import masks
from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.decoding import generate
from pdkernels.models import RecurrentDepth, RecurrentDepthConfig, Transformer, TransformerConfig, load
from pdkernels.models.architectures.attention import NewRows
from pdkernels.models.architectures.hybrid import Hybrid, HybridConfig
from pdkernels.reference.kv_cache import kv_dequantize, kv_quantize
from tests.models.test_row_invariance import CONFIG, DTYPES, a_model, assert_same_bits, configs, cuts, feed, some_tokens

HYBRID = HybridConfig(
    vocab_size=50, hidden_size=32, layers=3, heads=2, kv_heads=1, head_dim=16, intermediate_size=48,
    mixers=("delta", "attention", "conv"), key_heads=2, value_heads=4, key_dim=8, value_dim=8,
)  # fmt: skip


def quantized(model: Any) -> Any:
    model.cache_dtype = torch.int8
    return model


@settings(max_examples=30)
@given(data=st.data(), config=configs(), dtype=st.sampled_from(DTYPES), length=st.integers(2, 24))
def test_any_model_in_any_parts(
    data: st.DataObject, config: TransformerConfig, dtype: torch.dtype, length: int
) -> None:
    model, tokens = quantized(a_model(config, dtype)), some_tokens(2, length)
    expected = feed(model, tokens, [1] * length)
    assert expected[1].dtype == torch.int8 and expected[1].shape[-1] == config.head_dim + 4
    page_size, room = data.draw(st.sampled_from([0, 1, 5, 16])), data.draw(st.sampled_from([0, 3]))
    assert_same_bits(feed(model, tokens, data.draw(cuts(length)), page_size, room), expected)
    assert_same_bits(feed(model, tokens[1:], [length]), [part[1:] for part in expected])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_texts(dtype: torch.dtype) -> None:
    model, tokens = quantized(a_model(CONFIG, dtype)), some_tokens(1, 300)
    expected = feed(model, tokens, [1] * 300)
    for parts in ([300], [127, 3, 1, 129, 40]):
        assert_same_bits(feed(model, tokens, parts, page_size=7), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layers_one_by_one_give_the_bits_of_the_whole_step(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    model, tokens = quantized(a_model(CONFIG, dtype)), some_tokens(2, 20)
    taken: list[int] = []
    attend = NewRows.attend_
    monkeypatch.setattr(NewRows, "attend_", lambda *given, **more: taken.append(1) or attend(*given, **more))
    found = feed(model, tokens, [7, 12, 1])
    assert not taken
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    assert_same_bits(feed(model, tokens, [7, 12, 1]), found)
    assert len(taken) == 3 * CONFIG.layers


def test_rows_are_those_of_kv_quantize_and_are_close_to_the_numbers() -> None:
    model, tokens = a_model(CONFIG, torch.float32), some_tokens(1, 30)
    numbers = feed(model, tokens, [30])
    found = feed(quantized(copy.copy(model)), tokens, [30])
    # Nothing before the first layer's K and V is quantised.
    assert torch.equal(found[1], kv_quantize(numbers[1])) and torch.equal(found[2], kv_quantize(numbers[2]))
    assert torch.allclose(kv_dequantize(found[3]), numbers[3], atol=0.05 * float(numbers[3].abs().max()))
    assert not torch.equal(found[0], numbers[0])
    assert float((found[0] - numbers[0]).norm()) < 0.03 * float(numbers[0].norm())


@pytest.mark.parametrize("kind", [ContiguousKVCache, PagedKVCache])
@pytest.mark.parametrize(("head_dim", "share"), [(64, 68 / 128), (128, 132 / 256)])
def test_it_takes_half_the_memory_of_16_bits(kind: Any, head_dim: int, share: float) -> None:
    slots = {"capacity": 32} if kind is ContiguousKVCache else {"num_pages": 4, "page_size": 8}
    made = [kind(layers=2, batch=1, kv_heads=3, head_dim=head_dim, dtype=dtype, **slots) for dtype in (torch.int8, torch.bfloat16)]  # fmt: skip
    mine, theirs = (cache.k.nbytes + cache.v.nbytes for cache in made)
    assert mine == share * theirs and made[0].head_dim == head_dim


@pytest.mark.parametrize("kind", [ContiguousKVCache, PagedKVCache])
def test_rows_are_appended_committed_trimmed_and_copied(kind: Any) -> None:
    slots = {"capacity": 16} if kind is ContiguousKVCache else {"num_pages": 8, "page_size": 4}
    sizes = {"layers": 2, "batch": 2, "kv_heads": 2, "head_dim": 16, "dtype": torch.int8}
    cache, other = kind(**sizes, **slots), kind(**sizes, **slots)
    rows = torch.randn(2, 9, 2, 16)
    codes = kv_quantize(rows)
    for each in (cache, other):
        if kind is PagedKVCache:
            each.reserve_([12, 12])
    for layer, given_ in enumerate((rows, codes)):  # both forms
        cache.append_(layer, given_, given_ if layer else -rows)
    cache.commit_(torch.tensor([3, 2]), torch.tensor([[0, 3, 6], [4, 8, 0]]))
    cache.trim_([3, 1])
    other.copy_row_(0, cache, 0, 3)
    for layer in range(2):
        k, v = cache.layer(layer, 3)
        assert torch.equal(k[0], codes[0, [0, 3, 6]]) and torch.equal(k[1, :1], codes[1, [4]])
        assert torch.equal(v[0], k[0] if layer else kv_quantize(-rows)[0, [0, 3, 6]])
        assert torch.equal(other.layer(layer, 3)[0][0], k[0])
    numbers = kind(**{**sizes, "dtype": torch.float32}, **slots)
    with pytest.raises(ValueError, match="copy_row_: other must have the same layers, heads and dtype"):
        other.copy_row_(0, numbers, 0, 0)


@pytest.mark.covering
@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("method", ["fast_dllm", "llada", "block_diffusion", "planned", "fast_dllm_v2"])
def test_methods_that_rewrite_rows_follow(method: str, page_size: int | None) -> None:
    """They store rows where earlier ones were; alone and in a batch they read the same ones."""
    name = {"block_diffusion": "tiny-trimode", "planned": "tiny-planned", "fast_dllm_v2": "tiny-trimode"}.get(method, "tiny-masked")  # fmt: skip
    model = load(name, cache_dtype=torch.int8)
    if not pd.decoding.supports(method, model):
        pytest.skip(f"{name} does not fit")
    options: dict[str, Any] = {"max_new_tokens": 24, "end_tokens": ()}
    if "page_size" in pd.decoding.find(method).options:
        options["page_size"] = page_size
    prompts = ["def add(a, b):", "import os"]
    together = generate(model, prompts, method, **options).tokens
    assert all(torch.equal(a, generate(model, one, method, **options).tokens) for a, one in zip(together, prompts))


def test_a_recomputed_row_is_stored_in_codes() -> None:
    config = TransformerConfig(
        vocab_size=50, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=24,
        attention="bidirectional", predicts="own",
    )  # fmt: skip
    model = quantized(a_model(config, torch.float32, lambda config: Transformer(config, mask_token=49)))
    tokens, whole = some_tokens(2, 9), torch.tensor([9, 9])
    for kind in ({}, {"kind": "paged", "page_size": 4}):
        cache, numbers = model.new_cache(2, 12, **kind), model.new_cache(2, 12, dtype=torch.float32, **kind)
        for each in (cache, numbers):
            if kind:
                each.reserve_([12, 12])
        hidden = [model.recompute(tokens, each, torch.zeros(2, dtype=torch.int64), visible=whole) for each in (cache, numbers)]  # fmt: skip
        for found, exact in zip(cache.layer(0, 9), numbers.layer(0, 9)):
            assert torch.equal(found, kv_quantize(exact))
        assert float((hidden[0] - hidden[1]).norm()) < 0.05 * float(hidden[1].norm())
        before = [x.clone() for x in cache.layer(1, 9)]
        slots = torch.tensor([[3], [-1]])
        model.recompute(tokens[:, 3:4], cache, torch.zeros(2, dtype=torch.int64), slots=slots, visible=whole)
        for new, old in zip(cache.layer(1, 9), before):
            assert torch.equal(new, old)  # the same row, computed once more


@torch.inference_mode()
def test_hybrid_models_hold_keys_and_values_in_codes() -> None:
    torch.manual_seed(0)
    model = quantized(Hybrid(HYBRID).requires_grad_(False))
    tokens = some_tokens(2, 20)

    def run(parts: list[int], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        cache, found, at = model.new_cache(2, 20, dtype=dtype), [], 0
        for rows in parts:
            found.append(model(tokens[:, at : at + rows], cache=cache))
            cache.commit_(torch.full((2,), rows))
            at += rows
        assert cache.k.dtype == cache.dtype == (dtype or torch.int8)
        return [torch.cat(found, 1), cache.k, cache.v]

    together, alone, numbers = run([7, 12, 1]), run([1] * 20), run([20], torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(together, alone))
    assert 0 < float((together[0] - numbers[0]).norm()) < 0.03 * float(numbers[0].norm())
    for rows, exact in zip(together[1:], numbers[1:]):
        assert float((kv_dequantize(rows) - exact).abs().max()) < 0.02 * float(exact.abs().max())


def test_the_engine_and_later_prompts_use_it() -> None:
    """A prompt that begins like an earlier one takes over rows of codes."""
    model = load("tiny-code", cache_dtype=torch.int8)
    prompts = ["def add(first, second, third):\n    return", "def add(first, second, third):\n    print"]
    expected = [generate(model, prompt, "jacobi", max_new_tokens=12).text for prompt in prompts]
    with pd.Engine(model, max_running=2) as engine:
        found = [engine.submit(prompt, "jacobi", max_new_tokens=12).result().text for prompt in prompts]
    assert found == expected


def test_loading_and_packing_keep_it() -> None:
    model = load("tiny-code", cache_dtype=torch.int8)
    assert model.cache_dtype == torch.int8 and model.new_cache(1, 4).dtype == torch.int8
    assert pd.quantize(model, "q8_0", skip="embedding").new_cache(1, 4).dtype == torch.int8
    assert model.new_cache(1, 4, dtype=torch.float32).dtype == torch.float32
    assert load("tiny-code").new_cache(1, 4).dtype == torch.float32


def refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_what_cannot_follow_says_so() -> None:
    model = a_model(CONFIG, torch.float32)
    refused(lambda: model.new_cache(1, 4, dtype=torch.bfloat16), TypeError, "dtype must be torch.float32 like the model, or torch.float16 or torch.int8, got torch.bfloat16")  # fmt: skip
    refused(
        lambda: model.new_cache(1, 4, dtype="int8"),
        TypeError,
        "Transformer.new_cache: dtype must be torch.float32 like",
    )
    refused(lambda: model.double().new_cache(1, 4, dtype=torch.int8), NotImplementedError, "no kernel of a model in torch.float64 reads an 8-bit cache")  # fmt: skip
    small = a_model(TransformerConfig(**{**vars(CONFIG), "head_dim": 12}), torch.float32)
    refused(lambda: small.new_cache(1, 4, dtype=torch.int8), ValueError, r"head_dim must be a multiple of 8 in \[16, 512\], got 12")  # fmt: skip
    refused(lambda: load("tiny-recurrent", cache_dtype=torch.int8), NotImplementedError, "models.load: the caches of a RecurrentDepth have the dtype of the model")  # fmt: skip
    refused(lambda: load("tiny-code", cache_dtype=torch.bfloat16), TypeError, "models.load: cache_dtype must be torch.float32 like the model")  # fmt: skip
    masked = load("tiny-masked", cache_dtype=torch.int8)
    refused(lambda: generate(masked, "x", "dllm_cache", max_new_tokens=4), NotImplementedError, "values are compared with those of earlier steps")  # fmt: skip
    model = a_model(CONFIG, torch.float32)
    cache = model.new_cache(1, 8, dtype=torch.int8)
    triangle = torch.ones(3, 3, dtype=torch.bool).tril()
    refused(lambda: model(some_tokens(1, 3), cache=cache, mask=triangle), ValueError, "mask must be a TilePlan on an 8-bit cache, got a bool tensor")  # fmt: skip
    plan = masks.causal(3).plan(16, 16)
    assert model(some_tokens(1, 3), cache=cache, mask=plan).shape == (1, 3, 50)


def test_recurrent_models_refuse_a_cache_of_codes() -> None:
    config = RecurrentDepthConfig(
        vocab_size=50, hidden_size=32, heads=2, head_dim=16, intermediate_size=32,
        prelude_layers=1, core_layers=1, coda_layers=1, mean_recurrence=2,
    )  # fmt: skip
    model = a_model(config, torch.float32, RecurrentDepth)
    cache = ContiguousKVCache(3, 1, 8, 2, 16, dtype=torch.int8)
    refused(lambda: model(some_tokens(1, 3), cache=cache), (TypeError, ValueError), "pdkernels")


def test_a_cache_of_transformers_models_refuses_it() -> None:
    transformers = pytest.importorskip("transformers")
    from pdkernels.integrations.transformers import PdCache

    config = transformers.Qwen3Config(num_hidden_layers=1)
    refused(lambda: PdCache(config, 1, 8, dtype=torch.int8), TypeError, "PdCache: dtype must be floating-point")
