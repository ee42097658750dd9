"""Adapters that requests name, in every method: a text is the one it is alone, and lossless methods are greedy decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate, sequence_seed
from pdkernels.decoding.methods import METHODS
from pdkernels.models import load_adapter
from tests.support.drafters import dflash_head, eagle_head, mtp_head, small_drafter
from tests.support.lora import random_adapter

NAMES = ["wide", None, "small", "wide"]
PROMPTS = {"masked": "17 + 25 = ?", "planned": "Sums: 1+2"}
KNOWN = [name for name, method in METHODS.items() if method.wing != "recurrent" and method.follows_adapters]
HEADS = ("draft_model", "eagle", "dflash", "mtp")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trained models with two adapters, by name."""
    made = dict[str, Any]()

    def model_of(name: str) -> Any:
        if name not in made:
            made[name] = pd.models.load(name)
            folder = tmp_path_factory.mktemp(name)
            for seed, (adapter, rank) in enumerate({"small": 4, "wide": 48}.items()):
                load_adapter(made[name], adapter, random_adapter(made[name], folder / adapter, rank, seed))
        return made[name]

    return model_of


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in HEADS])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"page_size": 16}, {"repetition_penalty": 1.3}])
def test_a_text_is_the_one_it_is_alone(name: str, settings: dict[str, Any], models: Any) -> None:
    method = METHODS[name]
    model = models(method.example)
    prompt = PROMPTS.get(method.wing, "482 + 967 = ?")
    if not set(settings) <= {"temperature", "repetition_penalty", *method.options}:
        pytest.skip("no such option")
    options: dict[str, Any] = {"max_new_tokens": 16, **settings}
    options |= {"allow_mask_token": True} if "allow_mask_token" in method.options else {}
    if settings.get("temperature") and name.endswith("self_speculation"):
        options |= {"verification": "compare"} if "verification" in method.options else {}
    together = generate(model, [prompt] * 4, name, adapter=NAMES, **options)
    alone = [
        generate(model, prompt, name, adapter=adapter, **options, seed=sequence_seed(0, number))
        for number, adapter in enumerate(NAMES)
    ]
    assert [text.tolist() for text in together.tokens] == [one.tokens.tolist() for one in alone]
    assert len({tuple(one.tokens.tolist()) for one in alone}) > 1
    plain = generate(model, prompt, name, **options, seed=sequence_seed(0, 1))
    assert together.tokens[1].tolist() == plain.tokens.tolist()
    if method.lossless and "temperature" not in settings:
        rest = {name: value for name, value in options.items() if name in ("max_new_tokens", "repetition_penalty")}
        greedy = generate(model, [prompt] * 4, adapter=NAMES, allow_mask_token=True, **rest)
        assert [text.tolist() for text in together.tokens] == [text.tolist() for text in greedy.tokens]


@pytest.mark.parametrize("name", HEADS)
def test_drafters_of_the_model_alone_draft_for_adapted_texts(name: str, models: Any) -> None:
    model = models("tiny-code")
    drafter = {"draft_model": small_drafter, "eagle": eagle_head, "dflash": dflash_head, "mtp": mtp_head}[name](model)
    options: dict[str, Any] = {"drafter": drafter, "max_new_tokens": 16}
    together = generate(model, ["import o"] * 4, name, adapter=NAMES, **options)
    greedy = generate(model, ["import o"] * 4, adapter=NAMES, max_new_tokens=16)
    assert together.text == greedy.text and len(set(greedy.text)) > 1


def test_several_texts_of_a_prompt_and_log_probabilities(models: Any) -> None:
    model = models("tiny-code")
    options: dict[str, Any] = {"n": 2, "logprobs": 2, "temperature": 0.5, "max_new_tokens": 12}
    found = generate(model, ["import os", "def f("], adapter=["small", None], **options)
    for number, prompt in enumerate(("import os", "def f(")):
        for copy in range(2):
            place = 2 * number + copy
            adapter = ("small", None)[number]
            seed = sequence_seed(0, place)
            one = generate(model, prompt, adapter=adapter, **options | {"n": 1}, seed=seed)
            assert found.tokens[place].tolist() == one.tokens.tolist()
            assert found.logprobs is not None and one.logprobs is not None
            torch.testing.assert_close(found.logprobs[place].tokens, one.logprobs.tokens)


def test_a_method_that_does_not_follow_them_says_so(models: Any) -> None:
    with pytest.raises(NotImplementedError, match="'dllm_cache' does not follow adapter: it runs the parts of"):
        generate(models("tiny-masked"), "1", "dllm_cache", adapter="small")
    cached: dict[str, Any] = {"prompt_interval": 4, "max_new_tokens": 8}
    with pytest.raises(ValueError, match="a feature cache does not follow adapters. Leave out prompt_interval."):
        generate(models("tiny-masked"), "1", "slowfast", adapter="small", **cached)
    with pd.Engine(models("tiny-masked")) as engine:  # also beside a request that shares its batch
        running = engine.submit("1", "slowfast", **cached)
        with pytest.raises(ValueError, match="a feature cache does not follow adapters"):
            engine.submit("1", "slowfast", adapter="small", **cached)
        assert len(running.result().tokens) > 0


@pytest.mark.parametrize("name", ["dream", "slowfast", "fast_dllm_v2"])
def test_canvases_share_a_batch(name: str, models: Any) -> None:
    model, options = models(METHODS[name].example), {"max_new_tokens": 12, "end_tokens": ()}
    prompts = ["482 + 967 = ?", "17 + 25 = ?", "3", "1 + 1 = ?"]
    expected = [generate(model, one, name, adapter=own, **options).text for one, own in zip(prompts, NAMES)]
    with pd.Engine(model, max_canvases=3) as engine:
        handles = [engine.submit(one, name, adapter=own, **options) for one, own in zip(prompts, NAMES)]
        assert [handle.result().text for handle in handles] == expected
    plain = [generate(model, one, name, **options).text for one in prompts]
    assert [a == b for a, b in zip(plain, expected)][1] and plain != expected


# ---- in an engine


def test_requests_share_a_batch(models: Any) -> None:
    model, prompts = models("tiny-code"), ["import os\n", "def f(", "class A", "x = 1"]
    expected = [
        generate(model, prompt, "jacobi", adapter=name, max_new_tokens=20).text for prompt, name in zip(prompts, NAMES)
    ]
    with pd.Engine(model, max_running=4) as engine:
        handles = [
            engine.submit(prompt, "jacobi", adapter=name, max_new_tokens=20) for prompt, name in zip(prompts, NAMES)
        ]
        assert [handle.result().text for handle in handles] == expected
        assert engine.metrics().batches == 1 and len({handle.result().text for handle in handles}) == 4


@pytest.mark.parametrize("page_size", [None, 16])
def test_known_prompts_are_those_of_the_adapter(page_size: int | None, models: Any) -> None:
    """With pages that requests share, and with copies of prompts."""
    model, prompt = models("tiny-code"), "def add(a, b):\n    return a + b\n" * 6
    with pd.Engine(model) as engine:
        for name, known in ((None, False), ("small", False), ("wide", False), ("small", True), (None, True)):
            handle = engine.submit(prompt, adapter=name, max_new_tokens=12, page_size=page_size)
            text, expected = handle.result().text, generate(model, prompt, adapter=name, max_new_tokens=12).text
            assert text == expected and (handle.reused > 100) == known


def test_long_prompts_and_full_memory(models: Any) -> None:
    """Prompts in pieces, and requests that give up their pages and come back."""
    model, prompt = models("tiny-code"), "def add(a, b):\n    return a + b\n" * 3
    with pd.Engine(model, max_new_tokens=100, cache_tokens=512, prompt_tokens_per_step=16) as engine:
        handles = [engine.submit(prompt, adapter=name, max_new_tokens=100, end_tokens=()) for name in NAMES]
        texts = [handle.result().text for handle in handles]
        assert engine.metrics().preemptions > 0
    expected = [generate(model, prompt, adapter=name, max_new_tokens=100, end_tokens=()).text for name in NAMES]
    assert texts == expected


def test_unloading(tmp_path: Path) -> None:
    model = pd.models.load("tiny-code")
    with pd.Engine(model, max_new_tokens=400) as engine:
        engine.load_adapter("mine", random_adapter(model, tmp_path / "mine", 8, 0))
        handle = engine.submit("import os", adapter="mine", max_new_tokens=400, end_tokens=())
        with pytest.raises(ValueError, match=r"adapter that no request uses, got 'mine', which 1 use"):
            engine.unload_adapter("mine")
        next(iter(handle))
        handle.cancel()
        assert handle.result().stats.tokens < 400
        engine.submit("a", max_new_tokens=1).result()
        engine.unload_adapter("mine")
        with pytest.raises(ValueError, match=r"Engine.unload_adapter: name must name a loaded adapter"):
            engine.unload_adapter("mine")
        with pytest.raises(ValueError, match="adapter must name a loaded adapter"):
            engine.submit("import os", adapter="mine")
