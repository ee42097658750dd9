"""The table of a sweep that `python -m pdkernels eval --sweep --json` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.gpu_report import table
from bench.tables import machine, share

RESULTS = Path(__file__).parent / "results/cpu"
SWEEPS = {
    name: RESULTS / f"evaluation_{name.replace(' ', '_')}.json"
    for name in ("deep", "deep sampled", "trimode", "trimode batch 8")
}
"""The tables and their files."""


def evaluation_sweep(path: Path) -> str:
    """What is right, forwards and seconds per prompt, and the speed over the cheapest baseline that is right as often."""
    if not path.exists():
        return "not measured"
    found: dict[str, Any] = json.loads(path.read_text())
    facts = found["facts"]
    against = {(one["model"], one["label"]): one for one in found["comparisons"]}
    lines = []
    for row in found["rows"]:
        one = against.get((row["model"], row["label"]))
        speed = "-" if one is None or one["speedup"] is None else "{:.2f}x ({:.2f} to {:.2f})".format(*one["speedup"])
        lines.append(
            [
                row["label"],
                share(row["right"], row["problems"]),
                f"{row['forwards'] / row['problems']:.1f}",
                f"{row['seconds'] / row['problems']:.3f}",
                f"{row['tokens_per_second']:,.0f}",
                speed,
                "-" if one is None or one["baseline"] is None else one["baseline"],
            ]
        )
    header = [
        f"{facts['problems']} prompts, batch size {facts['batch_size']}",
        "right (95 % interval)",
        "forwards per prompt",
        "seconds per prompt",
        "tokens/s",
        "speed (95 % interval)",
        "over",
    ]
    return f"{table(header, lines)}\n\n{machine([facts])}"
