"""Tables of planned diffusion: attention of a round, and the accuracy of a model that plans."""

from __future__ import annotations

from typing import Any

from bench.gpu_report import table
from bench.rows import Row, by_candidate
from bench.tables import lines_relative_to_ours, machine

NAMES = {"steps_ratio": "share of steps", "length_scale": "lengths times"}


def planned_round(rows: list[Row]) -> str:
    rows = [row for row in rows if row["op"] == "planned round"]
    if not rows:
        return "not measured"
    cases = [(f"{kind}, {d}", {"kind": kind, "dtype": d}) for kind in ("dense", "sparse") for d in ("fp32", "bf16")]
    found = dict(by_candidate(rows, cases))
    lines = lines_relative_to_ours(found, lambda us: f"{us / 1e3:.2f}")
    first = {name: max(row["first_call_ms"] for row in times if row) for name, times in found.items()}
    lines = [[*line, f"{longest:,.0f}"] for line, longest in zip(lines, first.values(), strict=True)]
    header = ["ms, median (times pdkernels)", *(title for title, _ in cases), "first call, ms, the longest"]
    return f"{table(header, lines)}\n\n{machine(rows)}"


def label(settings: dict[str, Any]) -> str:
    """Options in words."""
    if "sparse" not in settings:
        return "token by token"
    words = [f"{NAMES.get(name, name)} {value:g}" for name, value in settings.items() if name != "sparse"]
    return ", ".join(["sparse" if settings["sparse"] else "dense", *words])


def evaluation_planned(rows: list[Row]) -> str:
    """From `python -m pdkernels eval --family planned --json`, a table for each batch size."""
    rows = [row for row in rows if row["op"] == "evaluation of plans"]
    if not rows:
        return "not measured"
    tables = []
    for size in sorted({row["batch_size"] for row in rows}):
        own = [row for row in rows if row["batch_size"] == size]
        lines = []
        for row in own:
            right, count = row["items"]
            low, high = row["interval"]
            schedule = f", {row['schedule']} schedule" if "schedule" in row else ""
            lines.append(
                [
                    f"{row['model']}: {label(row['settings'])}{schedule}",
                    f"{right / count:.1%} ({low:.1%} to {high:.1%})",
                    "-" if row["valid_plans"] is None else f"{row['valid_plans'] / row['problems']:.0%}",
                    f"{row['critical_path']:.1f}",
                    f"{row['characters'] / row['seconds']:,.0f}",
                ]
            )
        count = f"{own[0]['problems']} prompts with {own[0]['items'][1]} orders, batch size {size}"
        header = [count, "right (95 % interval)", "valid plans", "critical path", "characters/s"]
        tables.append(table(header, lines))
    return "\n\n".join([*tables, machine(rows)])
