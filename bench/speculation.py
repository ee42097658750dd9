"""Exact speculation over states of a canvas and of a block: forwards that it saves, and the same tokens and law over many prompts.

    python -m bench.speculation [--prompts 2000] [--to bench/results/speculation.json]

- "rows": 32 tokens of each of 16 sums, one position a step, by the number of further states: forwards, canvases or blocks computed, and CPU seconds of
  one thread. Sums are told alone, not in a batch.
- "same": 4 tokens of each of `--prompts` sums in batches, with and without 3 states at temperatures 0 and 1: how many texts differ.
- "law": 4 tokens after the unfinished "7 + ", which may go on in many ways, with so many seeds at temperature 1, those with states other ones than those without: chi-square of the texts, of which rare ones are counted
  together. Equal laws give a probability below 0.001 once in a thousand runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import pdkernels as pd
from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import processor

RESULTS = Path(__file__).resolve().parent / "results/speculation.json"
STATES = (0, 1, 3, 7, 15)
TEMPERATURES = (0.0, 1.0)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llada": ("tiny-masked", "llada", {}),
    "block_diffusion, blocks of 8": ("tiny-trimode", "block_diffusion", {"block_size": 8, "threshold": None}),
    "block_diffusion, blocks of 16": ("tiny-trimode", "block_diffusion", {"block_size": 16, "threshold": None}),
    "block_diffusion, blocks of 32": ("tiny-trimode", "block_diffusion", {"block_size": 32, "threshold": None}),
}
MANY = ("llada", "block_diffusion, blocks of 8")
NEW, SHORT, BATCH, PROMPTS = 32, 4, 100, 16
FEW = 3  # states of the many texts
RARE = 10  # texts of which fewer than so many are expected in each half are counted together


def sums(count: int) -> list[str]:
    """Different sums, the same for everyone.

    >>> sums(2)
    ['3 + 3 = ?\\n', '3 + 4 = ?\\n']
    """
    return [f"{3 + n // 90} + {3 + n % 90} = ?\n" for n in range(count)]


def run(case: str, texts: Any, states: int, **options: Any) -> Any:
    name, method, own = CASES[case]
    model = pd.models.load(name)
    return pd.decoding.generate(model, texts, method, speculate=states, end_tokens=(), **own, **options)


def row(case: str, states: int, temperature: float) -> dict[str, Any]:
    start, forwards = time.thread_time(), 0
    for seed, text in enumerate(sums(90 * PROMPTS)[::90]):
        forwards += run(case, text, states, temperature=temperature, seed=seed, max_new_tokens=NEW).stats.forwards
    took = time.thread_time() - start
    return {
        "case": case,
        "states": states,
        "temperature": temperature,
        "forwards": forwards / PROMPTS,
        "seconds": round(took / PROMPTS, 4),
    }


def differing(case: str, prompts: int, temperature: float) -> int:
    """Texts of batches that are others with states than without."""
    texts, found = sums(prompts), 0
    for first in range(0, prompts, BATCH):
        batch = texts[first : first + BATCH]
        plain, fast = (
            run(case, batch, states, temperature=temperature, seed=first, max_new_tokens=SHORT) for states in (0, FEW)
        )
        found += sum(a.tolist() != b.tolist() for a, b in zip(plain.tokens, fast.tokens, strict=True))
    return found


def chi_square(first: Counter[str], second: Counter[str]) -> dict[str, float]:
    """Of two samples of one size: the statistic, its degrees of freedom, and how probable so large a one is.

    >>> chi_square(Counter(a=60, b=40), Counter(a=40, b=60))
    {'statistic': 8.0, 'freedom': 1, 'probability': 0.0047}
    """
    common = {text for text in first | second if first[text] + second[text] >= 2 * RARE}
    pairs = [(first[text], second[text]) for text in sorted(common)]
    rest = sum(first.values()) - sum(a for a, _ in pairs), sum(second.values()) - sum(b for _, b in pairs)
    pairs += [rest] if sum(rest) else []
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    freedom = len(pairs) - 1
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    probability = float(torch.special.gammaincc(halves[0], halves[1])) if freedom else 1.0
    return {"statistic": round(statistic, 2), "freedom": freedom, "probability": round(probability, 4)}


def law(case: str, draws: int) -> dict[str, float]:
    counts = []
    for states in (0, FEW):
        own: Counter[str] = Counter()
        for first in range(0, draws, BATCH):
            seed = first + (states > 0) * 10**6
            # The sequences of a batch have seeds of their own.
            result = run(case, ["7 + "] * BATCH, states, temperature=1.0, seed=seed, max_new_tokens=SHORT)
            own.update(str(tokens.tolist()) for tokens in result.tokens)
        counts.append(own)
    return {"draws": draws, "texts": len(counts[0] | counts[1]), **chi_square(*counts)}


def table_of(found: dict[str, Any]) -> str:
    lines = []
    for case in CASES:
        own = [row for row in found["rows"] if row["case"] == case]
        for states in STATES:
            by_temperature = [row for row in own if row["states"] == states]
            forwards = [f"{row['forwards']:.1f}" for row in by_temperature]
            times = sum(row["seconds"] for row in by_temperature) / sum(
                row["seconds"] for row in own if row["states"] == 0
            )
            lines.append([case if states == 0 else "", str(states), *forwards, f"{times:.1f}x"])
    head = [f"{NEW} tokens, one a step", "`speculate`", *(f"forwards, temperature {t:g}" for t in TEMPERATURES), "time"]
    same = "; ".join(f"{row['case']}, temperature {row['temperature']:g}: {row['differ']}" for row in found["same"])
    laws = "; ".join(
        f"{row['case']}: chi-square {row['statistic']:g} with {row['freedom']} degrees of freedom, p = {row['probability']:g}"
        for row in found["law"]
    )
    words = f"Texts of {found['prompts']:,} prompts that differ with {FEW} states: {same}. Law of {found['prompts']:,} texts: {laws}"
    return f"{table(head, lines)}\n\n{words}. {found['machine']}, torch {found['torch']}, one thread"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--again", action="store_true", help="measure the rows anew too")
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": processor(), "torch": torch.__version__, "prompts": given.prompts}
    kept = json.loads(given.to.read_text()) if given.to.exists() and not given.again else {}
    found["rows"] = kept.get("rows") or [
        row(case, states, t) for case in CASES for states in STATES for t in TEMPERATURES
    ]
    found["same"] = [row for row in kept.get("same", []) if kept["prompts"] == given.prompts]
    found["law"] = []
    write(given.to, found)
    for case in MANY:
        for temperature in TEMPERATURES:
            wanted = {"case": case, "temperature": temperature}
            if not any(wanted.items() <= row.items() for row in found["same"]):
                found["same"].append({**wanted, "differ": differing(case, given.prompts, temperature)})
                write(given.to, found)
        found["law"].append({"case": case, **law(case, given.prompts)})
        write(given.to, found)
        Console().print(found["same"], found["law"])


if __name__ == "__main__":
    main()
