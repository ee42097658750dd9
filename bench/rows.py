"""The rows of benchmark JSON that tables and plots are made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdkernels.decoding.methods import METHODS

Row = dict[str, Any]


def load(folder: Path) -> list[Row]:
    """The rows of all JSON files in a folder."""
    return [row for path in sorted(folder.glob("*.json")) for row in rows_of(path)]


def rows_of(path: Path) -> list[Row]:
    """The ``extra_info`` of every benchmark in a file, with its spread; none if there is no file."""
    benchmarks = json.loads(path.read_text()).get("benchmarks", []) if path.exists() else []
    rows = []
    for benchmark in benchmarks:
        stats = benchmark["stats"]
        spread = {"iqr_us": stats["iqr"] * 1e6, "max_us": stats["max"] * 1e6}
        rows.append({**benchmark["extra_info"], "group": benchmark["group"], **spread})
    return rows


def by_candidate(rows: list[Row], cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, list[Row | None]]]:
    """Candidates in the order they ran, with their row in each case."""
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    pick = lambda name, case: next((r for r in rows if r["candidate"] == name and case.items() <= r.items()), None)  # noqa: E731
    return [(name, [pick(name, case) for _, case in cases]) for name in names]


def family(row: Row) -> str | None:
    """The evaluation's family that a row belongs to."""
    return METHODS[row["method"]].wing if row["op"] == "evaluation" else None


# Candidates that differ only in settings: the table shows the best setting of each case.
SETTINGS = ("SDPA, dense boolean mask", "FlexAttention, compiled, blocks of")


def best_settings(rows: list[Row]) -> list[Row]:
    """The best row of each candidate and case; those of `SETTINGS` count as one candidate, with the winning ``setting``."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        name, setting = row["candidate"], ""
        for thing in SETTINGS:
            if name.startswith(thing):
                name, setting = thing.removesuffix(" blocks of").rstrip(","), name.removeprefix(thing).strip(", ")
        row = {**row, "candidate": name, "setting": setting}
        key = (row["case"], name)
        if key not in best or row["ratio_to_baseline"] < best[key]["ratio_to_baseline"]:
            best[key] = row
    return list(best.values())
