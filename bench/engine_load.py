"""Clients at once: how many tokens a second an engine gives them together, and when the first of each comes.

    python -m bench.engine_load [--peer-python PYTHON ...] [--ik-llama BUILD] [--clients 1 8 32] [--rounds 5] [--to bench/results/engine_load.json]

`pd.Engine`, llama.cpp and ik_llama.cpp run in processes of their own with the same GGUF file, and take turns, with each
of their settings. Each client asks one question, all questions arrive together, and answers are greedy and equally long.
All are driven as their servers batch: all prompts in one pass, then a token of every sequence in each.

Times are CPU time with one thread, which other work on the machine disturbs little, of the fastest round. An answer of
ours among others must be the one that it is alone, token for token, or no figure counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

import pdkernels as pd
from bench.cpu_engines import agreement, engines
from bench.cpu_processes import Refused, pythons
from bench.cpu_settings import hold_to_level
from bench.engine_drafts import SUBJECTS, asking
from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import processor
from pdkernels.models.checkpoints.packaged import packaged

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/engine_load.json"
QUESTIONS = (
    "What is a prime number?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "Name three cities in Italy and say why they are known.",
    "How do I boil an egg?",
    "What is the difference between a list and a tuple in Python?",
    "Translate 'good morning' into French.",
    "Why is the sky blue?",
)
Ask = Callable[..., Any]


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """What each of the clients asks, as token ids."""
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return prompts + [asking(tokenizer, subject) for subject in SUBJECTS[len(QUESTIONS) :]]


def measure(
    engines: dict[str, tuple[Ask, bool]], prompts: list[list[int]], sizes: list[int], rounds: int, new: int
) -> Any:
    """The cells of all engines and numbers of clients, and the first answers of each engine.

    Args:
        engines: by name, what asks a worker, and whether it looks drafts up.
        prompts: one for each client of the largest number.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in engines}
    answers: dict[str, list[list[int]]] = {}
    for round_ in range(rounds + 1):
        for size in sizes:
            for name, (ask, lookup) in engines.items():
                took, first, texts = ask("clients", prompts[:size], new, lookup)
                known = answers.setdefault(name, [])
                known += texts[len(known) :]
                if name.startswith("pdkernels") and texts != known[:size]:
                    raise SystemExit(f"{name}: with {size} clients an answer changes")
                least = found[name].get(str(size))
                # The first round makes batches of every size.
                if round_ > 0 and (least is None or took < least["ms"]):
                    found[name][str(size)] = {
                        "ms": took,
                        "tokens_per_second": 1e3 * new * size / took,
                        "first_token_median_ms": statistics.median(first),
                        "first_token_worst_ms": max(first),
                    }
    return found, answers


def load_table(path: Path) -> str:
    """A line for each engine: tokens a second with each number of clients, and the time to the first token."""
    if not path.exists():
        return "not measured"
    found = json.loads(path.read_text())
    sizes = list(next(iter(found["figures"].values())))
    last = sizes[-1]
    head = [
        "tokens a second, clients",
        *sizes,
        f"{last} over 1",
        "first token, ms, one client",
        f"{last} clients, median",
        "worst",
    ]
    lines = []
    for name, cells in found["figures"].items():
        speeds = [cells[size]["tokens_per_second"] for size in sizes]
        times = [cells[sizes[0]]["first_token_median_ms"]]
        times += [cells[last][f"first_token_{which}_ms"] for which in ("median", "worst")]
        shown = f"**{name}**" if name.startswith("pdkernels") else name
        lines.append(
            [
                shown,
                *(f"{speed:,.0f}" for speed in speeds),
                f"{speeds[-1] / speeds[0]:.1f}x",
                *(f"{ms:,.0f}" for ms in times),
            ]
        )
    facts = f"{found['file']}, {found['tokens']} tokens an answer; CPU time, one thread, fastest of interleaved rounds; {found['machine']}"
    return f"{table(head, lines)}\n\n{facts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file; SmolLM2-135M without one")
    parser.add_argument("--peer-python", nargs="*", default=[], metavar="PYTHON", help="other environments' Pythons")
    parser.add_argument("--ik-llama", type=Path, metavar="BUILD", help="a folder in which ik_llama.cpp was built")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], choices=range(1, 33))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    file = chosen.file or packaged("smollm2-135m-instruct")
    prompts = prompts_of(pd.models.load(file).tokenizer)
    hold_to_level()
    python, asked = pythons(chosen.peer_python, chosen.ik_llama), dict[str, tuple[Ask, bool]]()
    made: dict[str, dict[str, Any]] = {
        name: {"engine": name, "file": str(file), "threads": 1, "built": str(chosen.ik_llama)}
        for name in ("pdkernels", "llama.cpp", "ik_llama.cpp")
        if name in python
    }
    try:
        with engines(made, python, {}) as rivals:
            for name, by_setting in rivals.items():
                asked |= {f"{name}, {setting}": (worker, False) for setting, worker in by_setting.items()}
            for setting, worker in rivals["pdkernels"].items():
                asked[f"pdkernels, {setting}, drafts looked up"] = worker, True
            figures, answers = measure(asked, prompts, sorted(chosen.clients), chosen.rounds, chosen.tokens)
            for setting, worker in rivals["pdkernels"].items():
                for prompt, text in zip(prompts, answers[f"pdkernels, {setting}"], strict=False):
                    if worker("answer", prompt, chosen.tokens, False)[1] != text:
                        raise SystemExit("an answer among others is not the one that it is alone")
    except Refused as error:
        raise SystemExit(str(error)) from None
    equal = {
        name: statistics.mean(agreement(a, b) for a, b in zip(texts, next(iter(answers.values())), strict=True))
        for name, texts in answers.items()
    }
    facts = {"file": file.name, "machine": processor(), "python": sys.version.split()[0], "tokens": chosen.tokens}
    write(chosen.to, facts | {"figures": figures, "equal_tokens": equal})
    Console().print(load_table(chosen.to), markup=False)


if __name__ == "__main__":
    main()
