"""Exact speculation over states of a canvas and of a block: forwards that it saves, and the same tokens and law over many prompts.

    python -m bench.speculation [--prompts 2000] [--counts] [--to bench/results/speculation.json]

- "rows": 32 tokens of each of 16 sums, one position a step, by the number of further states: forwards, canvases or blocks computed, and CPU seconds of
  one thread. Sums are told alone, not in a batch.
- "rows" of thresholds: the same where a threshold decides how many positions a step fills: 32 tokens after each of 16 unfinished sums ("3 + 4") at three temperatures.
- "engine": these sums submitted at once to an engine, with 7 states.
- "same": 4 tokens of each of `--prompts` sums in batches, 16 of so many unfinished ones where there is a threshold, with and without 3 states: how many texts, or numbers of
  filled positions, differ.
- "law": 4 tokens after the unfinished "7 + ", which may go on in many ways, with so many seeds at temperature 1, those with states other ones than those without: chi-square of the texts, of which rare ones are counted
  together. Equal laws give a probability below 0.001 once in a thousand runs.

A run that was broken off goes on. What another machine or torch has measured is measured anew. `--counts`: "same" and "law" alone, which a busy machine
does not change.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
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
Case = tuple[str, str, dict[str, Any]]
CASES: dict[str, Case] = {
    "llada": ("tiny-masked", "llada", {}),
    "block_diffusion, blocks of 8": ("tiny-trimode", "block_diffusion", {"block_size": 8, "threshold": None}),
    "block_diffusion, blocks of 16": ("tiny-trimode", "block_diffusion", {"block_size": 16, "threshold": None}),
    "block_diffusion, blocks of 32": ("tiny-trimode", "block_diffusion", {"block_size": 32, "threshold": None}),
}
THRESHOLDS: dict[str, Case] = {
    "block_diffusion, blocks of 8, 0.9": ("tiny-trimode", "block_diffusion", {"block_size": 8}),
    "block_diffusion, blocks of 32, 0.9": ("tiny-trimode", "block_diffusion", {"block_size": 32}),
    "fast_dllm_v2, blocks of 4, 0.85": (
        "tiny-trimode",
        "fast_dllm_v2",
        {"block_size": 4, "small_block_size": 4, "threshold": 0.85},
    ),
    "fast_dllm_v2, blocks of 32, 0.95": (
        "tiny-trimode",
        "fast_dllm_v2",
        {"block_size": 32, "small_block_size": 32, "threshold": 0.95},
    ),
}
WARMTHS = (0.0, 0.5, 1.0)
NEW, SOME, SHORT, BATCH, PROMPTS = 32, 16, 4, 100, 16
FEW = 3  # states of the many texts
RARE = 10  # texts of which fewer than so many are expected in each half are counted together


def sums(count: int) -> list[str]:
    """Different sums, the same for everyone.

    >>> sums(2)
    ['3 + 3 = ?\\n', '3 + 4 = ?\\n']
    """
    return [f"{3 + n // 90} + {3 + n % 90} = ?\n" for n in range(count)]


def run(case: str, texts: Any, states: int, **options: Any) -> Any:
    name, method, own = (CASES | THRESHOLDS)[case]
    return pd.decoding.generate(loaded(name), texts, method, speculate=states, end_tokens=(), **own, **options)


@cache
def loaded(name: str) -> Any:
    return pd.models.load(name)


def unfinished(count: int) -> list[str]:
    """Different beginnings of sums, which may go on in many ways.

    >>> unfinished(2)
    ['3 + 3', '3 + 4']
    """
    return [text.partition(" =")[0] for text in sums(count)]


def row(case: str, states: int, temperature: float) -> dict[str, Any]:
    start, forwards = time.thread_time(), 0
    texts = unfinished if case in THRESHOLDS else sums
    for seed, text in enumerate(texts(90 * PROMPTS)[::90]):
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
    """Texts of batches that are others with states than without, or are filled in another order."""
    texts, found, new = (sums(prompts), 0, SHORT) if case in CASES else (unfinished(prompts), 0, SOME)
    for first in range(0, prompts, BATCH):
        batch = texts[first : first + BATCH]
        results = (
            run(case, batch, states, temperature=temperature, seed=first, max_new_tokens=new) for states in (0, FEW)
        )
        plain, fast = (
            [(*pair,) for pair in zip(map(list_of, result.tokens), result.stats.accepted)] for result in results
        )
        found += sum(a != b for a, b in zip(plain, fast, strict=True))
    return found


def list_of(tokens: torch.Tensor) -> list[int]:
    return [int(token) for token in tokens]


def engine(case: str, states: int) -> dict[str, Any]:
    """The unfinished sums submitted at once, at temperatures in turn: forwards of a request, and texts that differ from those
    alone and without states."""
    name, method, own = THRESHOLDS[case]
    options: list[dict[str, Any]] = [
        {"temperature": t, "seed": seed, "max_new_tokens": NEW} for seed, t in zip(range(PROMPTS), WARMTHS * PROMPTS)
    ]
    texts = unfinished(90 * PROMPTS)[::90]
    with pd.Engine(loaded(name)) as running:
        pairs = zip(texts, options, strict=True)
        handles = [
            running.submit(text, method, speculate=states, end_tokens=(), **own, **given) for text, given in pairs
        ]
        results = [handle.result() for handle in handles]
    alone = [run(case, text, 0, **given) for text, given in zip(texts, options, strict=True)]
    return {
        "case": case,
        "states": states,
        "forwards": sum(result.stats.forwards for result in results) / PROMPTS,
        "differ": sum(list_of(a.tokens) != list_of(b.tokens) for a, b in zip(results, alone, strict=True)),
    }


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
    words = f"{found['machine']}, torch {found['torch']}, one thread"
    counts = f"{_same(found, CASES)} {_laws(found, CASES)}"
    return f"{_lines(found, CASES, TEMPERATURES, 'one a step')}\n\n{counts} {words}"


def table_of_thresholds(found: dict[str, Any]) -> str:
    engines = "; ".join(
        f"{row['case']}: {row['forwards']:.1f} forwards with {row['states']} states, {row['differ']} texts differ"
        for row in found["engine"]
    )
    words = f"In an engine, {PROMPTS} requests at once, each at one of the temperatures: {engines}. {found['machine']}, torch {found['torch']}, one thread"
    counts = f"{_same(found, THRESHOLDS)} {_laws(found, THRESHOLDS)}"
    return f"{_lines(found, THRESHOLDS, WARMTHS, 'a threshold')}\n\n{counts} {words}"


def _lines(found: dict[str, Any], cases: dict[str, Case], temperatures: Sequence[float], what: str) -> str:
    lines = []
    for case in cases:
        own = [row for row in found["rows"] if row["case"] == case]
        for states in STATES:
            by_temperature = [row for row in own if row["states"] == states]
            forwards = [f"{row['forwards']:.1f}" for row in by_temperature]
            times = sum(row["seconds"] for row in by_temperature) / sum(
                row["seconds"] for row in own if row["states"] == 0
            )
            lines.append([case if states == 0 else "", str(states), *forwards, f"{times:.1f}x"])
    head = [f"{NEW} tokens, {what}", "`speculate`", *(f"forwards, temperature {t:g}" for t in temperatures), "time"]
    return table(head, lines)


def _same(found: dict[str, Any], cases: dict[str, Case]) -> str:
    rows = [row for row in found["same"] if row["case"] in cases]
    same = "; ".join(
        f"{row['case']}, temperature {row['temperature']:g}: {row['differ']} of {row['prompts']:,}" for row in rows
    )
    return f"Texts that differ with {FEW} states: {same}."


def _laws(found: dict[str, Any], cases: dict[str, Case]) -> str:
    laws = "; ".join(
        f"{row['case']}: chi-square {row['statistic']:g} with {row['freedom']} degrees of freedom, p = {row['probability']:g}"
        for row in found["law"]
        if row["case"] in cases
    )
    return f"Law of {found['prompts']:,} texts: {laws}."


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--again", action="store_true", help="measure all anew")
    parser.add_argument("--counts", action="store_true", help="texts and laws alone, no times")
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": processor(), "torch": torch.__version__, "prompts": given.prompts}
    kept = json.loads(given.to.read_text()) if given.to.exists() and not given.again else {}
    found |= kept_of(kept, found)

    def keep(name: str, measured: dict[str, Any]) -> None:
        found[name].append(measured)
        write(given.to, found)
        Console().print(measured)

    timed: list[tuple[str, int, float]] = [
        (case, states, t) for case in CASES for states in STATES for t in TEMPERATURES
    ]
    timed += [(case, states, t) for case in THRESHOLDS for states in STATES for t in WARMTHS]
    for case, states, t in [] if given.counts else timed:
        if not _has(found["rows"], case=case, states=states, temperature=t):
            keep("rows", row(case, states, t))
    for case in [] if given.counts else list(THRESHOLDS)[:2]:
        if not _has(found["engine"], case=case):
            keep("engine", engine(case, 7))
    for case in sorted(CASES | THRESHOLDS, key=cost):
        if not _has(found["law"], case=case, draws=given.prompts):
            measured = {"case": case, **law(case, given.prompts)}
            found["law"] = [row for row in found["law"] if row["case"] != case]
            keep("law", measured)
        for t in TEMPERATURES:
            counted = {"case": case, "temperature": t, "prompts": given.prompts}
            fewer = [row for row in found["same"] if (row["case"], row["temperature"]) == (case, t)]
            if all(row["prompts"] < given.prompts for row in fewer):
                counted["differ"] = differing(case, given.prompts, t)
                found["same"] = [row for row in found["same"] if row not in fewer]
                keep("same", counted)


def cost(case: str) -> int:
    """Rows of a case's block: the cheap ones come first."""
    _, _, own = (CASES | THRESHOLDS)[case]
    return int(own.get("block_size", 0))


def kept_of(kept: dict[str, Any], now: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The lists of an earlier record that still hold: those of the same machine and torch.

    >>> now = {"machine": "A", "torch": "2"}
    >>> kept_of({**now, "rows": [{"states": 1}]}, now)["rows"], kept_of({**now, "rows": [{"states": 1}]}, {**now, "machine": "B"})["rows"]
    ([{'states': 1}], [])
    """
    here = all(kept.get(name) == now[name] for name in ("machine", "torch"))
    return {name: kept.get(name, []) if here else [] for name in ("rows", "engine", "same", "law")}


def _has(rows: list[dict[str, Any]], **wanted: Any) -> bool:
    return any(wanted.items() <= row.items() for row in rows)


if __name__ == "__main__":
    main()
