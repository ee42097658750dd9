"""The method for a model when its caller names none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import default_method, generate
from pdkernels.models import from_callable

LOOKUP = ("jacobi", {"draft": "lookup", "block_size": "auto"})


@pytest.mark.parametrize(
    ("name", "alone", "several"),
    [
        ("tiny-code", LOOKUP, ("autoregressive", {})),
        ("tiny-recurrent", LOOKUP, ("autoregressive", {})),
        ("tiny-jacobi", ("jacobi", {}), ("jacobi", {})),
        ("tiny-trimode", ("linear_self_speculation", {}), ("linear_self_speculation", {})),
        ("tiny-masked", ("llada", {}), ("llada", {})),
        ("tiny-planned", ("planned", {}), ("planned", {})),
    ],
)
def test_a_trained_model_keeps_its_method_and_others_look_up(name: str, alone: Any, several: Any) -> None:
    model = pd.models.load(name)
    assert default_method(model, name=name) == alone
    assert default_method(model, name=name, several=True) == several


@pytest.mark.parametrize("name", ["tiny-code", "tiny-jacobi", "tiny-recurrent", "tiny-trimode"])
def test_the_default_never_takes_more_forwards_and_gives_the_same_tokens(name: str) -> None:
    model = pd.models.load(name)
    if name == "tiny-recurrent":
        model.config = replace(model.config, mean_recurrence=5)
    for prompt in ("import os\nimport sys\n", "7 + 5 = ?", "def f(x):\n    return x\n"):
        method, options = default_method(model, name=name)
        greedy = generate(model, prompt, max_new_tokens=40)
        usual = generate(model, prompt, pd.decoding.find(method), max_new_tokens=40, **options)
        assert usual.tokens.equal(greedy.tokens)
        assert usual.stats.forwards <= greedy.stats.forwards


def test_without_a_match_a_forward_has_one_row() -> None:
    """What makes lookups free for a text that repeats nothing: every step's forward has one row."""
    rows: list[int] = []

    def count_up(tokens: torch.Tensor) -> torch.Tensor:
        rows.append(tokens.shape[1])
        return torch.nn.functional.one_hot((tokens + 1) % 50, 50).float()

    method, options = default_method(model := from_callable(count_up, vocab_size=50))
    assert (method, options) == ("jacobi", {"draft": "lookup"})  # what a function's rows cost is not known
    result = generate(model, [3], pd.decoding.find(method), max_new_tokens=20, **options)
    assert result.tokens.tolist() == list(range(4, 24)) and rows == list(range(1, 21))


def test_options_of_the_caller() -> None:
    model, trimode = pd.models.load("tiny-code"), pd.models.load("tiny-trimode")
    assert default_method(model, ["draft", "window"]) == default_method(model, ["draft"]) == ("jacobi", {})
    assert default_method(model, ["window"]) == ("jacobi", {"draft": "lookup"})
    assert default_method(model, ["block_size"]) == ("jacobi", {"draft": "lookup"})
    assert default_method(model, ["temperature"]) == LOOKUP
    assert default_method(model, ["no_such"]) == LOOKUP  # which then refuses it by name
    assert default_method(trimode, ["threshold"])[0] == "linear_self_speculation"
    recurrent = pd.models.load("tiny-recurrent")
    assert default_method(recurrent, ["temperature"]) == LOOKUP
    assert default_method(recurrent, ["temperature", "top_p"]) == LOOKUP
    assert default_method(recurrent, ["temperature", "init_scale"]) == ("recurrent_static", {})
