"""`torch.set_default_device`: what the host makes for itself is on the CPU wherever tensors of others go.

On "meta" no tensor has numbers, so one that is made without a device fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import Grammar, generate
from pdkernels.integrations.likelihood import log_likelihood, masked_log_likelihood


def texts(name: str, method: str, **settings: Any) -> Callable[[], Any]:
    def written() -> Any:
        result = generate(pd.models.load(name), ["17 + 25 = ?", "1"], method, max_new_tokens=10, **settings)
        devices = {ids.device.type for ids in result.tokens}
        logprobs = [one.tokens.tolist() for one in result.logprobs or ()]
        return devices, [ids.tolist() for ids in result.tokens], logprobs

    return written


def served() -> Any:
    with pd.Engine(pd.models.load("tiny-code"), max_new_tokens=16) as engine:
        settings: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0.5, "logit_bias": {101: 0.5}}
        return [engine.submit(text, "jacobi", **settings).result().tokens.tolist() for text in ("import os", "def f(")]


CALLS: dict[str, Callable[[], Any]] = {
    "filters": texts("tiny-code", "jacobi", logit_bias={101: 1.1}, bad_words=[[32, 10]], repetition_penalty=1.1),
    "draws": texts("tiny-code", "autoregressive", temperature=0.8, top_p=0.9, n=2, logprobs=2, seed=3),
    "stops": texts("tiny-code", "suffix", stop_strings=["e"], stopping_criteria=lambda ids, _: ids.shape[1] > 16),
    "grammar": texts("tiny-code", "jacobi", grammar=Grammar.regex("[a-c]{3,8}"), page_size=4),
    "canvas": texts("tiny-masked", "llada", grammar=Grammar.regex("[0-9]{1,8}")),
    "blocks": texts("tiny-trimode", "linear_self_speculation"),
    "depth": texts("tiny-recurrent", "recurrent_adaptive", logprobs=1),
    "plans": texts("tiny-planned", "planned"),
    "quantised": lambda: pd.quantize(pd.models.load("tiny-code"), "q4_0")(torch.tensor([[5]], device="cpu")).tolist(),
    "engine": served,
    "likelihood": lambda: log_likelihood(pd.models.load("tiny-code"), [b"impor"] * 2, [b"t os", b"t"]),
    "bound": lambda: masked_log_likelihood(pd.models.load("tiny-masked"), [b"1 + "], [b"2 = 3567"], samples=16),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls(call: str) -> None:
    expected = CALLS[call]()
    with torch.device("meta"):
        assert CALLS[call]() == expected


def test_models_of_transformers() -> None:
    pytest.importorskip("transformers")
    from pdkernels.integrations.transformers import from_transformers
    from pdkernels.integrations.transformers import generate as custom
    from tests.integrations.test_shadow import PROMPT, ours, small, theirs, wrap

    model = small()
    expected, ids = theirs(model), torch.tensor([PROMPT])
    settings: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": None, "custom_generate": custom}
    draws = {"do_sample": True, "method_options": {"seed": 3}}
    drawn = model.generate(ids, **settings, **draws)
    with torch.device("meta"):
        assert ours(wrap(model)) == ours(from_transformers(model)) == expected
        assert torch.equal(model.generate(ids, **settings, **draws), drawn)
