"""Layers with windows: memory of a text, and the cost of a step whose layers have several page tables.
`python -m bench.windows [--memory]`.

Memory is that of caches made here, in the shapes of published models, without their weights. Steps are those of SmolLM2's
shape (135M) with random weights, whose even layers have a window of 512: on a cache that keeps all rows, and on one as an
engine has it. They take turns, and the least CPU time of many counts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pdkernels as pd
from bench.bench_adapters import WEIGHTS
from bench.gpu_report import table
from bench.records import write
from pdkernels.cache import ContiguousKVCache, PooledWindowedCache, WindowedCache, WindowedPool
from pdkernels.engine.pages import _DRAFT, PAGE
from pdkernels.evaluation.machine import processor
from pdkernels.models.architectures.windows import Window

RESULTS = Path(__file__).resolve().parent / "results/windows.json"
_SHAPE: dict[str, Any] = {"vocab_size": 49152, "hidden_size": 576, "layers": 30, "heads": 9, "kv_heads": 3}
_SHAPE |= {"head_dim": 64, "intermediate_size": 1536}
_WINDOW, _REPEATS = 512, 15
_SMALL = 16
"""Tokens of a page, and of a draft, of caches of `generate`."""


class Shape(NamedTuple):
    """What of a model decides its cache."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int
    every: int
    """Each layer of this number sees all."""

    @property
    def windows(self) -> list[int | None]:
        return [None if (layer + 1) % self.every == 0 else self.window for layer in range(self.layers)]

    def nbytes(self, rows: int, layers: int) -> int:
        """Of K and V in bf16."""
        return rows * layers * self.kv_heads * self.head_dim * 2 * 2


MODELS = {
    "gpt-oss-20b": (Shape(24, 8, 64, 128, 2), 32768),
    "Gemma 3 270M": (Shape(18, 1, 256, 512, 6), 32768),
    "OLMo 3 7B": (Shape(32, 32, 128, 4096, 4), 65536),
}


def alone(shape: Shape, text: int) -> dict[str, int]:
    """Rows of a layer with a window in a paged cache of `generate`, and bytes of both kinds of caches: as they are made,
    of heads with 16 elements, and then in the shape of the model."""
    cache = WindowedCache(shape.windows, 1, text, _SMALL, 1, 16, drafts=_SMALL)
    with_window = len(shape.windows) - shape.windows.count(None)
    rows = cache.turning[shape.window].pages * _SMALL
    kept = shape.nbytes(rows, with_window) + shape.nbytes(text, shape.windows.count(None))
    return {"text": text, "rows": rows, "all": shape.nbytes(text, shape.layers), "kept": kept}


def contiguous(shape: Shape, text: int) -> dict[str, int]:
    """Rows of a layer with a window in a cache of `generate` without pages, and bytes of a cache that keeps all rows and of
    this one, as they are made."""
    sizes, dtype = (shape.kv_heads, shape.head_dim), torch.bfloat16
    whole = ContiguousKVCache(shape.layers, 1, text, *sizes, dtype=dtype)
    cache = WindowedCache(shape.windows, 1, text, None, *sizes, drafts=_SMALL, dtype=dtype)
    pages = cache.turning[shape.window]
    kept = sum(part.k.nbytes + part.v.nbytes for part in cache.parts)
    rows = pages.pages * pages.page_size
    return {"text": text, "rows": rows, "all": whole.k.nbytes + whole.v.nbytes, "kept": kept}


def in_engine(shape: Shape, text: int) -> dict[str, int]:
    """Pages of a group that a request is promised, the most that one held as its text grew, and bytes."""
    count = text // PAGE
    pool = WindowedPool(shape.windows, count, {shape.window: count}, PAGE, 1, 16)
    cache = PooledWindowedCache(pool, 1, text)
    cache.reserve_drafts_(_DRAFT)
    promised, most = cache.need(text)[shape.window], 0
    for length in range(0, text - cache.piece + 1, _DRAFT):
        cache.slide_(0, length, length + (cache.piece if length % cache.piece == 0 else _DRAFT))
        group = pool.groups[shape.window]
        most = max(most, group.num_pages - group.available)
    assert most <= promised, (most, promised)
    full = shape.windows.count(None)
    taken = shape.nbytes(count * PAGE, full) + shape.nbytes(promised * PAGE, shape.layers - full)
    return {"text": text, "pages": promised, "most": most, "all": shape.nbytes(text, shape.layers), "kept": taken}


def _caches(model: Any, batch: int, length: int) -> dict[str, Any]:
    """Sequences that have begun, on either kind of cache."""
    capacity = length + PAGE
    whole = model.new_cache(batch, capacity, kind="paged", page_size=PAGE)
    whole.reserve_([capacity] * batch)
    pages = batch * (capacity // PAGE + 2)
    pooled = model.new_cache(batch, capacity, pool=model.new_pool(pages, PAGE, window_pages={_WINDOW: pages}))
    for row in range(batch):
        pooled.resize_row_(row, capacity)
        pooled.slide_(row, 0, length)
    tokens = torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(0))
    for cache in (whole, pooled):
        model(tokens, cache=cache, rows=[0])
        cache.commit_(torch.full((batch,), length))
    for row in range(batch):
        pooled.slide_(row, length, length + 1)
    return {"one table": whole, "several": pooled}


def steps(weights: str, batch: int, length: int) -> dict[str, float]:
    """Milliseconds of CPU time of a step on either cache, which gives the same bits, and layer by layer."""
    torch.manual_seed(0)
    windows = tuple(Window(_WINDOW) if layer % 2 == 0 else None for layer in range(_SHAPE["layers"]))
    config = pd.models.TransformerConfig(**_SHAPE, windows=windows)
    model = pd.models.Transformer(config).requires_grad_(False).to(WEIGHTS[weights])
    model = pd.quantize(model, weights) if weights == "q4_0" else model
    caches, token = _caches(model, batch, length), torch.ones(batch, 1, dtype=torch.int64)
    first, second = (model(token, cache=cache) for cache in caches.values())
    assert torch.equal(first, second)
    runs = {**{name: (cache, "1") for name, cache in caches.items()}, "one by one": (caches["several"], "0")}
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(_REPEATS):
        for name, (cache, whole) in runs.items():
            os.environ["PDKERNELS_WHOLE_STEP"] = whole
            begun = time.thread_time()
            model(token, cache=cache)
            least[name] = min(least[name], 1000 * (time.thread_time() - begun))
    del os.environ["PDKERNELS_WHOLE_STEP"]
    return {"batch": batch, "length": length, **{name: round(ms, 3) for name, ms in least.items()}}


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def alone_table(found: dict[str, Any]) -> str:
    """Of caches of `generate`."""
    head = ["model", "bytes of a row, all layers", "layers with a window", "text", "all rows", "rows that can be seen"]
    lines = []
    for name, (shape, _) in MODELS.items():
        row = found["alone"][name]
        some = len(shape.windows) - shape.windows.count(None)
        each = f"{shape.layers} x {shape.nbytes(1, 1):,}"
        kept = f"{some} of {shape.window:,}, {row['rows']:,} rows kept"
        lines.append([name, each, kept, f"{row['text']:,}", _size(row["all"]), _size(row["kept"])])
    return table(head, lines)


def contiguous_table(found: dict[str, Any]) -> str:
    """Of caches of `generate` without pages."""
    lines = [
        [f"{name}, {row['rows']:,} rows kept", f"{row['text']:,}", _size(row["all"]), _size(row["kept"])]
        for name, rows in found["contiguous"].items()
        for row in rows
    ]
    return table(["model", "text", "all rows", "rows that can be seen"], lines)


def engine_table(found: dict[str, Any]) -> str:
    """Of a request in an engine."""
    lines = []
    for name, rows in found["engine"].items():
        shape = MODELS[name][0]
        some = shape.layers - shape.windows.count(None)
        for row in rows:
            label = f"{name}, {row['pages']} pages of {some} layers"
            ratio = f"{row['all'] / row['kept']:.1f}"
            lines.append([label, f"{row['text']:,}", _size(row["all"]), _size(row["kept"]), ratio])
    return table(["model", "text", "all rows", "in an engine", "requests in the memory of one"], lines)


def steps_table(found: dict[str, Any]) -> str:
    """Times of steps."""
    lines = [
        [weights, str(row["batch"]), f"{row['length']:,}", f"{row['one table']:.2f} ms",
         *(f"{row[name]:.2f} ms, {row[name] / row['one table']:.2f}" for name in ("several", "one by one"))]
        for weights, rows in found["steps"].items()
        for row in rows
    ]  # fmt: skip
    head = ["weights", "sequences", "after", "all rows", "several tables", "layer by layer"]
    return f"{table(head, lines)}\n\nLeast CPU time of {found['repeats']}, one thread; {found['machine']}, torch {found['torch']}"


def main() -> None:
    """Writes the file; with `--memory` that part alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true", help="leave the times as they are")
    only_memory = parser.parse_args().memory
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"steps": {}}
    found |= {"machine": processor(), "torch": torch.__version__, "repeats": _REPEATS}
    found["alone"] = {name: alone(shape, text) for name, (shape, text) in MODELS.items()}
    requests = ("gpt-oss-20b", "Gemma 3 270M")
    found["contiguous"] = {name: [contiguous(MODELS[name][0], text) for text in (4096, 16384)] for name in requests}
    found["engine"] = {name: [in_engine(MODELS[name][0], text) for text in (4096, 32768)] for name in requests}
    with torch.inference_mode():
        for weights in WEIGHTS if not only_memory else ():
            found["steps"][weights] = [steps(weights, *sizes) for sizes in ((1, 64), (8, 64), (1, 1024))]
    write(RESULTS, found)
    print(alone_table(found), contiguous_table(found), engine_table(found), steps_table(found), sep="\n\n")


if __name__ == "__main__":
    main()
