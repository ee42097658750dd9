"""The generation configs of published models, unchanged, in every causal method: on small random models of their families."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdkernels.decoding import generate
from pdkernels.decoding.methods import METHODS
from pdkernels.models import TransformerConfig
from tests.support.drafters import dflash_head, eagle_head, mtp_head, small_drafter

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import generate as custom  # noqa: E402
from pdkernels.integrations.transformers import wrap  # noqa: E402

V = 97
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
}
# Each as published, but for ids, which are those of larger vocabularies.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": (
        "Qwen3",
        {
            "bos_token_id": 4,
            "do_sample": True,
            "eos_token_id": [5, 4],
            "pad_token_id": 4,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
        },
    ),
    "Llama 3": (
        "Llama",
        {"bos_token_id": 3, "do_sample": True, "eos_token_id": [4, 5, 6], "temperature": 0.6, "top_p": 0.9},
    ),
    "Gemma 3": (
        "Gemma3",
        {
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "do_sample": True,
            "eos_token_id": [1, 5],
            "pad_token_id": 0,
            "top_k": 64,
            "top_p": 0.95,
        },
    ),
    "SmolLM2": ("Llama", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}),
    "Qwen2.5": (
        "Qwen2",
        {
            "bos_token_id": 4,
            "pad_token_id": 4,
            "do_sample": True,
            "eos_token_id": [5, 4],
            "repetition_penalty": 1.05,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
        },
    ),
}
MASK = {"mask_token": V - 1, "allow_mask_token": True}
CAUSAL: dict[str | None, dict[str, Any]] = {
    None: {},
    "autoregressive": {},
    "jacobi": {"block_size": 4},
    "jacobi_multiblock": {"block_size": 3},
    "suffix": {},
    "draft_model": {},
    "eagle": {"branches": 2},
    "dflash": {},
    "mtp": {},
    "linear_self_speculation": {"block_size": 4, **MASK},
    "quadratic_self_speculation": {"block_size": 4, **MASK},
}


@cache
def model_of(name: str) -> Any:
    family, settings = PUBLISHED[name]
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config(**SIZES)).eval()
    model.generation_config = transformers.GenerationConfig(**settings)
    return model


def drafter_of(name: str, method: str | None) -> dict[str, Any]:
    """A drafter with random weights, for a method that needs one."""
    target = wrap(model_of(name))
    if method == "draft_model":
        return {"drafter": small_drafter(target)}
    if method == "mtp":
        sizes = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 48}
        config = TransformerConfig(vocab_size=V, **sizes)
        like = SimpleNamespace(config=config, norm=target.norm, device=target.device, dtype=target.dtype)
        return {"drafter": mtp_head(like)}
    made = {"eagle": eagle_head, "dflash": dflash_head}.get(str(method))
    return {} if made is None else {"drafter": made(target, taps=(0, 1))}


@pytest.mark.covering
@pytest.mark.parametrize("method", CAUSAL)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_runs_unchanged(name: str, method: str | None) -> None:
    """In `custom_generate`: the same draws for the same seed in every method, and none that the filters drop."""
    model, (_, settings) = model_of(name), PUBLISHED[name]
    ids = torch.randint(7, V, (2, 6), generator=torch.Generator().manual_seed(1))
    seed: dict[str, Any] = {"seed": 3} if settings.get("do_sample") else {}
    given = {"custom_generate": custom, "max_new_tokens": 24}
    expected = model.generate(ids, method="autoregressive", method_options=seed, **given)
    given |= {"method": method, "method_options": seed | CAUSAL[method], **drafter_of(name, method)}
    asked = {"return_dict_in_generate": True, "output_scores": True}
    told = model.generate(ids, **given, **asked)
    assert torch.equal(told.sequences, expected) and told.stats.method == (method or "jacobi")
    if not settings.get("do_sample"):
        assert torch.equal(expected, model.generate(ids, max_new_tokens=24))
        return
    for place, scores in enumerate(told.scores):
        for row, token in enumerate(told.sequences[:, 6 + place].tolist()):
            if scores[row].any():  # of a text that goes on
                assert scores[row, token] > -torch.inf
                assert int(scores[row].isfinite().sum()) <= settings.get("top_k", V)


@pytest.mark.covering
@pytest.mark.parametrize("method", ["block_diffusion", "fast_dllm_v2"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_runs_where_drafts_are_not_verified(name: str, method: str) -> None:
    model, (_, settings) = model_of(name), PUBLISHED[name]
    options = {"mask_token": V - 1, "block_size": 8} | ({"seed": 3} if settings.get("do_sample") else {})
    ids = torch.randint(7, V, (2, 6), generator=torch.Generator().manual_seed(1))
    given = {"custom_generate": custom, "max_new_tokens": 12, "method": method, "method_options": options}
    found = model.generate(ids, **given)
    assert torch.equal(found, model.generate(ids, **given)) and (found[:, 6:] != V - 1).all()


@pytest.mark.parametrize(
    "name", [name if n < 2 else pytest.param(name, marks=pytest.mark.slow) for n, name in enumerate(PUBLISHED)]
)
def test_its_settings_are_options_of_every_exact_method(name: str) -> None:
    """Of `pdkernels.decoding.generate` as well."""
    model, (_, settings) = wrap(model_of(name)), PUBLISHED[name]
    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    card = {key: settings[key] for key in names if key in settings}
    if settings.get("do_sample"):
        card.setdefault("temperature", 1.0)
    options = {"max_new_tokens": 10, "end_tokens": settings["eos_token_id"], "seed": 9, **card}
    if isinstance(options["end_tokens"], int):
        options["end_tokens"] = (options["end_tokens"],)
    expected = generate(model, [[8, 9, 10], [11]], **options)
    run = 0
    for method, known in METHODS.items():
        if known.wing == "causal" and known.lossless:
            more = {**(MASK if known.needs_mask_token else {}), **drafter_of(name, method)}
            found = generate(model, [[8, 9, 10], [11]], method, **options, **more)
            assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in expected.tokens]
            run += 1
    assert run == len(CAUSAL) - 1
