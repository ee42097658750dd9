"""All layers as one op where some have experts: the bits of the layers one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import _native
from pdkernels.models import ExpertsConfig, Transformer, TransformerConfig
from pdkernels.ops.quantize import quantize
from pdkernels.ops.quantized_weight import QuantizedWeight
from tests.models.test_row_invariance import CONFIG, DTYPES, a_model, configs, some_tokens
from tests.models.test_whole_step import both, count_runs, prompts_drafts_and_a_token

pytestmark = pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")

SMALL = {"hidden_size": 64, "intermediate_size": 96, "layers": 3}
MIXTURES = {
    "softmax": ExpertsConfig(8, 2, 32),
    "all experts": ExpertsConfig(3, 3, 32, normalized=False),
    "one expert": ExpertsConfig(8, 1, 32, scores="sigmoid"),
    "shared": ExpertsConfig(8, 4, 32, shared_size=64, scale=2.5),
    "every second": ExpertsConfig(8, 4, 32, every=2),
    "sigmoid": ExpertsConfig(8, 3, 32, scores="sigmoid", normalized=False, shared_size=32),
    "groups": ExpertsConfig(
        16, 4, 32, scores="sigmoid", biased=True, groups=4, chosen_groups=2, scale=2.5, first=1, shared_size=32
    ),
}


def run_both(model: Transformer, batch: int, page_size: int | None = None) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs = count_runs(monkeypatch)
        found = both(monkeypatch, lambda: prompts_drafts_and_a_token(model, batch, page_size, True, None, None))
        assert len(runs) == 3
    return found


@st.composite
def mixtures(draw: st.DrawFn) -> ExpertsConfig:
    count, scores = draw(st.integers(1, 20)), draw(st.sampled_from(["softmax", "sigmoid"]))
    return ExpertsConfig(
        count,
        draw(st.integers(1, count)),
        draw(st.sampled_from([5, 32, 40])),
        normalized=draw(st.booleans()),
        first=draw(st.integers(0, 1)),
        scores=scores,  # type: ignore[arg-type]
        biased=scores == "sigmoid" and draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5, 0.3])),
        shared_size=draw(st.sampled_from([0, 0, 24])),
    )


@settings(max_examples=40)
@given(
    config=configs(),
    experts=mixtures(),
    dtype=st.sampled_from(DTYPES),
    batch=st.sampled_from([1, 3]),
    page_size=st.sampled_from([None, 4]),
)
def test_has_the_bits_of_its_layers(
    config: TransformerConfig, experts: ExpertsConfig, dtype: torch.dtype, batch: int, page_size: int | None
) -> None:
    experts = replace(experts, first=min(experts.first, config.layers - 1))
    run_both(a_model(replace(config, experts=experts), dtype), batch, page_size)


@pytest.mark.parametrize("name", MIXTURES)
def test_kinds_of_mixtures(name: str) -> None:
    for dtype in DTYPES:
        model = a_model(replace(CONFIG, **SMALL, experts=MIXTURES[name]), dtype)
        run_both(model, 3)


@pytest.mark.parametrize("format", ["int8", "q4_0", "int8 int4"])
def test_quantised_experts(format: str) -> None:
    """Some matrices are quantised, in one part or two, and others are not."""

    def packed(weight: torch.Tensor) -> QuantizedWeight:
        halves = weight.float().chunk(2, -2)
        return QuantizedWeight.join([quantize(half, one) for half, one in zip(halves, format.split() * 2)])

    for name in ("shared", "groups"):
        model = a_model(replace(CONFIG, **SMALL, experts=MIXTURES[name]), torch.bfloat16)
        layer: Any = model.layers[1]
        for matrix in ("experts_gate_up", "shared_down", "qkv"):
            weight = getattr(layer, matrix)
            delattr(layer, matrix)
            setattr(layer, matrix, packed(weight))
        last: Any = model.layers[2]
        weight = last.experts_down
        del last.experts_down
        last.experts_down = packed(weight)
        run_both(model, 3)


def test_prompts_on_threads() -> None:
    """Enough rows that gathering them, norms and products run on several threads."""
    threads = torch.get_num_threads()
    model = a_model(replace(CONFIG, **SMALL, experts=MIXTURES["shared"]), torch.bfloat16)
    tokens = some_tokens(1, 301)

    def call() -> list[torch.Tensor]:
        cache = model.new_cache(1, 310)
        first = model(tokens[:, :300], cache=cache)
        cache.commit_(torch.tensor([300]))
        return [first, model(tokens[:, 300:], cache=cache), cache.k]

    try:
        torch.set_num_threads(2)
        with pytest.MonkeyPatch.context() as monkeypatch:
            both(monkeypatch, call)
    finally:
        torch.set_num_threads(threads)


def test_numbers_that_are_not_finite() -> None:
    model = a_model(replace(CONFIG, **SMALL, experts=MIXTURES["softmax"]), torch.float32)
    model.embedding[1], model.embedding[2] = torch.nan, torch.inf
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs = count_runs(monkeypatch)
        tokens = torch.tensor([[3, 1, 4, 2, 5]])
        both(monkeypatch, lambda: [model(tokens, cache=model.new_cache(1, 8)).nan_to_num(7)])
        assert len(runs) == 1
