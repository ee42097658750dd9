"""The options that all methods share, on models of two ranks: the results of one process."""

from __future__ import annotations

from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding.methods import METHODS
from pdkernels.distributed import parallelize
from tests.distributed.test_tensor_parallel import PROMPTS, length
from tests.harness.sessions import FILTERS

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


def takes(method: str, options: dict[str, Any]) -> bool:
    shared = {"end_tokens", "stop_strings", "trace", *FILTERS}
    return all(option in METHODS[method].options for option in options.keys() - shared) and not (
        method == "planned" and "end_tokens" in options  # they would be tokens of plans
    )


CASES = [
    (name, method, option)
    for name, methods in METHOD.items()
    for method in methods
    for option, options in OPTIONS.items()
    if takes(method, options)
]


def said(model: Any, name: str, method: str, option: str) -> list[Any]:
    prompts, options = PROMPTS[name], OPTIONS[option]
    heard: list[Any] = []
    if isinstance(options.get("seed"), list):
        options = options | {"seed": options["seed"][: len(prompts)]}
    given = {"max_new_tokens": min(length(method), 12), **options}
    result = pd.decoding.generate(model, prompts, method, on_tokens=lambda *new: heard.append(new), **given)
    stats = result.stats
    return [
        ([x.tolist() for x in result.tokens], result.text, stats.forwards, stats.accepted),
        [(n, list(ids), accepted) for n, ids, accepted in heard if isinstance(n, int)],
    ]


def said_by_ranks(group: Any, name: str, method: str, option: str) -> list[Any]:
    return said(parallelize(pd.models.load(name), group), name, method, option)


@pytest.mark.covering
@pytest.mark.parametrize(("name", "method", "option"), CASES)
def test_shared_options_on_ranks(ranks, name: str, method: str, option: str) -> None:
    expected = said(pd.models.load(name), name, method, option)
    assert ranks.run(2, said_by_ranks, name, method, option) == [expected, expected]
