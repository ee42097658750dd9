"""`torch.set_default_dtype`, as code around a model leaves it, changes no number of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.training import draw_masks, draw_recurrences


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def other_default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


def written(result: Any) -> list[Any]:
    """Tokens and log-probabilities, with their dtypes."""
    found = [ids.tolist() for ids in result.tokens]
    for one in result.logprobs or ():
        found += [one.tokens.dtype, one.tokens.tolist(), one.top.dtype, one.top.tolist()]
    return found


CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bias": ("tiny-code", "jacobi", {"logit_bias": {101: 1.1, 32: -0.3}, "repetition_penalty": 1.1}),
    "draws": ("tiny-code", "autoregressive", {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "typical_p": 0.9}),
    "written log-probabilities": ("tiny-trimode", "block_diffusion", {"logprobs": 2}),
    "log-probabilities": ("tiny-code", "jacobi", {"logprobs": 2}),
    "canvas": ("tiny-masked", "llada", {"logprobs": 2, "logit_bias": {50: 0.7}}),
    "depth": ("tiny-recurrent", "recurrent_adaptive", {"logprobs": 1, "criterion": "entropy-diff"}),
}


@pytest.mark.parametrize("call", CALLS)
def test_texts(call: str, other_default: Callable[[], None]) -> None:
    name, method, settings = CALLS[call]
    model, prompts = pd.models.load(name), ["17 + 25 = ?", "1"]
    settings = {"max_new_tokens": 10, **settings}
    expected = written(generate(model, prompts, method, **settings))
    other_default()
    assert written(generate(model, prompts, method, **settings)) == expected


def test_noise_of_training(other_default: Callable[[], None]) -> None:
    def drawn() -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        return draw_masks(400, generator)[0].tolist(), [draw_recurrences(16, generator) for _ in range(50)]

    expected = drawn()
    other_default()
    assert drawn() == expected
