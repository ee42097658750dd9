"""Clients of an engine at the same time: how many tokens a second it gives them together, and when the first of each comes.

    python -m bench.engine_load --model smollm2-135m-instruct --clients 1 8 --json bench/results/engine_load.json

Each client asks one question after another, with another method in each row of the table. Every answer is compared with that of `generate`
alone before a figure counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import pdkernels as pd
from pdkernels.evaluation.machine import processor

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


def measured(
    engine: pd.Engine, method: str, options: dict[str, Any], clients: int, rounds: int, tokens: int
) -> dict[str, float]:
    """Figures of `clients` that ask `rounds` questions each."""
    firsts: list[float] = []
    answers: list[tuple[str, list[int]]] = []

    def ask(client: int) -> None:
        for number in range(rounds):
            question = QUESTIONS[(client + number) % len(QUESTIONS)]
            handle = engine.submit([{"role": "user", "content": question}], method, max_new_tokens=tokens, **options)
            result = handle.result()
            assert handle.first_token is not None
            firsts.append(handle.first_token - handle.submitted)
            answers.append((question, result.tokens.tolist()))

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    started, busy = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, busy = time.perf_counter() - started, time.process_time() - busy
    for question, got in answers:
        chat = [{"role": "user", "content": question}]
        alone = pd.decoding.generate(engine.model, chat, pd.decoding.find(method), max_new_tokens=tokens, **options)
        assert got == alone.tokens.tolist(), question
    new = sum(len(got) for _, got in answers)
    return {
        "clients": clients,
        "tokens": new,
        "tokens_per_second": new / wall,
        "tokens_per_cpu_second": new / busy,
        "first_token_median": statistics.median(firsts),
        "first_token_worst": max(firsts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    model = pd.models.load(chosen.model)
    table = Table("method", "clients", "tokens/s", "tokens/CPU s", "first token, median", "worst", title=processor())
    rows = []
    for method, options in (("autoregressive", {}), ("jacobi", {"draft": "lookup"})):
        with pd.Engine(
            model, max_running=max(chosen.clients), max_new_tokens=chosen.tokens, kept_prompt_tokens=0
        ) as engine:
            measured(engine, method, options, max(chosen.clients), 1, 4)  # batches of every size exist from here on
            for clients in chosen.clients:
                row = measured(engine, method, options, clients, chosen.rounds, chosen.tokens)
                rows.append({"method": method, **row})
                times = (f"{1000 * row[name]:.0f} ms" for name in ("first_token_median", "first_token_worst"))
                table.add_row(
                    method,
                    str(clients),
                    f"{row['tokens_per_second']:.1f}",
                    f"{row['tokens_per_cpu_second']:.1f}",
                    *times,
                )
    Console().print(table)
    if chosen.json:
        facts = {"model": chosen.model, "machine": processor(), "threads": torch.get_num_threads(), "rows": rows}
        chosen.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
