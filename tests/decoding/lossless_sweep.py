"""All methods that promise the tokens of greedy decoding, on random models: `python -m tests.decoding.lossless_sweep 1000`.

Random weights are the hard case: nothing is certain, so logits are close to each other and in bfloat16 often tie. With `--smollm2`
the model is SmolLM2 with its drafter, and the prompts are questions about modules of the standard library.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch

from pdkernels.decoding import available, generate, is_lossless, supports
from pdkernels.models import load
from tests.support.tri_mode import small_transformer

FORMS: dict[str, list[dict[str, Any]]] = {
    "jacobi": [{"block_size": 8}, {"block_size": 5}],
    "jacobi_multiblock": [{"block_size": 6}, {"block_size": 4, "blocks": 3}],
    "linear_self_speculation": [{"block_size": 6}, {"block_size": 4, "threshold": 0.1}],
    "quadratic_self_speculation": [{"block_size": 4}, {"block_size": 5}],
}
METHODS = {
    name: FORMS.get(name, [{}, {}])
    for name in available()
    if is_lossless(name) and supports(name, small_transformer(0)) and name != "autoregressive"
}
BATCH, NEW, VOCABULARY = 10, 24, 40


def differences(prompts: int, dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[str, int, int]]:
    """For each method of each batch of prompts, its name, how many sequences were compared and how many differ.

    A model serves one batch. Greedy decoding runs one prompt at a time; the others alternate between batches and pages.
    """
    for at in range(0, prompts, BATCH):
        model = small_transformer(seed + at, VOCABULARY, adapter=at % 20 == 0, head_dim=16).to(dtype)
        generator = torch.Generator().manual_seed(seed + at)
        count = min(BATCH, prompts - at)
        lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
        texts = [torch.randint(VOCABULARY - 1, (length,), generator=generator).tolist() for length in lengths]
        greedy = [generate(model, text, max_new_tokens=NEW, end_tokens=()).tokens for text in texts]
        for method, variants in METHODS.items():
            options = variants[at // BATCH % 2] | {"page_size": (None, 7, 16)[at // BATCH % 3]}
            found = generate(model, texts, method, max_new_tokens=NEW, end_tokens=(), **options).tokens
            yield method, count, sum(not torch.equal(a, b) for a, b in zip(found, greedy, strict=True))


SMOLLM2_METHODS: dict[str, dict[str, Any]] = {
    "jacobi": {"draft": "lookup"},
    "jacobi_multiblock": {"block_size": 8},
    "linear_self_speculation": {"block_size": 4},
    "quadratic_self_speculation": {"block_size": 2, "label_shift": 1, "in_group": "causal"},
}


def differences_on_smollm2(prompts: int, dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[str, int, int]]:
    """The same on a real model. `seed` is the index of the first module, alphabetically, in the questions."""
    model = load("smollm2-135m-instruct", drafter="smollm2-drafter", dtype=dtype)
    names = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))[seed : seed + prompts]
    for name in names:
        question = [{"role": "user", "content": f"What is the Python module {name} for?"}]
        greedy = generate(model, question, max_new_tokens=NEW).tokens
        for method, options in SMOLLM2_METHODS.items():
            found = generate(model, question, method, max_new_tokens=NEW, **options).tokens
            yield method, 1, int(not torch.equal(found, greedy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=int, nargs="?", default=1000)
    parser.add_argument("--smollm2", action="store_true")
    given = parser.parse_args()
    compare = differences_on_smollm2 if given.smollm2 else differences
    total: dict[tuple[str, torch.dtype], tuple[int, int]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for method, compared, wrong in compare(given.prompts, dtype):
            before = total.get((method, dtype), (0, 0))
            total[method, dtype] = (before[0] + compared, before[1] + wrong)
    for (method, dtype), (compared, wrong) in total.items():
        print(f"{method:28} {dtype!s:16} {compared} prompts, {wrong} differ from greedy")
    sys.exit(any(wrong for _, wrong in total.values()))


if __name__ == "__main__":
    main()
