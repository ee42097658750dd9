"""Shared by the tables of all benchmarks: times, ratios, and the line that names the machine."""

from __future__ import annotations

from collections.abc import Callable

from bench.rows import Row
from pdkernels.evaluation import interval


def microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def ratio(value: float) -> str:
    return f"{value:,.0f}x" if value >= 10 else f"{value:.2f}x"


def share(right: int, count: int) -> str:
    """What is right of a count, with its 95 % interval."""
    low, high = interval(right, count)
    return f"{right / count:.0%} ({low:.0%} to {high:.0%})"


def relative_to_ours(row: Row, own: Row) -> str:
    """How many times as long it takes as ours. Each was timed in turn with the same baseline: only ratios to it may be compared."""
    return ratio(row["ratio_to_baseline"] / own["ratio_to_baseline"])


def lines_relative_to_ours(found: dict[str, list[Row | None]], shown: Callable[[float], str]) -> list[list[str]]:
    """A line for each candidate: its times, formatted by `shown`, and their ratio to ours."""
    return [
        [
            f"**{name}**" if name == "pdkernels" else name,
            *(
                f"{shown(row['median_us'])} ({relative_to_ours(row, own)})" if row and own else "-"
                for row, own in zip(times, found["pdkernels"])
            ),
        ]
        for name, times in found.items()
    ]


def machine(rows: list[Row]) -> str:
    row = rows[0]
    return f"{row['device']}, {row['threads']} threads, torch {row['torch']}, pdkernels {row['pdkernels']}"
