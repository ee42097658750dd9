"""Mixed precision: under autocast attention has queries of float32 beside values of 16 bits, as in training with accelerate or the Trainer of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pdkernels.integrations.flex_attention import flex_attention

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="5.20")
from pdkernels.integrations.transformers import PdCache, generate, register, wrap  # noqa: E402
from tests.integrations.test_shadow import ours, small  # noqa: E402
from tests.integrations.test_windows import LONG, model_with  # noqa: E402
from tests.support.transformers_names import CACHE  # noqa: E402

KINDS = [torch.bfloat16, torch.float16]
IDS = torch.tensor([LONG[:40], LONG[20:60]])


def model_of(family: str) -> Any:
    register()
    return small(family) if family in ("Llama", "Qwen3", "GPT2") else model_with(family, 7)


def step(model: Any, implementation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and gradients of a training step."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    with torch.autocast("cpu", dtype):
        logits = model(IDS, use_cache=False).logits
        loss = logits.float().log_softmax(-1)[..., 5].mean()
    loss.backward()
    return logits.detach().float(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2", "Gemma3Text", "Mistral", "GptOss"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_training_step(family: str, dtype: torch.dtype) -> None:
    model = model_of(family)
    theirs = "eager" if family == "GptOss" else "sdpa"
    for result, expected in zip(step(model, "pdkernels", dtype), step(model, theirs, dtype), strict=True):
        assert (result - expected).norm() <= (0.2 if family == "GptOss" else 0.05) * expected.norm()  # other experts


def test_scores_are_those_that_tokens_were_chosen_by() -> None:
    model = small()
    asked = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": None, "do_sample": False}
    expected = model.generate(IDS[:1, :5], max_new_tokens=6, custom_generate=generate, **asked)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.generate(IDS[:1, :5], max_new_tokens=6, custom_generate=generate, **asked)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, expected.scores, strict=True))


@pytest.mark.parametrize("kind", [None, "contiguous", "paged"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.filterwarnings("ignore")
def test_steps_on_a_cache(family: str, kind: Any) -> None:
    model = model_of(family)
    logits = []
    for implementation in ("pdkernels", "sdpa"):
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache() if kind is None else PdCache(model.config, 2, 64, kind=kind, page_size=4)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            parts = [model(IDS[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 30), (30, 31), (31, 40))]
        logits.append(torch.cat(parts, 1).float())
    assert (logits[0] - logits[1]).norm() <= 0.05 * logits[1].norm()


@pytest.mark.parametrize("on_a_cache", [False, True])
def test_a_forward_of_a_wrapped_model(on_a_cache: bool) -> None:
    model = small()
    wrapped = wrap(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = wrapped(IDS, cache=wrapped.new_cache(2, 64)) if on_a_cache else wrapped(IDS)
        theirs = model(IDS).logits
    assert logits.dtype == theirs.dtype and (logits - theirs).norm() <= 0.05 * theirs.norm()


def test_flex_attention_converts_as_that_of_torch() -> None:
    from torch.nn.attention import flex_attention as of_torch

    q, k = torch.randn(2, 1, 2, 48, 16)
    v = k.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, theirs = flex_attention(q, k, v), of_torch.flex_attention(q, k, v)
    assert out.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(out, theirs, atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.filterwarnings("ignore")
def test_a_cache_may_begin_in_inference_mode(family: str, kind: Any) -> None:
    """A prefix is run there, and `generate` goes on without it."""
    model = model_of(family)
    model.set_attn_implementation("pdkernels")
    cache = PdCache(model.config, 2, 300, kind=kind, page_size=4)
    with torch.inference_mode():
        model(IDS[:, :30], **{CACHE: cache})
    with torch.no_grad():
        logits = model(IDS[:, 30:], **{CACHE: cache}).logits
        whole = model(IDS, use_cache=False).logits[:, 30:]
    torch.testing.assert_close(logits, whole, atol=3e-5, rtol=0)


@pytest.mark.parametrize("attention", ["pdkernels", "sdpa"])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_cache_of_another_dtype(dtype: torch.dtype, family: str, kind: Any, attention: str) -> None:
    model = model_of(family)
    model.set_attn_implementation(attention)
    cache = PdCache(model.config, 2, 400, kind=kind, page_size=4, dtype=dtype)
    with torch.no_grad():
        parts = [model(IDS[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 30), (30, 31), (31, 40))]
        whole = model(IDS, use_cache=False).logits
    held = [layer.keys.dtype for layer in cache.layers]
    assert held == [dtype, dtype] and parts[0].dtype == torch.float32
    assert (torch.cat(parts, 1) - whole).norm() <= 0.03 * whole.norm()


def test_a_model_that_accelerate_has_prepared() -> None:
    """Decoding is without autocast, also where that is part of the model's forward."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = small()
    expected = ours(wrap(model))
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    assert "forward" in vars(prepared) and ours(wrap(prepared)) == expected
    assert prepared(IDS).logits.dtype == torch.float32 and "forward" in vars(prepared)


def test_embeddings_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="inputs_embeds must be None"):
        small().generate(inputs_embeds=torch.zeros(1, 3, 32), max_new_tokens=2, custom_generate=generate)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("attention", ["pdkernels", "sdpa", "eager"])
@pytest.mark.filterwarnings("ignore")
def test_a_cache_has_the_dtype_in_which_it_is_read(attention: str, family: str, kind: Any) -> None:
    """A step would convert all of its rows otherwise; an implementation that may read keys in float32 has those."""
    model = model_of(family)
    model.set_attn_implementation(attention)
    logits = {}
    for made in (lambda: PdCache(model.config, 2, 400, kind=kind, page_size=4), transformers.DynamicCache):
        cache = made()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            parts = [model(IDS[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 30), (30, 31), (31, 40))]
        logits[type(cache)] = torch.cat(parts, 1).float()
    assert (logits[PdCache] - logits[transformers.DynamicCache]).norm() <= 0.02 * logits[PdCache].norm()
    cache = PdCache(model.config, 2, 400, kind=kind, page_size=4)
    key, value = torch.randn(2, 1, 3, 16), torch.randn(2, 1, 3, 16, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rows = [cache.update(key, value, layer) for layer in range(2)][1]
    assert [x.dtype for x in rows] == [torch.float32 if attention == "eager" else torch.bfloat16] * 2
    if kind == "contiguous" and family == "Llama":  # nothing is copied
        assert cache.storage is not None
        assert rows[0].data_ptr() == cache.storage.k[1].data_ptr()


def test_likelihoods_are_those_without_autocast() -> None:
    import pdkernels as pd
    from pdkernels.integrations.likelihood import log_likelihood, masked_log_likelihood

    for name, score in (("tiny-code", log_likelihood), ("tiny-masked", masked_log_likelihood)):
        model = pd.models.load(name)
        expected = score(model, [b"import "], [b"os, sys"])
        with torch.autocast("cpu", torch.bfloat16):
            assert score(model, [b"import "], [b"os, sys"]) == expected
