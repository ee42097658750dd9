"""Tables of models of transformers: their own tests, and their speed."""

from __future__ import annotations

import json
from pathlib import Path

from bench.gpu_report import table
from bench.rows import Row
from bench.tables import machine, ratio


def transformers_tests(path: Path) -> str:
    """From `scripts/transformers_tests.py --out`."""
    if not path.exists():
        return "not measured"
    found = json.loads(path.read_text())
    lines = [[model, str(one["sdpa"]), str(one["pdkernels"])] for model, one in found["models"].items()]
    chosen = f", chosen by `-k {found['chosen']}`" if found["chosen"] else ""
    facts = (
        f"transformers {found['transformers']}, torch {found['torch']}; tests of transformers {found['tests']}{chosen}"
    )
    return f"{table(['`test_modeling_*.py`', 'pass with sdpa', 'of these with ours'], lines)}\n\n{facts}"


def transformers_speed(rows: list[Row]) -> str:
    """From bench_transformers.py: a line for each comparison."""
    rows = [row for row in rows if row["op"] == "transformers"]
    if not rows:
        return "not measured"
    lines = [
        [
            row["work"],
            row["candidate"],
            f"{row['median_us'] / 1e3:,.0f}",
            row["baseline"],
            f"{row['baseline_median_us'] / 1e3:,.0f}",
            ratio(1 / row["ratio_to_baseline"]),
        ]
        for row in rows
    ]
    return f"{table(['', 'ours', 'ms', 'baseline', 'ms', 'speed-up'], lines)}\n\n{machine(rows)}"


def anchored(rows: list[Row]) -> str:
    """From bench_anchored.py."""
    rows = [row for row in rows if row["op"] == "anchored"]
    if not rows:
        return "not measured"
    lines = [
        [
            f"{row['length']:,} tokens, {row['anchors']:,} anchors",
            row["candidate"],
            f"{row['median_us'] / 1e3:,.2f}",
            f"{row['first_call_ms']:,.0f}",
        ]
        for row in rows
    ]
    return f"{table(['', '', 'ms a step', 'first call, ms'], lines)}\n\n{machine(rows)}"
