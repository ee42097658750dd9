"""A step of eight sequences with eight adapters beside a step without any: `python -m bench.bench_adapters`.

The model has SmolLM2's shape (135M) and random weights, each adapter rank 16. Steps take turns, and the least CPU time
of many counts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import pdkernels as pd
from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import processor
from pdkernels.models.architectures.lora import LoraAdapter, LoraPair

RESULTS = Path(__file__).resolve().parent / "results/adapters.json"
_BATCH, _RANK, _LENGTH, _REPEATS = 8, 16, 64, 25
_SHAPE: dict[str, int] = {"vocab_size": 49152, "hidden_size": 576, "layers": 30, "heads": 9, "kv_heads": 3}
_SHAPE |= {"head_dim": 64, "intermediate_size": 1536}
_QUERY, _KEY = 576, 192
_PARTS = {
    "q": ("qkv", 0, _QUERY, 576),
    "k": ("qkv", _QUERY, _KEY, 576),
    "v": ("qkv", _QUERY + _KEY, _KEY, 576),
    "o": ("output", 0, 576, 576),
    "gate": ("gate_up", 0, 1536, 576),
    "up": ("gate_up", 1536, 1536, 576),
    "down": ("down", 0, 576, 1536),
}
"""Of each projection: our matrix, its first output there, outputs and width."""
MODULES = {"q, v": ("q", "v"), "all": tuple(_PARTS)}
WEIGHTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "q4_0": torch.float32}


def random_adapter(name: str, modules: tuple[str, ...], dtype: torch.dtype) -> LoraAdapter:
    """With these projections in every layer."""
    layers = []
    for _ in range(_SHAPE["layers"]):
        pairs: dict[str, list[LoraPair]] = {}
        for module in modules:
            matrix, first, outputs, width = _PARTS[module]
            a, b = (torch.randn(shape).mul(0.02).to(dtype) for shape in ((_RANK, width), (_RANK, outputs)))
            pairs.setdefault(matrix, []).append(LoraPair(first, a, b))
        layers.append(pairs)
    return LoraAdapter(name, layers)


def random_model(weights: str) -> Any:
    """A model of the shape."""
    torch.manual_seed(0)
    config = pd.models.TransformerConfig(**_SHAPE, tied_head=True)
    model = pd.models.Transformer(config).requires_grad_(False).to(WEIGHTS[weights])
    return pd.quantize(model, weights) if weights == "q4_0" else model


def cache_with(model: Any, adapters: list[LoraAdapter]) -> Any:
    """A cache of sequences that have begun."""
    cache = model.new_cache(_BATCH, _LENGTH + 8)
    cache.adapt_(adapters)
    model(torch.ones(_BATCH, _LENGTH, dtype=torch.int64), cache=cache, rows=[0])
    cache.commit_(torch.full((_BATCH,), _LENGTH))
    return cache


def least_times(weights: str, adapters: dict[str, list[LoraAdapter]]) -> dict[str, float]:
    """Milliseconds of CPU time of a step with each of the lists, none of which is committed."""
    model = random_model(weights)
    caches = {name: cache_with(model, listed) for name, listed in adapters.items()}
    tokens, least = torch.ones(_BATCH, 1, dtype=torch.int64), dict.fromkeys(caches, float("inf"))
    for _ in range(_REPEATS):
        for name, cache in caches.items():
            begun = time.process_time()
            model(tokens, cache=cache)
            least[name] = min(least[name], 1000 * (time.process_time() - begun))
    return least


def table_of(found: dict[str, Any]) -> str:
    """The table of the docs: times of a step without adapters, and multiples of them."""
    lines = []
    for weights, times in found["ms"].items():
        cells = [f"{times['none']:.1f} ms"]
        for name in MODULES:
            ratios = {label: times[label] / times["none"] for label in times if label.startswith(f"{name}, ")}
            cells.append(
                ", ".join(f"{ratio:.2f} ({label.removeprefix(f'{name}, ')})" for label, ratio in ratios.items())
            )
        lines.append([weights, *cells])
    words = f"Least CPU time of {found['repeats']}, one thread; {found['machine']}, torch {found['torch']}"
    return f"{table(['weights', 'without', *(f'pairs for {name}' for name in MODULES)], lines)}\n\n{words}"


def main() -> None:
    """Writes the times."""
    found: dict[str, Any] = {"machine": processor(), "torch": torch.__version__, "repeats": _REPEATS, "ms": {}}
    with torch.inference_mode():
        for weights, dtype in WEIGHTS.items():
            adapters: dict[str, list[LoraAdapter]] = {"none": []}
            for name, modules in MODULES.items():
                for short in dict.fromkeys((dtype, torch.bfloat16)):
                    label = f"{name}, {str(short).removeprefix('torch.')}"
                    adapters[label] = [random_adapter(str(n), modules, short) for n in range(_BATCH)]
            found["ms"][weights] = {name: round(ms, 2) for name, ms in least_times(weights, adapters).items()}
    write(RESULTS, found)
    print(table_of(found))


if __name__ == "__main__":
    main()
