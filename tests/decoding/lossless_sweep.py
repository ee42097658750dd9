"""All methods that promise the tokens of greedy decoding, on random models: `python -m tests.decoding.lossless_sweep 1000`.

Random weights are the hard case: nothing is certain, so logits are close to each other and in bfloat16 often tie. Models are of
numbers, or of matrices packed in each format, whose activations are float32 and bfloat16 in turn. With `--smollm2`
the model is SmolLM2 with its drafter, and the prompts are questions about modules of the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.decoding import available, generate, is_lossless, supports
from pdkernels.evaluation.machine import processor
from pdkernels.models import Transformer, load
from pdkernels.reference.gguf_blocks import LAYOUTS
from pdkernels.reference.quantized_linear import Quantized
from tests.support.drafters import with_drafters
from tests.support.tri_mode import small_transformer

FORMS: dict[str, list[dict[str, Any]]] = {
    "jacobi": [{"block_size": 8}, {"block_size": 5}],
    "jacobi_multiblock": [{"block_size": 6}, {"block_size": 4, "blocks": 3}],
    "linear_self_speculation": [{"block_size": 6}, {"block_size": 4, "threshold": 0.1}],
    "quadratic_self_speculation": [{"block_size": 4}, {"block_size": 5}],
}
DRAFTED: dict[str, list[dict[str, Any]]] = {
    "suffix": [{"block_size": 4}, {}],
    "draft_model": [{"block_size": 3}, {"block_size": 6}],
    "dflash": [{}, {"block_size": 3}],
    "mtp": [{}, {"block_size": 5}],
    "eagle": [
        {"block_size": 2},
        {"block_size": 3, "branches": 2},
        {"block_size": 5},
        {"block_size": 5, "branches": 3, "nodes": 12},
    ],
}
METHODS = {
    name: (FORMS | DRAFTED).get(name, [{}, {}])
    for name in available()
    if is_lossless(name) and supports(name, with_drafters(small_transformer(0))) and name != "autoregressive"
}
NUMBERS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PACKED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "int8", "int4", "int4 of 64")
SIZES = {
    "": {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96},
    "_k": {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256},
}
BATCH, NEW, VOCABULARY = 10, 24, 40


def packed(model: Transformer, format: str) -> Transformer:
    """The model with all its matrices in a format."""
    if not format.endswith("_k"):
        name, _, group = format.partition(" of ")
        return pd.quantize(model, name, group=int(group) if group else None)
    made = pd.quantize(model, "q8_0")  # and then other matrices in the place of these
    for module in list(made.modules()):
        for name, weight in list(module.named_children()):
            if isinstance(weight, pd.QuantizedWeight):
                setattr(module, name, k_format(weight.dequantize(), format))
    return made


def k_format(values: Tensor, format: str) -> pd.QuantizedWeight:
    """A matrix in a format whose scales are multiples of a scale for 256 columns. Only files have them, so nothing else writes them."""
    layout = LAYOUTS[format.upper()]
    outputs, width = values.shape
    groups = layout.groups(width)
    parts = values.view(outputs, groups, 16, 16)
    if layout.scales == "super16":  # (outputs, groups, 16 halves, 16)
        steps = parts.abs().amax(3) / 31
        scale = (steps.amax(2, keepdim=True) / 127).half()
        multiples = torch.where(scale > 0, steps / scale, 0.0).round().clamp(max=127)
        step = (scale * multiples)[..., None]
        codes = torch.where(step > 0, parts / step, 0.0).round().clamp(-32, 31) + 32
        fields = {"scale": scale, "multiples": multiples.to(torch.uint8)}
    else:
        parts = values.view(outputs, groups, 8, 32)
        low = -parts.amin(3).clamp(max=0)
        steps = (parts.amax(3).clamp(min=0) + low) / (2**layout.bits - 1)
        scale, minimum = ((each.amax(2, keepdim=True) / 255).half() for each in (steps, low))
        pairs = [
            torch.where(to > 0, of / to, 0.0).round().clamp(max=255) for of, to in ((steps, scale), (low, minimum))
        ]
        step, offset = (scale * pairs[0])[..., None], (minimum * pairs[1])[..., None]
        codes = torch.where(step > 0, (parts + offset) / step, 0.0).round().clamp(0, 2**layout.bits - 1)
        fields = {"scale": scale, "minimum": minimum, "multiples": torch.stack(pairs, 3).flatten(2).to(torch.uint8)}
    return pd.QuantizedWeight.pack(
        format, layout, Quantized(codes.reshape(outputs, width).to(torch.uint8), fields), width
    )


def differences(
    prompts: int,
    weights: str,
    seed: int = 0,
    methods: Collection[str] = tuple(METHODS),
    cache_dtype: torch.dtype | None = None,
    size: int = BATCH,
) -> Iterator[tuple[str, int, int]]:
    """For each of `methods` on each batch of `size` prompts, its name, how many sequences were compared and how many differ.

    A model serves one batch; `weights` says what its matrices are. Greedy decoding runs one prompt at a time; the others alternate
    between batches and pages. `cache_dtype` is that of all caches.
    """
    for number, at in enumerate(range(0, prompts, size)):
        model = small_transformer(seed + at, VOCABULARY, at % 20 == 0, **SIZES.get(weights[-2:], SIZES[""]))
        if weights in NUMBERS:
            model = model.to(NUMBERS[weights])
        else:
            model = packed(model.to((torch.float32, torch.bfloat16)[number // 2 % 2]), weights)
        model.cache_dtype = cache_dtype
        with_drafters(model)
        generator = torch.Generator().manual_seed(seed + at)
        count = min(size, prompts - at)
        lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
        texts = [torch.randint(VOCABULARY - 1, (length,), generator=generator).tolist() for length in lengths]
        greedy = [generate(model, text, max_new_tokens=NEW, end_tokens=()).tokens for text in texts]
        for method in methods:
            variants = METHODS[method]
            options = variants[number % len(variants)] | {"page_size": (None, 7, 16)[number % 3]}
            found = generate(model, texts, method, max_new_tokens=NEW, end_tokens=(), **options).tokens
            yield method, count, sum(not torch.equal(a, b) for a, b in zip(found, greedy, strict=True))


SMOLLM2_METHODS: dict[str, dict[str, Any]] = {
    "jacobi": {"draft": "lookup"},
    "jacobi_multiblock": {"block_size": 8},
    "linear_self_speculation": {"block_size": 4},
    "quadratic_self_speculation": {"block_size": 2, "label_shift": 1, "in_group": "causal"},
}


def differences_on_smollm2(prompts: int, weights: str, seed: int = 0) -> Iterator[tuple[str, int, int]]:
    """The same on a real model. `seed` is the index of the first module, alphabetically, in the questions."""
    model = load("smollm2-135m-instruct", drafter="smollm2-drafter", packed=False, dtype=NUMBERS.get(weights))
    model = model if weights in NUMBERS else packed(model, weights)
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
    parser.add_argument(
        "--weights", nargs="+", default=[*NUMBERS, *PACKED], choices=[*NUMBERS, *PACKED], metavar="FORMAT"
    )
    parser.add_argument(
        "--to", type=Path, help="a JSON of counts, written after each format; methods that it has are skipped"
    )
    given = parser.parse_args()
    compare: Callable[..., Iterator[tuple[str, int, int]]] = differences_on_smollm2 if given.smollm2 else differences
    known = json.loads(given.to.read_text()) if given.to is not None and given.to.exists() else {}
    found: dict[str, dict[str, dict[str, Any]]] = known.get("weights", {})
    for weights in given.weights:
        before = found.setdefault(weights, {})
        counts: dict[str, dict[str, Any]] = {}
        missing = [method for method in METHODS if method not in before]
        if not missing and not given.smollm2:
            continue
        more = {} if given.smollm2 else {"methods": missing}
        for method, compared, wrong in compare(given.prompts, weights, **more):
            own = counts.setdefault(method, {"prompts": 0, "differ": 0, "machine": processor()})
            own["prompts"] += compared
            own["differ"] += wrong
        for method, own in counts.items():
            before[method] = own
            print(f"{weights:12} {method:28} {own['prompts']} prompts, {own['differ']} differ from greedy", flush=True)
        if given.to is not None and counts:
            facts = {"torch": torch.__version__, "python": platform.python_version()}
            unfinished = given.to.with_name(f"{given.to.name}.{os.getpid()}")
            unfinished.write_text(json.dumps(facts | {"new_tokens": NEW, "weights": found}, indent=1) + "\n")
            os.replace(unfinished, given.to)
    sys.exit(any(own["differ"] for counts in found.values() for own in counts.values()))


if __name__ == "__main__":
    main()
