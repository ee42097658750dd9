"""A denoising step in the shape of LLaDA-8B on a CPU, beside llama.cpp's diffusion example, from the same file of random weights.

    python -m bench.diffusion_step --peer-python PYTHON --example LIBRARY [--layers 2 6] [--threads 1] [--to bench/results/diffusion_step.json]

LIBRARY is a shared library of llama.cpp's examples/diffusion/diffusion.cpp, built against the libllama of PYTHON's llama-cpp-python. Files have
some of the 32 layers, all of the embedding and the head; what 32 layers take is computed from two sizes, since layers are alike. Prompt 64,
canvas 128. CPU time with one thread, wall-clock time with several; engines take turns, and minima are kept.

- "step": all masks of the canvas in `STEPS` steps of one block, a quarter each, so 80 candidates in the mean, with each sampler's own work.
- "head on N": a forward over all 192 rows and the choices at the last N positions. The example asks for all logits, whatever is masked.
- "products": each matrix of a layer by itself, and the head, with so many rows.
- "methods": ms a forward of whole canvases filled by each method with the same number of steps. Weights are random, so how many forwards a
  method saves is not measured here, but what one costs.

Started again, it keeps the smaller of two times.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import pdkernels as pd
from bench.cpu_processes import Worker, pythons
from bench.cpu_settings import SETTINGS
from bench.gguf_files import LLADA_MASK, random_llada
from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import processor
from pdkernels.ops.quantized_linear import quantized_linear

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results/diffusion_step.json"
EXAMPLE = "llama.cpp's diffusion example"
PROMPT, NEW, STEPS, LAYERS = 64, 128, 4, 32
MEAN = 80  # candidates of a step, of 128, 96, 64 and 32
HEADS = (1, 32, MEAN, 128, 192)
ROWS = (16, 32, 64, 128, 192)
ROUNDS = 3
FILLING = 25  # forwards of a method: a whole period of dLLM-Cache
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {}),
    "llada, blocks of 32": ("llada", {"block_size": 32}),
    "dllm_cache": ("dllm_cache", {"prompt_interval": 25, "gen_interval": 5, "transfer_ratio": 0.25}),
    "dllm_cache, blocks of 32": ("dllm_cache", {"prompt_interval": 25, "gen_interval": 5, "transfer_ratio": 0.25, "block_size": 32}),
    "dllm_cache, every second whole": ("dllm_cache", {"prompt_interval": 100, "gen_interval": 2, "transfer_ratio": 0.25}),
    "fast_dllm, prefix": ("fast_dllm", {"cache": "prefix", "block_size": 32, "threshold": None}),
    "fast_dllm, dual": ("fast_dllm", {"cache": "dual", "block_size": 32, "threshold": None}),
}  # fmt: skip

_SURE = "tau_min 0.97, tau_high 0.99, max_exploration 1, window 1"
_PLAIN = "llada"
_CACHED = "prompt_interval 100, gen_interval 2, transfer_ratio 0.25"
COMPARED = (
    ("`llada`, blocks", "llada, blocks of 32", "llada, block_size 16", "llada, block_size 16"),
    ("`dllm_cache`", "dllm_cache", "dllm_cache", _PLAIN),
    ("`slowfast`, high thresholds", "llada", f"slowfast, {_SURE}", _PLAIN),
    ("`slowfast` with a cache", "dllm_cache, every second whole", f"slowfast, {_SURE}, {_CACHED}", _PLAIN),
    ("`fast_dllm`, prefix", "fast_dllm, prefix", "fast_dllm, block_size 16, cache prefix, threshold 0.97", "llada, block_size 16"),
    ("`fast_dllm`, dual", "fast_dllm, dual", "fast_dllm, block_size 16, cache dual, threshold 0.97", "llada, block_size 16"),
)  # fmt: skip
"""A title, whose forwards it has in this shape, and its row in the evaluation with the plain sampler's."""


def prompt() -> list[int]:
    return torch.randint(0, 126000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()


def engines(file: Path, threads: int, given: argparse.Namespace) -> dict[str, Worker]:
    python = pythons(given.peer_python)
    spec = {"file": str(file), "threads": threads}
    running = {"pdkernels": Worker(python["pdkernels"], spec | {"engine": "pdkernels"})}
    if given.example is not None:
        for name, setting in SETTINGS["llama.cpp"].items():
            own = spec | {"engine": EXAMPLE, "setting": setting, "built": str(given.example)}
            running[f"{EXAMPLE}, {name}"] = Worker(python["llama.cpp"], own)
    return running


def compare(file: Path, threads: int, given: argparse.Namespace, builds: dict[str, str]) -> dict[str, dict[str, float]]:
    """ms of each cell by engine."""
    running, found = engines(file, threads, given), dict[str, dict[str, float]]()
    canvas = [*prompt(), *[LLADA_MASK] * NEW]
    cells: dict[str, list[Any]] = {"step": ["denoise", prompt(), NEW, STEPS, LLADA_MASK]}
    cells |= {f"head on {rows}": ["canvas", canvas, rows] for rows in HEADS}
    try:
        builds |= {name: worker("about") for name, worker in running.items()}
        for cell, told in ((name, cells[name]) for name in given.cells):
            minima = found.setdefault(cell, {})
            for _ in range(given.rounds):
                for name, worker in running.items():
                    told_back = worker(*told)
                    took = told_back[0] if isinstance(told_back, list) else told_back
                    minima[name] = min(took, minima.get(name, took))
    finally:
        for worker in running.values():
            worker.end()
    return found


def least(run: Callable[[], Any], rounds: int) -> float:
    """ms of this thread."""
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        run()
        found.append(1e3 * (time.thread_time() - start))
    return min(found)


def products(model: Any, rounds: int) -> dict[str, dict[str, float]]:
    """ms of each matrix of a layer and of the head's statistics, by rows, and its weights in millions under "millions"."""
    layer, found = model.layers[0], {}
    matrices = {name: getattr(layer, name) for name in ("qkv", "output", "gate_up", "down")}
    for name, matrix in {**matrices, "head": model.head}.items():
        outputs, width = matrix.shape
        x = torch.randn(max(ROWS), width)
        run = model.statistics if name == "head" else lambda rows, own=matrix: quantized_linear(rows, own)
        found[name] = {"millions": outputs * width / 1e6, "megabytes": matrix.nbytes / 1e6}
        found[name] |= {str(rows): least(lambda run=run, some=x[:rows]: run(some), rounds) for rows in ROWS}
    return found


def methods(model: Any, names: list[str]) -> dict[str, dict[str, float]]:
    """Forwards of each method over the whole canvas, and ms each."""
    found = {}
    for name in names:
        method, options = METHODS[name]
        blocks = NEW // options.get("block_size", NEW)
        steps = FILLING // blocks * blocks
        start = time.thread_time()
        result = pd.decoding.generate(
            model, prompt(), method, max_new_tokens=NEW, end_tokens=(), mask_token=LLADA_MASK, steps=steps, **options
        )
        took, forwards = 1e3 * (time.thread_time() - start), result.stats.forwards
        found[name] = {"forwards": forwards, "ms": took / forwards}
    return found


def take_minima(kept: dict[str, dict[str, float]], new: dict[str, dict[str, float]]) -> None:
    """Takes over what is new or less."""
    for name, by_rows in new.items():
        own = kept.setdefault(name, {})
        own |= {rows: min(round(took, 2), own.get(rows, math.inf)) for rows, took in by_rows.items()}


def peak() -> dict[str, float] | None:
    """The clock, and products of bytes a second, of one thread; None without a compiler or AVX-512."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        flags = ["-O3", "-funroll-all-loops", "-mavx512f", "-mavx512vnni"]
        subprocess.run([compiler, *flags, str(HERE / "vnni_peak.c"), "-o", str(program)], check=True)
        done = subprocess.run([str(program)], capture_output=True, text=True)
    found: dict[str, float] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return found


def at_all_layers(by_layers: dict[str, float]) -> float:
    """What 32 layers take, from what two numbers of layers take.

    >>> at_all_layers({"2": 10.0, "6": 14.0})
    40.0
    """
    (few, first), (more, second) = ((int(count), took) for count, took in by_layers.items())
    return first + (LAYERS - few) * (second - first) / (more - few)


Found = dict[str, Any]


def steps_table(found: Found) -> str:
    """Ours and the example's, in 32 layers."""
    lines = []
    for threads, cells in found["cells"].items():
        by_engine = {name: at_all_layers(times) for name, times in cells["step"].items()}
        own = by_engine.pop("pdkernels")
        name, best = min(by_engine.items(), key=lambda pair: pair[1])
        lines.append(
            [threads, f"{own / 1e3:.2f}", f"{best / 1e3:.2f}", name.partition(", ")[2], f"**{best / own:.2f}x**"]
        )
    head = [
        "threads",
        "pdkernels, s a step",
        "llama.cpp's example, s a step",
        "its faster setting",
        "its time over ours",
    ]
    return f"{table(head, lines)}\n\n{_where(found)}"


def parts_table(found: Found) -> str:
    """Where a step of one thread goes, and the least that its products and bytes could take."""
    parts, peak = found["products"], found["peak"]
    step = at_all_layers(found["cells"]["1"]["step"]["pdkernels"])
    layers, rows = [part for name, part in parts.items() if name != "head"], str(PROMPT + NEW)
    products = LAYERS * sum(part[rows] for part in layers)
    low, high = ROWS[ROWS.index(128) - 1], 128  # of the head, whose rows are 80 in the mean
    head = parts["head"][str(low)] + (MEAN - low) / (high - low) * (parts["head"][str(high)] - parts["head"][str(low)])
    floors = [
        LAYERS * sum(part["millions"] for part in layers) * (PROMPT + NEW) / peak["gmacs"],
        parts["head"]["millions"] * MEAN / peak["gmacs"],
    ]
    lines = [
        [name, f"{took / 1e3:.2f}", f"{took / step:.0%}", least]
        for name, took, least in (
            ("products of 32 layers, 192 rows", products, f"{floors[0] / 1e3:.2f}"),
            (f"head and choices, {MEAN} rows", head, f"{floors[1] / 1e3:.2f}"),
            ("attention, norms, sampler and the rest", step - products - head, "-"),
            ("a step", step, f"{sum(floors) / 1e3:.2f}"),
        )
    ]
    size = (LAYERS * sum(part["megabytes"] for part in layers) + parts["head"]["megabytes"]) / 1e3
    words = f"least: {peak['gmacs']:.0f} G products of bytes a second at {peak['ghz']:.2f} GHz; the weights are {size:.1f} GB"
    return f"{table(['one thread', 's', 'share', 'least'], lines)}\n\n{words}; {_where(found)}"


def methods_table(found: Found) -> str:
    """What a forward of a method costs in this shape, and how many it saves on tiny-masked."""
    evaluated = {
        bench["name"].removeprefix("tiny-masked: "): bench["extra_info"]
        for bench in json.loads((HERE / "results/cpu/evaluation_masked.json").read_text())["benchmarks"]
    }
    whole = at_all_layers(found["methods"]["llada"]["ms"])
    lines = []
    for title, cost, evaluation, base in COMPARED:
        own, plain = evaluated[evaluation], evaluated[base]
        cheaper = whole / at_all_layers(found["methods"][cost]["ms"])
        fewer = own["tokens_per_forward"] / plain["tokens_per_forward"]
        right = f"{own['right']} ({plain['right']})"
        lines.append(
            [
                title,
                f"{whole / cheaper / 1e3:.2f}",
                f"{cheaper:.2f}x",
                f"{fewer:.2f}x",
                right,
                f"**{cheaper * fewer:.1f}x**",
            ]
        )
    head = [
        "",
        "s a forward, 32 layers",
        "cheaper forwards",
        "fewer forwards, tiny-masked",
        "right of 100 (plain)",
        "both",
    ]
    return f"{table(head, lines)}\n\n{_where(found)}"


def _where(found: Found) -> str:
    layers = sorted(
        {int(n) for by_engine in found["cells"]["1"].values() for times in by_engine.values() for n in times}
    )
    words = f"LLaDA-8B's shape in Q4_0, prompt {PROMPT}, canvas {NEW}, random weights"
    return f"{words}, from {' and '.join(map(str, layers))} of 32 layers; {found['machine']}, torch {found['torch']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.diffusion_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", nargs="*", default=[], metavar="PYTHON", help="other environments' Pythons")
    parser.add_argument("--example", type=Path, metavar="LIBRARY", help="llama.cpp's diffusion.cpp as a shared library")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--cells", nargs="+", default=["step", *(f"head on {rows}" for rows in HEADS)])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--parts", nargs="+", default=["steps", "products", "methods"], help="what is measured anew")
    parser.add_argument("--folder", type=Path, help="where the files of weights are kept")
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    found: dict[str, Any] = json.loads(given.to.read_text()) if given.to.exists() else {}
    facts = {"machine": processor(), "torch": torch.__version__, "prompt": PROMPT, "canvas": NEW, "steps": STEPS}
    found |= facts
    found.setdefault("builds", {})
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        files = {}
        for layers in given.layers:
            path = folder / f"random-llada-{layers}-Q4_0.gguf"
            files[layers] = path if path.exists() else random_llada(layers, "Q4_0", folder)
        for threads in given.threads if "steps" in given.parts else []:
            cells = found.setdefault("cells", {}).setdefault(str(threads), {})
            for layers, file in files.items():
                for cell, by_engine in compare(file, threads, given, found["builds"]).items():
                    for engine, took in by_engine.items():
                        kept = cells.setdefault(cell, {}).setdefault(engine, {})
                        kept[str(layers)] = min(round(took, 2), kept.get(str(layers), math.inf))
                    Console().print(layers, threads, cell, by_engine)
                write(given.to, found)
        torch.set_num_threads(1)
        with torch.inference_mode():
            if "products" in given.parts:
                found["peak"] = peak()
                take_minima(
                    found.setdefault("products", {}), products(pd.models.load(files[given.layers[0]]), given.rounds)
                )
                write(given.to, found)
            if "methods" in given.parts:
                own = found.setdefault("methods", {})
                for layers, file in files.items():
                    for name, row in methods(pd.models.load(file), given.methods).items():
                        Console().print(layers, name, row)
                        kept = own.setdefault(name, {"forwards": row["forwards"], "ms": {}})
                        kept["ms"][str(layers)] = min(round(row["ms"], 2), kept["ms"].get(str(layers), math.inf))
                write(given.to, found)


if __name__ == "__main__":
    main()
