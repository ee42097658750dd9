"""Models in float32 on caches in 16 bits: rows have the same bits in any forward, and are those of rounded keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels import masks
from pdkernels.decoding import generate
from pdkernels.models import Transformer, TransformerConfig, load
from pdkernels.models.architectures import attention
from pdkernels.models.architectures.hybrid import Hybrid
from tests.models.test_quantized_cache import HYBRID
from tests.models.test_row_invariance import CONFIG, a_model, assert_same_bits, configs, cuts, feed, some_tokens

PROMPTS = ["def add(a, b):", "import os"]


def halved(model: Any) -> Any:
    model.cache_dtype = torch.float16
    return model


@settings(max_examples=30)
@given(data=st.data(), config=configs(), length=st.integers(2, 24))
def test_any_model_in_any_parts(data: st.DataObject, config: TransformerConfig, length: int) -> None:
    model, tokens = halved(a_model(config, torch.float32)), some_tokens(2, length)
    expected = feed(model, tokens, [1] * length)
    assert expected[1].dtype == torch.float16 and expected[1].shape[-1] == config.head_dim
    page_size, room = data.draw(st.sampled_from([0, 1, 5, 16])), data.draw(st.sampled_from([0, 3]))
    assert_same_bits(feed(model, tokens, data.draw(cuts(length)), page_size, room), expected)
    assert_same_bits(feed(model, tokens[1:], [length]), [part[1:] for part in expected])


@pytest.mark.parametrize("kind", [Transformer, Hybrid])
def test_the_whole_step_layers_and_rounded_numbers_agree(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    model, tokens = a_model(HYBRID if kind is Hybrid else CONFIG, torch.float32, kind), some_tokens(2, 20)
    found = feed(halved(model), tokens, [7, 12, 1])
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    assert_same_bits(feed(model, tokens, [7, 12, 1]), found)

    def rounded(dtype: torch.dtype, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k.half().to(dtype), v.half().to(dtype)

    monkeypatch.setattr(attention, "stored", rounded)
    if kind is Hybrid:
        monkeypatch.setattr("pdkernels.models.architectures.recurrent_layer.stored", rounded, raising=False)
    model.cache_dtype = None
    logits, *rows = feed(model, tokens, [7, 12, 1])
    assert torch.equal(logits, found[0])
    for mine, theirs in zip(found[1:3], rows[:2]):
        assert mine.dtype == torch.float16 and torch.equal(mine.float(), theirs)


def test_a_mask_of_bools_gives_the_rows_of_its_plan() -> None:
    model, tokens, triangle = halved(a_model(CONFIG, torch.float32)), some_tokens(1, 9), masks.causal(5)
    out = []
    for mask in (triangle.dense(), triangle.plan(16, 16)):
        cache = model.new_cache(1, 9)
        model(tokens[:, :4], cache=cache)
        cache.commit_(torch.tensor([4]))
        out.append(model(tokens[:, 4:], cache=cache, mask=mask))
    assert torch.allclose(*out, atol=1e-5) and not torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.covering
@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("method", ["jacobi", "suffix", "fast_dllm", "llada", "block_diffusion", "planned", "fast_dllm_v2"])  # fmt: skip
def test_methods_follow(method: str, page_size: int | None) -> None:
    """Lossless ones write the tokens of one at a time; those that rewrite rows write in a batch what they write alone."""
    names = {"block_diffusion": "tiny-trimode", "planned": "tiny-planned", "fast_dllm_v2": "tiny-trimode", "jacobi": "tiny-code", "suffix": "tiny-code"}  # fmt: skip
    model: Any = load(names.get(method, "tiny-masked"), cache_dtype=torch.float16)
    options: dict[str, Any] = {"max_new_tokens": 24, "end_tokens": ()}
    alone = "autoregressive" if names.get(method) == "tiny-code" else method
    expected = [generate(model, one, alone, **options).tokens for one in PROMPTS]
    if "page_size" in pd.decoding.find(method).options:
        options["page_size"] = page_size
    found = generate(model, PROMPTS, method, **options).tokens
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_memory_is_halved_and_dllm_cache_refuses() -> None:
    model: Any = load("tiny-masked", cache_dtype=torch.float16)
    own, whole = model.new_cache(1, 32), model.new_cache(1, 32, dtype=torch.float32)
    assert own.k.nbytes * 2 == whole.k.nbytes
    with pytest.raises(NotImplementedError, match="values are compared with those of earlier steps"):
        generate(model, "x", "dllm_cache", max_new_tokens=4)
    with pytest.raises(
        TypeError, match="dtype must be torch.bfloat16 like the model, or torch.int8, got torch.float16"
    ):
        load("tiny-code", dtype=torch.bfloat16, cache_dtype=torch.float16)
    small = a_model(TransformerConfig(**{**vars(CONFIG), "head_dim": 12}), torch.float32)
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 8 in \[16, 512\], got 12"):
        small.new_cache(1, 4, dtype=torch.float16)


def test_the_engine_and_prefixes_follow() -> None:
    """A prefix that is reused has the rows of one that is computed."""
    model: Any = load("tiny-code", cache_dtype=torch.float16)
    prompt = "def add(a, b):\n    return"
    expected = generate(model, prompt, "autoregressive", max_new_tokens=20).text
    with pd.Engine(model, max_running=2) as engine:
        for _ in range(2):
            assert engine.submit(prompt, max_new_tokens=20).result().text == expected
