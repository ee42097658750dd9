"""The options that all methods share, on models of two ranks: the results of one process."""

from __future__ import annotations

from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding._filter_options import FILTERS
from pdkernels.decoding.methods import METHODS
from pdkernels.distributed import parallelize
from tests.distributed.test_tensor_parallel import PROMPTS, length

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8, "seed": 2**63 + 5},
    "seeds": {"temperature": 1.3, "seed": [3, 2**62]},
    "page_size": {"page_size": 3},
    "end_tokens": {"end_tokens": range(40, 60)},
    "stop_strings": {"stop_strings": ["e", "1", " "]},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "penalty and draws": {"repetition_penalty": 0.6, "temperature": 0.9, "page_size": 4},
    "filters": {
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "logit_bias": {40: 3.0},
        "suppress_tokens": [50, 51],
    },
    "filters and draws": {
        "temperature": 0.9,
        "top_k": 7,
        "min_p": 0.02,
        "bad_words": [[41]],
        "repetition_penalty": 1.2,
    },
    "typical_p": {"temperature": 0.9, "typical_p": 0.6},
    "trace": {"trace": True},
    "allow_mask_token": {"allow_mask_token": True},
}
METHOD = {
    "tiny-code": ("autoregressive", "jacobi"),
    "tiny-jacobi": ("jacobi_multiblock",),
    "tiny-trimode": ("linear_self_speculation", "quadratic_self_speculation", "block_diffusion", "fast_dllm_v2"),
    "tiny-masked": ("llada", "dream", "slowfast", "dllm_cache", "fast_dllm"),
    "tiny-planned": ("planned",),
    "tiny-recurrent": ("recurrent_static", "recurrent_adaptive", "recurrent_self_speculation", "recurrent_diffusion"),
}


def calls(name: str) -> list[tuple[str, dict[str, Any]]]:
    shared = {"end_tokens", "stop_strings", "trace", *FILTERS}
    return [
        (method, options)
        for method in METHOD[name]
        for options in OPTIONS.values()
        if all(option in METHODS[method].options for option in options.keys() - shared)
        and not (method == "planned" and "end_tokens" in options)  # they would be tokens of plans
    ]


def said(model: Any, name: str) -> list[Any]:
    prompts = PROMPTS[name]
    results = []
    for method, options in calls(name):
        heard: list[Any] = []
        if isinstance(options.get("seed"), list):
            options = options | {"seed": options["seed"][: len(prompts)]}
        given = {"max_new_tokens": min(length(method), 12), **options}
        result = pd.decoding.generate(
            model, prompts, method, on_tokens=lambda *new, into=heard: into.append(new), **given
        )
        stats = result.stats
        results.append(([x.tolist() for x in result.tokens], result.text, stats.forwards, stats.accepted))
        results.append([(n, list(ids), accepted) for n, ids, accepted in heard if isinstance(n, int)])
    return results


def said_by_ranks(group: Any, name: str) -> list[Any]:
    return said(parallelize(pd.models.load(name), group), name)


@pytest.mark.parametrize("name", PROMPTS)
def test_shared_options_on_ranks(ranks, name: str) -> None:
    expected = said(pd.models.load(name), name)
    for found in ranks.run(2, said_by_ranks, name):
        for call, one, many in zip([c for c in calls(name) for _ in range(2)], expected, found, strict=True):
            assert many == one, call
