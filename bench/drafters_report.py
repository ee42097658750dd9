"""Tables of bench/drafters.py and bench/drafters_peers.py, for the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.gpu_report import table

WORDS = {"none": "token by token", "early exit": "assisted by its first layers"}


def methods(path: Path) -> str:
    """Methods with drafts on held-out questions."""
    if not path.exists():
        return "not measured"
    found = json.loads(path.read_text())
    rows, settings = found["rows"], found["settings"]
    base = rows["autoregressive"]["seconds"]
    lines = [
        [
            label,
            f"{row['tokens'] / row['forwards']:.2f}",
            f"{row['tokens'] / row['seconds']:.1f}",
            f"{base / row['seconds']:.2f}x",
            f"{1 / row['slowest']:.2f}x",
            f"{row['equal']} of {settings['questions']}",
        ]
        for label, row in rows.items()
    ]
    title = f"{settings['questions']} questions, {settings['tokens']} tokens each"
    head = [title, "tokens a forward", "tokens/s", "speed", "the question that fares worst", "same tokens"]
    clock = {"process_time": "CPU time", "perf_counter": "wall clock"}[settings["clock"]]
    machine = found["machine"]
    words = f"{clock}, minimum of {settings['repeats']} interleaved runs, threads {settings['threads']}"
    return f"{table(head, lines)}\n\n{words}; {machine['device']}, torch {machine['torch']}"


def peers(path: Path) -> str:
    """Engines and their drafts beside each other."""
    return peers_of(json.loads(path.read_text())) if path.exists() else "not measured"


def peers_of(found: dict[str, Any]) -> str:
    tokens, kinds = found["tokens"], ("quoting", "other")
    lines = []
    for engine, rows in found["rows"].items():
        for how, row in rows.items():
            name = f"{engine}, {WORDS.get(how, how)}"
            if kinds[0] not in row:
                lines.append([name, *["-"] * (2 * len(kinds) + 2)])
                continue
            cells = [cell for kind in kinds for cell in row[kind].values()]
            known = [cell["forwards"] for cell in cells]
            forwards = "-" if None in known else f"{tokens * len(known) / sum(known):.2f}"
            speeds = []
            for kind in kinds:
                own = sum(cell["ms"] for cell in row[kind].values())
                base = sum(cell["ms"] for cell in rows["none"][kind].values())
                speeds += [f"{1e3 * tokens * len(row[kind]) / own:.1f}", f"{base / own:.2f}x"]
            lines.append([name, *speeds, forwards, f"{sum(cell['same'] for cell in cells)} of {len(cells)}"])
            if engine == "pdkernels":
                lines[-1][0] = f"**{name}**"
    head = ["SmolLM2-135M, one thread, prompt included"]
    head += [part for kind in kinds for part in (f"tokens/s, {kind}", "speed")]
    head += ["tokens a forward", "answers equal to its own token by token"]
    words = (
        f"{settings(found['rows'])}CPU time, minimum of {found['rounds']} interleaved rounds, {tokens} tokens an answer"
    )
    return f"{table(head, lines)}\n\n{words}; {found['machine']}, torch {found['torch']}"


def settings(rows: dict[str, Any]) -> str:
    """How often each setting of a peer was the fastest."""
    counts: dict[str, dict[str, int]] = {}
    for engine, by_kind in rows.items():
        for row in by_kind.values():
            for kind in ("quoting", "other"):
                for cell in row.get(kind, {}).values():
                    if cell.get("setting"):
                        of_engine = counts.setdefault(engine, {})
                        of_engine[cell["setting"]] = of_engine.get(cell["setting"], 0) + 1
    each = [f"{e}, " + ", ".join(f"{s} {n}" for s, n in by.items()) for e, by in counts.items()]
    return f"Answers by the fastest of a peer's settings: {'; '.join(each)}. " if each else ""
