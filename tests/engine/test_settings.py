"""`submit` refuses what `generate` refuses, at once and in its words: no setting is looked at when a request joins a batch."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import find, generate
from pdkernels.decoding.generate import ARGUMENTS
from pdkernels.engine import Engine
from pdkernels.generation.params import SETTINGS
from pdkernels.models.architectures.transformer import Transformer, TransformerConfig
from tests.engine.test_engine import JOINING, loaded

VALUES: list[Any] = [
    None,
    -1,
    0,
    2**64,
    1e31,
    1e39,
    1e300,
    1e-31,
    1e-45,
    float("nan"),
    float("inf"),
    True,
    "x",
    b"1",
    [],
    [1],
    [float("nan")],
    {},
    {1: 1e39},
    {1: float("nan")},
    {10**9: 1},
    numpy.float32(0.5),
    numpy.float64(0.5),
    numpy.int64(3),
    numpy.bool_(True),
    torch.tensor(0.5),
    1j,
    [["a"]],
    ["", "a"],
    set(),
]
# An engine has its own rules for a seed, which is one request's, and for the number of tokens.
OWN = ("seed", "max_new_tokens", "n", "infill", "max_time")
METHODS = {method: (name, several[0]) for name, method, several in JOINING}
CASES = [(method, option) for method in METHODS for option in find(method).options if option not in OWN]
CASES += [("autoregressive", option) for option in (*SETTINGS, *ARGUMENTS) if option not in OWN]


def outcome(call: Any) -> Any:
    try:
        return call().tokens.tolist()
    except (ValueError, TypeError, NotImplementedError) as error:
        return error


def check_alike(method: str, options: list[str], values: list[Any]) -> None:
    name, given = METHODS[method]
    model, prompt = loaded(name), "12+3=" if name == "tiny-masked" else "imp"
    with Engine(model, max_new_tokens=4, max_prompt_tokens=16) as engine:
        for option in options:
            for value in values:
                settings = {"max_new_tokens": 4, **given, option: value}
                alone = outcome(lambda settings=settings: generate(model, prompt, find(method), **settings))
                try:
                    handle = engine.submit(prompt, method, **settings)
                except NotImplementedError:
                    continue  # what no running batch follows
                except (ValueError, TypeError) as error:
                    assert type(alone) is type(error), (option, value, alone, error)
                    words, own = str(alone).partition(": ")[2], str(error).partition(": ")[2]
                    assert own.startswith(words[:40]) and str(error).startswith("pdkernels."), (words, own)
                    continue
                if option != "logits_processor":
                    assert handle.result(60).tokens.tolist() == alone, (option, value)


@pytest.mark.parametrize("method", ["autoregressive", "llada", "recurrent_diffusion"])
def test_bad_settings_are_refused_at_once(method: str) -> None:
    few = [1e31, 1e300, 1e-45, -1, float("nan"), [1], numpy.float32(0.5)]
    check_alike(method, [option for name, option in CASES if name == method], few)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_all_bad_settings_are_refused_at_once(method: str) -> None:
    check_alike(method, [option for name, option in CASES if name == method], VALUES)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("autoregressive", {"temperature": 1e31}, r"temperature must be at most 1e\+30, got 1e\+31"),
        ("autoregressive", {"repetition_penalty": 1e-45}, "repetition_penalty must be at least 1e-30, got 1e-45"),
        ("llada", {"revise": -1}, r"revise must be in 0 \.\. 1, got -1"),
        ("llada", {"guidance": 1e300}, r"guidance must be at most 1e\+30, got 1e\+300"),
        ("recurrent_diffusion", {"noise": 1e300}, r"noise must be at most 1e\+30"),
        ("recurrent_diffusion", {"init_scale": 1e300}, r"init_scale must be at most 1e\+30"),
        ("recurrent_diffusion", {"max_recurrences": 10**30}, "max_recurrences must be at most 16777216"),
    ],
)
def test_settings_that_overflow_are_refused_by_both(method: str, options: dict[str, Any], words: str) -> None:
    model = loaded(METHODS[method][0])
    prompt = "12+3=" if method == "llada" else "imp"
    with pytest.raises(ValueError, match=words):
        generate(model, prompt, find(method), max_new_tokens=4, **options)
    with Engine(model, max_new_tokens=4) as engine, pytest.raises(ValueError, match=words):
        engine.submit(prompt, method, max_new_tokens=4, **options)


def test_seeds_and_what_an_engine_does_not_do() -> None:
    model = pd.models.load("tiny-code")
    for seed in (b"1", bytearray(b"1")):
        with pytest.raises(TypeError, match="seed must be an int or a list of ints, got byte"):
            generate(model, "a", max_new_tokens=1, seed=seed)
    with Engine(model, max_new_tokens=4) as engine:
        for wrong in (b"1", [1], True, 1.0, "1", numpy.float64(1)):
            with pytest.raises(TypeError, match="Engine.submit: seed must be an int"):
                engine.submit("a", max_new_tokens=1, seed=wrong)
        for name, wrong in (("n", True), ("n", 1.0), ("infill", 0), ("infill", None)):
            with pytest.raises(TypeError, match=f"Engine.submit: {name} must be"):
                engine.submit("a", max_new_tokens=1, **{name: wrong})
        with pytest.raises(ValueError, match="a request has one answer"):
            engine.submit("a", max_new_tokens=1, n=2)
        for seed in (0, -1, 2**64, -(2**70)):
            alone = generate(model, "a", max_new_tokens=4, temperature=1.0, seed=seed, end_tokens=()).tokens
            handle = engine.submit("a", max_new_tokens=4, temperature=1.0, seed=seed, end_tokens=())
            assert handle.result(60).tokens.equal(alone)


def test_limits_say_where_they_come_from() -> None:
    with Engine(pd.models.load("tiny-code"), max_new_tokens=16, max_prompt_tokens=8) as engine:
        words = (
            r"be in 1 \.\. 16, the engine's, got 128. Pass fewer, or make the engine with Engine\(max_new_tokens=128\)"
        )
        with pytest.raises(ValueError, match=words):
            engine.submit("a")
        with pytest.raises(
            ValueError, match=r"got 9. Shorten it, or make the engine with Engine\(max_prompt_tokens=9\)"
        ):
            engine.submit("x" * 9, max_new_tokens=4)


def test_a_hundred_thousand_biases() -> None:
    """The tokens of adding them to the logits."""
    torch.manual_seed(0)
    size, count = 120_000, 100_000
    config = TransformerConfig(
        vocab_size=size, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=24
    )
    model = Transformer(config).requires_grad_(False)
    ids, values = torch.randperm(size)[:count], torch.randn(count) * 3
    added = torch.zeros(size).index_put((ids,), values)
    text = [3, 1, 4]
    for _ in range(3):
        text.append(int((model(torch.tensor([text]))[0, -1] + added).argmax()))
    bias = dict(zip(ids.tolist(), values.tolist(), strict=True))
    with Engine(model, max_new_tokens=3) as engine:
        handle = engine.submit([3, 1, 4], max_new_tokens=3, end_tokens=(), logit_bias=bias)
        plain = engine.submit([3, 1, 4], max_new_tokens=3, end_tokens=())
        assert handle.result(60).tokens.tolist() == text[3:] != plain.result(60).tokens.tolist()


@pytest.mark.parametrize("speculate", [2**64, 65, -1, True, "3"])
def test_states_out_of_range_are_refused_in_the_words_of_generate(speculate: Any) -> None:
    model = pd.models.load("tiny-masked")
    asked: dict[str, Any] = {"max_new_tokens": 4, "speculate": speculate}
    with pytest.raises(ValueError, match="speculate must be an int from 0 to 64, got") as expected:
        pd.decoding.generate(model, "1+2=", "llada", **asked)
    with pd.Engine(model) as engine, pytest.raises(ValueError, match=re.escape(str(expected.value))):
        engine.submit("1+2=", "llada", **asked)
