"""What narrower KV caches cost and save: `python -m bench.cache_dtypes`.

Forwards of SmolLM2-135M over one row and over eight, after random rows of K and V: in bf16 on caches of 8 bits, and packed, as published,
on caches of 16 and 8 bits beside float32.
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
PACKED = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


def after(model: Any, length: int, dtype: torch.dtype) -> Any:
    """A cache with so many committed rows."""
    cache = model.new_cache(1, length + max(ROWS), dtype=dtype)
    shape = 1, length, cache.kv_heads, cache.head_dim
    for layer in range(cache.layers):
        cache.append_(layer, *(torch.randn(shape).to(model.dtype) for _ in range(2)))
    cache.commit_(torch.tensor([length]))
    return cache


def forwards(model: Any, dtypes: dict[str, torch.dtype], rounds: int) -> list[dict[str, Any]]:
    """The minimum CPU time of a forward in ms, and the bytes of the cache; the caches take turns."""
    found = []
    for length in LENGTHS:
        caches = {name: after(model, length, dtype) for name, dtype in dtypes.items()}
        for rows in ROWS:
            tokens, times = torch.arange(rows)[None], {name: list[float]() for name in caches}
            for _ in range(rounds):
                for name, cache in caches.items():
                    times[name].append(seconds(lambda cache=cache, tokens=tokens: model(tokens, cache=cache)))
            for name, cache in caches.items():
                own = {"ms": round(1000 * min(times[name]), 2), "bytes": cache.k.nbytes + cache.v.nbytes}
                found.append({"length": length, "rows": rows, "dtype": name, **own})
    return found


def measured(rounds: int = 30) -> dict[str, Any]:
    """`forwards` of the model in bf16, and packed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record: dict[str, Any] = {"rounds": rounds, "processor": processor(), "model": MODEL}
    with torch.inference_mode():
        record["forwards"] = forwards(pd.models.load(MODEL, dtype=torch.bfloat16, packed=False), DTYPES, rounds)
        record["packed"] = forwards(pd.models.load(MODEL, packed=True), PACKED, rounds)
    return record


def table(found: dict[str, Any], key: str, dtypes: dict[str, torch.dtype]) -> str:
    """A row for each length and number of rows; each narrower dtype beside the first."""
    first, *others = dtypes
    heads = [f"{first} | " + " | ".join(others), *(f"{name} / {first}" for name in others), f"cache in {first}"]
    heads += [f"in {name}" for name in others]
    lines = ["| cached tokens | rows | " + " | ".join(heads) + " |", "|" + " ---: |" * (2 + 3 * len(dtypes) - 1)]
    by = {(one["length"], one["rows"], one["dtype"]): one for one in found[key]}
    for length, rows in dict.fromkeys((one["length"], one["rows"]) for one in found[key]):
        cells = {name: by[length, rows, name] for name in dtypes}
        times = [f"{cell['ms']:.1f} ms" for cell in cells.values()]
        ratios = [f"{cells[name]['ms'] / cells[first]['ms']:.2f}" for name in others]
        sizes = [f"{cell['bytes'] / 1e6:.1f} MB" for cell in cells.values()]
        lines.append(f"| {length:,} | {rows} | " + " | ".join([*times, *ratios, *sizes]) + " |")
    form = "packed as published" if key == "packed" else "bf16"
    facts = (
        f"{found['model']}, {form}, CPU time of a forward, minimum of {found['rounds']}; {found['processor']}, 1 thread"
    )
    return "\n".join([*lines, "", facts])


def markdown(found: dict[str, Any]) -> str:
    """The table of the model in bf16."""
    return table(found, "forwards", DTYPES)


def packed_markdown(found: dict[str, Any]) -> str:
    """The table of the packed model."""
    return table(found, "packed", PACKED)


if __name__ == "__main__":
    result = measured()
    write(RESULT, result)
    print(markdown(result), packed_markdown(result), sep="\n\n")
