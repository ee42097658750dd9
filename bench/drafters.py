"""Methods with drafts, against token by token: the same tokens, forwards, and seconds of one quiet machine.

    python -m bench.drafters --drafter smollm2-eagle --questions 50 --json drafters.json
    python -m bench.drafters --drafter smollm2-eagle --about anything --tokens 128 --json drafters_anything.json

The questions are held-out ones about Python's standard library, like those that drafters were trained on, or about anything, with nothing
to quote in them. Questions take turns with methods, so that other load on the machine affects all alike; each pair runs `--repeats`
times and the minimum time counts. Times of a busy machine are worthless: run nothing else, or count the processor time of one thread
(`--threads 1 --clock process_time`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

import pdkernels as pd
from bench.records import write
from pdkernels.evaluation.machine import facts

BASELINE = "autoregressive"


ANYTHING = (
    "Tell me about the history of tea.",
    "Why is the sky blue?",
    "How do I learn to swim as an adult?",
    "What should I see in Lisbon on a rainy day?",
    "Write a short poem about autumn.",
    "Explain inflation to a child.",
    "What are good habits for sleeping well?",
    "Describe a lighthouse at night.",
)


def methods(heads: Collection[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """By label, the method and its options. `heads`: the methods of the drafters."""
    found: dict[str, tuple[str, dict[str, Any]]] = {BASELINE: (BASELINE, {})}
    for size in (8, "auto"):
        found[f"lookup, {size}"] = ("jacobi", {"draft": "lookup", "block_size": size})
        found[f"suffix, {size}"] = ("suffix", {"block_size": size})
    for head in heads:
        for size in (2, 3, 4, 5, "auto"):
            found[f"{head}, {size}"] = (head, {"block_size": size})
    for branches, nodes in ((2, 6), (3, 10)) if "eagle" in heads else ():
        found[f"eagle, {nodes} nodes"] = ("eagle", {"block_size": 4, "branches": branches, "nodes": nodes})
    return found


def run(
    model: Any,
    prompts: list[list[int]],
    limit: int,
    repeats: int,
    only: list[str] | None = None,
    clock: Any = time.perf_counter,
) -> dict[str, dict[str, Any]]:
    """Tokens, forwards, equal answers and seconds of every method."""
    chosen = methods(getattr(model, "drafters", None) or ())
    chosen = {label: one for label, one in chosen.items() if not only or label in (BASELINE, *only)}
    rows: dict[str, dict[str, Any]] = {
        label: {"tokens": 0, "forwards": 0, "equal": 0, "seconds": 0.0, "slowest": 0.0, "at": 0} for label in chosen
    }
    for number, prompt in enumerate(prompts):
        fastest = dict.fromkeys(chosen, float("inf"))
        found: dict[str, Any] = {}
        for _ in range(repeats):
            for label, (method, options) in chosen.items():
                started = clock()
                found[label] = pd.decoding.generate(
                    model, prompt, pd.decoding.find(method), max_new_tokens=limit, **options
                )
                fastest[label] = min(fastest[label], clock() - started)
        for label, result in found.items():
            row = rows[label]
            row["tokens"] += result.stats.tokens
            row["forwards"] += result.stats.forwards
            row["equal"] += torch.equal(result.tokens, found[BASELINE].tokens)
            row["seconds"] += fastest[label]
            slower = fastest[label] / fastest[BASELINE]
            if slower > row["slowest"]:
                row["slowest"], row["at"] = slower, number
    return rows


def table(rows: dict[str, dict[str, Any]], questions: int) -> str:
    lines = [f"{'method':<18}{'tokens a forward':>17}{'equal':>9}{'tokens/s':>10}{'speed':>8}{'worst question':>16}"]
    base = rows[BASELINE]["seconds"]
    for label, row in rows.items():
        lines.append(
            f"{label:<18}{row['tokens'] / row['forwards']:>17.2f}{row['equal']:>5}/{questions:<3}"
            f"{row['tokens'] / row['seconds']:>10.1f}{base / row['seconds']:>7.2f}x{1 / row['slowest']:>15.2f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", nargs="*", default=[], help="names or folders of EAGLE-3 and DFlash heads")
    parser.add_argument("--about", choices=("python", "anything"), default="python")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--packed", help="format that the head's matrices are quantised to, such as int8")
    parser.add_argument("--only", nargs="+", help="rows of the table, beside token by token", metavar="LABEL")
    parser.add_argument("--clock", choices=("perf_counter", "process_time"), default="perf_counter")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from smollm2_texts import prompts

    model: Any = pd.models.load(given.model)
    heads = [pd.models.load_drafter(name, model) for name in given.drafter]
    packed = [head if given.packed is None else head.quantized(given.packed) for head in heads]
    model.drafters = {head.method: head for head in packed}
    if given.about == "python":
        asked = prompts(model, given.questions, 160, 0, held_out=True)
    else:
        asked = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ANYTHING]
        given.questions = len(asked)
    rows = run(model, asked, given.tokens, given.repeats, given.only, getattr(time, given.clock))
    print(table(rows, len(asked)))
    if given.json is not None:
        settings = {name: str(value) for name, value in vars(given).items() if name != "json"}
        write(given.json, {"machine": facts(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
