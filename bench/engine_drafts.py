"""Drafts among many clients: the tokens a second of an engine that drafts, over those of the same engine token by token.

    python -m bench.engine_drafts [--peer-python PYTHON ...] [--ik-llama BUILD] [--clients 1 2 4 8 16 32] [--rounds 3] [--to bench/results/engine_drafts.json]

As many answers run as there are clients: each client asks its next question when it has an answer. Questions of one
kind have answers that quote their prompt, those of the other kind have not. Answers are greedy and equally long, and a
figure counts only if all modes give the same. llama.cpp and ik_llama.cpp answer the same questions without drafts, driven as their servers batch, each with the
fastest of its settings: all clients' first questions, then their next.

Times are CPU time with one thread, which other work on the machine disturbs little: the least of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import pdkernels as pd
from bench.cpu_engines import Rivals, engines
from bench.cpu_processes import pythons
from bench.cpu_settings import hold_to_level
from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import processor
from pdkernels.models.checkpoints.packaged import packaged

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/engine_drafts.json"
QUESTIONS = 2  # of each client
SUBJECTS = (
    "a lighthouse keeper", "the market square", "a broken clock", "two brothers", "the oldest bridge", "a paper boat",
    "the night train", "an empty theatre", "the glass maker", "a winter garden", "the last ferry", "a letter",
    "the river mill", "a stone bench", "the blue door", "an old map", "a brass key", "the school choir", "a wooden horse",
    "the quiet harbour", "a street musician", "the orchard wall", "a storm lamp", "the town hall", "a copper kettle",
    "the long staircase", "a yellow kite", "the baker's son", "a ship's bell", "the dry fountain", "a chess board",
    "the mountain hut",
)  # fmt: skip
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "token by token": ("autoregressive", {}),
    "looked up, auto": ("jacobi", {"draft": "lookup", "block_size": "auto"}),
}


def quoting(tokenizer: Any, subject: str) -> list[int]:
    """A list that repeats itself, and so will its continuation."""
    lines = "".join(f"{n}. {subject}: the story of {subject} begins in the year {1600 + 7 * n}.\n" for n in (1, 2))
    return list(tokenizer.encode(lines * 2 + lines[:8]))


def asking(tokenizer: Any, subject: str) -> list[int]:
    """A question whose answer is new text."""
    return list(tokenizer.encode_chat([{"role": "user", "content": f"Write a short story about {subject}."}]))


def speeds(
    model: Any,
    modes: Mapping[str, tuple[str, dict[str, Any]]],
    prompts: Sequence[list[int]],
    sizes: Sequence[int],
    rounds: int,
    new: int,
    lossless: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Tokens a second of each mode with each number of clients; `lossless` ones must give the same tokens.

    Client c asks prompts c, c + 1, .. of the list, which begins again at its end.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in modes}
    for size in sizes:
        asked = [prompts[(client + turn) % len(prompts)] for turn in range(QUESTIONS) for client in range(size)]
        least, answers = dict.fromkeys(modes, float("inf")), dict[str, Any]()
        with pd.Engine(model, max_running=size, max_new_tokens=new, kept_prompt_tokens=0, max_batches=8) as engine:
            for _ in range(rounds):
                for name, (method, options) in modes.items():
                    started = time.process_time()
                    handles = [
                        engine.submit(each, method, max_new_tokens=new, end_tokens=(), **options) for each in asked
                    ]
                    answers[name] = [handle.result().tokens.tolist() for handle in handles]
                    least[name] = min(least[name], time.process_time() - started)
        if any(answers[name] != answers[lossless[0]] for name in lossless):
            raise SystemExit(f"with {size} clients a mode changes an answer")
        for name, seconds in least.items():
            found[name][str(size)] = new * len(asked) / seconds
    return found


def peer_speeds(
    rivals: Rivals, prompts: Sequence[list[int]], sizes: Sequence[int], rounds: int, new: int
) -> dict[str, dict[str, float]]:
    """As `speeds`, of other engines token by token, each with the fastest of its settings."""
    found: dict[str, dict[str, float]] = {}
    for name, by_setting in rivals.items():
        for size in sizes:
            turns = [[prompts[(client + turn) % len(prompts)] for client in range(size)] for turn in range(QUESTIONS)]
            least = min(
                sum(worker("clients", asked, new, False)[0] for asked in turns)
                for _ in range(rounds)
                for worker in by_setting.values()
            )
            found.setdefault(f"{name}, token by token", {})[str(size)] = 1e3 * new * size * QUESTIONS / least
    return found


def drafts_table(path: Path) -> str:
    """A line for each kind of text and mode: tokens a second with each number of clients, and over token by token."""
    if not path.exists():
        return "not measured"
    found = json.loads(path.read_text())
    lines: list[list[str]] = []
    for kind, modes in found["figures"].items():
        plain = next(iter(modes.values()))
        for name, cells in modes.items():
            shown = [
                f"{speed:,.0f}" + f" ({speed / plain[size]:.2f}x)" * (cells is not plain)
                for size, speed in cells.items()
            ]
            lines.append([kind, name, *shown])
    head = ["answers", "tokens a second, clients", *plain]
    facts = f"{found['file']}, {found['tokens']} tokens an answer, {QUESTIONS} questions a client; CPU time, one thread, least of {found['rounds']} interleaved rounds; {found['machine']}"
    return f"{table(head, lines)}\n\n{facts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file; SmolLM2-135M without one")
    parser.add_argument("--peer-python", nargs="*", default=[], metavar="PYTHON", help="other environments' Pythons")
    parser.add_argument("--ik-llama", type=Path, metavar="BUILD", help="a folder in which ik_llama.cpp was built")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    file = chosen.file or packaged("smollm2-135m-instruct")
    model = pd.models.load(file)
    hold_to_level()
    python, sizes = pythons(chosen.peer_python, chosen.ik_llama), sorted(chosen.clients)
    made: dict[str, dict[str, Any]] = {
        name: {"engine": name, "file": str(file), "threads": 1, "built": str(chosen.ik_llama)}
        for name in ("llama.cpp", "ik_llama.cpp")
        if name in python
    }
    figures = {}
    with engines(made, python, {}) as rivals:
        for kind, make in (("that quote their prompt", quoting), ("that do not", asking)):
            prompts = [make(model.tokenizer, subject) for subject in SUBJECTS]
            figures[kind] = speeds(model, MODES, prompts, sizes, chosen.rounds, chosen.tokens, list(MODES))
            figures[kind] |= peer_speeds(rivals, prompts, sizes, chosen.rounds, chosen.tokens)
    facts = {"file": Path(file).name, "machine": processor(), "rounds": chosen.rounds, "tokens": chosen.tokens}
    command = "python -m bench.engine_drafts"
    write(chosen.to, facts | {"command": command, "processor_seconds": time.process_time(), "figures": figures})
    Console().print(drafts_table(chosen.to), markup=False)


if __name__ == "__main__":
    main()
