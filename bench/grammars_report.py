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


def canvases(path: Path) -> str:
    """Times of canvases under recursive grammars."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return _canvases(found) if "canvases" in found else "not measured"


def tables(found: dict[str, Any]) -> str:
    """All, as far as they were measured."""
    parts = ("proof", _proof), ("cost", _cost), ("masks", _masks), ("canvases", _canvases)
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


def _canvases(found: dict[str, Any]) -> str:
    shares = {"all masked": "1", "three quarters": "0.75", "half": "0.5", "a tenth": "0.1"}
    lines = []
    for row in found["canvases"]:
        times = [row[f"masked_{share}_ms"] for share in shares.values()]
        cells = [f"{times[0]:.1f}", f"{times[0] / row['forward_ms']:.1%}", *(f"{one:.1f}" for one in times[1:])]
        lines.append(
            [
                row["grammar"],
                f"{row['ready_ms']:,.0f}",
                *cells,
                f"{row['completable_ms']:.1f}",
                f"{row['forward_ms']:,.0f}",
            ]
        )
    masked, *others = shares
    head = ["grammar", "ready, ms", f"{masked}, ms", "of the forward", *(f"{one}, ms" for one in others), "completable or not, ms", "a forward, ms"]  # fmt: skip
    return f"{table(head, lines)}\n\n{found['canvases_machine']['device']}, one thread"


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
