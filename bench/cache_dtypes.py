"""What a KV cache of 8 bits costs and saves beside one in bf16: `python -m bench.cache_dtypes`.

Forwards of SmolLM2-135M in bf16 over one row and over eight, after random rows of K and V.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import pdkernels as pd
from bench.bench_grouped_linear import seconds
from bench.records import write
from pdkernels.evaluation.machine import processor

RESULT = Path(__file__).parent / "results/cache_dtypes.json"
MODEL = "smollm2-135m-instruct"
LENGTHS, ROWS = (1024, 4096), (1, 8)
DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}


def after(model: Any, length: int, dtype: torch.dtype) -> Any:
    """A cache with so many committed rows."""
    cache = model.new_cache(1, length + max(ROWS), dtype=dtype)
    shape = 1, length, cache.kv_heads, cache.head_dim
    for layer in range(cache.layers):
        cache.append_(layer, *(torch.randn(shape).to(model.dtype) for _ in range(2)))
    cache.commit_(torch.tensor([length]))
    return cache


def measured(rounds: int = 30) -> dict[str, Any]:
    """The minimum CPU time of a forward in ms, and the bytes of the cache; the caches take turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = pd.models.load(MODEL, dtype=torch.bfloat16, packed=False)
    found = []
    with torch.inference_mode():
        for length in LENGTHS:
            caches = {name: after(model, length, dtype) for name, dtype in DTYPES.items()}
            for rows in ROWS:
                tokens, times = torch.arange(rows)[None], {name: list[float]() for name in caches}
                for _ in range(rounds):
                    for name, cache in caches.items():
                        times[name].append(seconds(lambda cache=cache, tokens=tokens: model(tokens, cache=cache)))
                for name, cache in caches.items():
                    own = {"ms": round(1000 * min(times[name]), 2), "bytes": cache.k.nbytes + cache.v.nbytes}
                    found.append({"length": length, "rows": rows, "dtype": name, **own})
    return {"rounds": rounds, "processor": processor(), "model": MODEL, "forwards": found}


def markdown(found: dict[str, Any]) -> str:
    """A row for each length and number of rows."""
    lines = ["| cached tokens | rows | bf16 | int8 | int8 / bf16 | cache in bf16 | in int8 |", "|" + " ---: |" * 7]
    by = {(one["length"], one["rows"], one["dtype"]): one for one in found["forwards"]}
    for length, rows in dict.fromkeys((one["length"], one["rows"]) for one in found["forwards"]):
        wide, narrow = (by[length, rows, name] for name in DTYPES)
        times = f"{wide['ms']:.1f} ms | {narrow['ms']:.1f} ms | {narrow['ms'] / wide['ms']:.2f}"
        sizes = f"{wide['bytes'] / 1e6:.1f} MB | {narrow['bytes'] / 1e6:.1f} MB"
        lines.append(f"| {length:,} | {rows} | {times} | {sizes} |")
    facts = f"{found['model']}, CPU time of a forward, minimum of {found['rounds']}; {found['processor']}, 1 thread"
    return "\n".join([*lines, "", facts])


if __name__ == "__main__":
    result = measured()
    write(RESULT, result)
    print(markdown(result))
