"""Tables of `bench.server_load`, for the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.gpu_report import table

RESULTS = Path(__file__).resolve().parent / "results/server_load.json"
HEAD = [
    "server",
    "new tokens a second",
    "of prompts",
    "ended",
    "first token, ms: p50",
    "p99",
    "gap: p50",
    "p99",
    "fairness",
    "MB",
]


def load_table(path: Path) -> str:
    """For each run a table with a line for each server, and its facts."""
    if not path.exists():
        return "not measured"
    return "\n\n".join(map(_run, json.loads(path.read_text()).values()))


def _run(run: dict[str, Any]) -> str:
    lines = [_line(name, one) for name, one in run["figures"].items()]
    slices = "one slice" if run["rounds"] == 1 else f"{run['rounds']} slices"
    facts = (
        f"{run['file']}, {run['rate']:g} requests a second, {slices} of {run['seconds']:g} s, {run['threads']} threads"
    )
    checked = sum(one["checked"] for one in run["figures"].values())
    compared = f"{checked} answers of ours compared" if checked else ""
    failed = "; ".join(
        f"{name}: {one['failed']} requests failed ({one['errors'][0]})"
        for name, one in run["figures"].items()
        if one["failed"]
    )
    failures = [f"{server} was not measured: {why[-200:]}" for server, why in run.get("failed", {}).items()]
    failed = "; ".join(part for part in (failed, *failures) if part)
    tried = "; ".join(_tried(server, each) for server, each in run["tried"].items() if each)
    tried = f"Settings tried, new tokens a second: {tried}." if tried else ""
    return "\n\n".join(
        [
            table(HEAD, lines),
            ", ".join(part for part in (facts, compared) if part) + f"; {run['machine']}",
            *(part for part in (tried, failed) if part),
        ]
    )


def _line(name: str, one: dict[str, Any]) -> list[str]:
    times = ["-" if ms is None else f"{ms:,.0f}" for ms in (*one["first_ms"], *one["gap_ms"])]
    counts = (
        _rounded(one["tokens_per_second"]),
        f"{one['prompt_tokens_per_second']:,.0f}",
        f"{one['done']} of {one['requests']}",
    )
    fairness = "-" if one["fairness"] is None else f"{one['fairness']:.2f}"
    shown = f"**{name}**" if name.startswith("pdkernels") else name
    return [shown, *counts, *times, fairness, f"{one['resident_mb']:,.0f}"]


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 20 else f"{number:.1f}"


def _tried(server: str, by_setting: dict[str, float | None]) -> str:
    shown = (f"{name} {'failed' if speed is None else _rounded(speed)}" for name, speed in by_setting.items())
    return f"{server}: {', '.join(shown)}"
