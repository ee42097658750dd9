"""Tables of bench/grammars.py, for the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.gpu_report import table


def proof(path: Path) -> str:
    """Texts of every method."""
    return _proof(json.loads(path.read_text())) if path.exists() else "not measured"


def cost(path: Path) -> str:
    """Times of a step."""
    return _cost(json.loads(path.read_text())) if path.exists() else "not measured"


def masks(path: Path) -> str:
    """Times of masks beside other libraries."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return _masks(found) if "masks" in found else "not measured"


def tables(found: dict[str, Any]) -> str:
    """All, as far as they were measured."""
    parts = ("proof", _proof), ("cost", _cost), ("masks", _masks)
    return "\n\n".join(make(found) for name, make in parts if name in found)


def _masks(found: dict[str, Any]) -> str:
    lines = []
    for row in found["masks"]:
        times = (f"{row[name]:.1f}" for name in ("row_us", "longest_us"))
        cells = [f"{row['allowed']:,.0f}", *times, f"{row['draft_us']:,.0f}", f"{row['ready_ms']:,.0f}"]
        lines.append([row["schema"], f"{row['engine']} {row['version']}", *cells])
    head = [
        "schema",
        "engine",
        "tokens allowed",
        "a row, µs",
        "longest row, µs",
        "draft of 8 rows, µs",
        "grammar ready, ms",
    ]
    machine = found["masks_machine"]
    return f"{table(head, lines)}\n\n{machine['device']}, one thread, 131,072 tokens"


def _proof(found: dict[str, Any]) -> str:
    by_method: dict[str, dict[str, str]] = {}
    for row in found["proof"]:
        kind = "SmolLM2-135M" if row["model"].startswith("smollm2") else "a tiny model"
        total = row["valid"] + row["invalid"]
        cell = f"{row['valid']} of {total}" + (f", {row['refused']} refused" if row["refused"] else "")
        by_method.setdefault(row["method"], {})[kind] = cell
    kinds = ["a tiny model", "SmolLM2-135M"]
    lines = [[f"`{method}`", *(cells.get(kind, "-") for kind in kinds)] for method, cells in by_method.items()]
    return table(["valid texts", *kinds], lines)


def _cost(found: dict[str, Any]) -> str:
    lines = []
    for name, row in found["cost"].items():
        share = row["step_us"] / 1e3 / row["rest_ms"]
        times = (row["grammar_ms"], row["automaton_ms"])
        cells = [f"{row['step_us']:,.0f}", f"{row['rest_ms']:.1f}", f"{share:.1%}", *(f"{one:.0f}" for one in times)]
        lines.append([name, *cells, f"{row['states']:,}"])
    head = ["schema", "grammar, µs a step", "rest of a step, ms", "share", "schema read, ms", "automaton of the tokens, ms", "states"]  # fmt: skip
    machine = found["machine"]
    facts = f"{machine['device']}, one thread, torch {machine['torch']}, pdkernels {machine['pdkernels']}"
    return f"{table(head, lines)}\n\n{facts}"
