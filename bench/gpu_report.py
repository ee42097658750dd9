"""Tables and a picture of GPU measurements: every folder of `bench/results` whose JSON has floors.

One table per op: a row per candidate, a column per case, and the ratio of the floor to our time. The floor is the time of the necessary
memory traffic at the speed of a copy, or of the FLOPs at the rate of a matrix product, whichever is longer, both measured in the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NOTHING = "No GPU has been measured yet."


def load(folder: Path) -> list[Row]:
    """The ``extra_info`` of every benchmark that ran on a GPU, with its group and the floors of its run."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        read = json.loads(path.read_text())
        floors = read.get("machine_info", {}).get("gpu")
        for benchmark in read.get("benchmarks", []) if floors else []:
            facts = benchmark["extra_info"]
            if "timed_by" in facts:
                rows.append(
                    {**facts, "group": benchmark["group"], "floors": floors, "iqr_us": benchmark["stats"]["iqr"] * 1e6}
                )
    return rows


def folders(results: Path) -> Iterator[tuple[str, list[Row]]]:
    for folder in sorted(path for path in results.iterdir() if path.is_dir() and path.name != "local"):
        rows = load(folder)
        if rows:
            yield folder.name, rows


def floor_us(row: Row) -> float | None:
    """The shortest time that a row's op can take; None where nothing was counted."""
    floors, times = row["floors"], []
    if row.get("bytes_moved"):
        times.append(2 * row["bytes_moved"] / floors["copy_gb_per_s"] / 1e3)
    if row.get("flops"):
        times.append(row["flops"] / floors[f"{row.get('dtype', 'bf16')}_tflops"] / 1e6)
    return max(times, default=None)


def by_case(rows: list[Row]) -> dict[str, list[Row]]:
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row["group"].removesuffix(", cuda"), []).append(row)
    return cases


def name_of(row: Row) -> str:
    """The op, with its case if its benchmark has several."""
    part = next(
        (row[key] for key in ("kernel", "rule") if key in row), row.get("case") if row["op"] == "recurrence" else None
    )
    return row["op"] if part is None else f"{row['op']}: {part}"


def by_op(rows: list[Row]) -> dict[str, list[Row]]:
    ops: dict[str, list[Row]] = {}
    for row in rows:
        ops.setdefault(name_of(row), []).append(row)
    return ops


def ours(rows: list[Row]) -> Row | None:
    return next((row for row in rows if row["candidate"].startswith("pdkernels")), None)


def times_ours(row: Row, own: Row) -> float:
    """Each was timed in turn with the same baseline, at different times: only ratios to it may be compared."""
    return float(row["ratio_to_baseline"] / own["ratio_to_baseline"])


def is_peer(name: str) -> bool:
    """Whether a candidate or a baseline is another way to the same results."""
    return not name.startswith(("pdkernels", "memcpy", "a read of", "nothing"))


def best_peer(rows: list[Row]) -> float | None:
    """Time of the fastest other candidate or baseline, relative to ours. Where no candidate is named so, all are forms of ours."""
    own = ours(rows)
    found = [1 / row["ratio_to_baseline"] for row in ([own] if own else rows) if is_peer(row["baseline"])]
    found += [times_ours(row, own) for row in rows if own and is_peer(row["candidate"])]
    return min(found, default=None)


def baseline_cells(cases: list[list[Row]]) -> list[str]:
    """A row with the baseline's time, which was taken in turn with each candidate."""
    firsts = [ours(found) or found[0] for found in cases]
    name = firsts[0]["baseline"]
    cells = [f"{row['baseline_median_us']:,.1f} ({1 / row['ratio_to_baseline']:.2f}x)" for row in firsts]
    return [f"{name}, the baseline", *cells]


def nearness(rows: list[Row]) -> float | None:
    """The floor's time divided by ours."""
    own = ours(rows)
    floor = None if own is None else floor_us(own)
    return floor / own["median_us"] if own and floor else None


def table(header: list[str], lines: list[list[str]]) -> str:
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, align, *lines])


def op_table(rows: list[Row]) -> str:
    cases = by_case(rows)
    lines = []
    for candidate in dict.fromkeys(row["candidate"] for row in rows):
        cells = []
        for found in cases.values():
            row, own = next((row for row in found if row["candidate"] == candidate), None), ours(found)
            first = own or found[0]  # of several forms of ours the first
            relative = f" ({times_ours(row, first):.2f}x)" if row else ""
            launched = "*" if row and row["timed_by"] == "calls" else ""
            cells.append(f"{row['median_us']:,.1f} ± {row['iqr_us'] / 2:,.1f}{launched}{relative}" if row else "-")
        lines.append([f"**{candidate}**" if candidate.startswith("pdkernels") else candidate, *cells])
    candidates = {row["candidate"] for row in rows}
    if {row["baseline"] for row in rows}.isdisjoint(candidates):
        lines.append(baseline_cells(list(cases.values())))
    parts = [nearness(found) for found in cases.values()]
    if any(parts):
        lines.append(["floor's time by ours", *(f"{part:.0%}" if part else "-" for part in parts)])
    return table(["µs (times ours)", *cases], lines)


def machine(rows: list[Row]) -> str:
    row, floors = rows[0], rows[0]["floors"]
    facts = [f"copy {floors['copy_gb_per_s']:,.0f} GB/s read and written", f"read {floors['read_gb_per_s']:,.0f} GB/s"]
    facts += [f"{name} product {floors[f'{name}_tflops']:,.0f} TFLOP/s" for name in ("bf16", "fp32")]
    facts += [f"shortest launch {floors['shortest_launch_us']} µs"] if "shortest_launch_us" in floors else []
    return f"{row['device']}, torch {row['torch']}, pdkernels {row['pdkernels']}; measured in the same run: {', '.join(facts)}."


def span(values: list[float | None], form: str) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    low, high = (form.format(edge) for edge in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def summary(results: Path) -> str:
    """A line for each op over all cases: the fastest peer relative to ours, and the floor relative to ours."""
    parts = []
    for _, rows in folders(results):
        lines = []
        for op, own in by_op(rows).items():
            cases = by_case(own).values()
            lines.append(
                [
                    op,
                    str(len(cases)),
                    span([best_peer(c) for c in cases], "{:.2f}x"),
                    span([nearness(c) for c in cases], "{:.0%}"),
                ]
            )
        parts.append(f"{machine(rows)}\n\n{table(['', 'cases', 'fastest peer, times ours', 'floor, by ours'], lines)}")
    return "\n\n".join(parts) or NOTHING


def pages(results: Path) -> str:
    """Everything, op by op."""
    parts = []
    for _, rows in folders(results):
        parts.append(
            f"{machine(rows)} ± is half the interquartile range. *: calls by the host, not replays of a graph."
        )
        parts += [f"**{op}**\n\n{op_table(own)}" for op, own in by_op(rows).items()]
    return "\n\n".join(parts) or NOTHING


def plot(results: Path, images: Path) -> None:
    """Time of the fastest peer, relative to ours, for every case: ``bench_<folder>.png``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for folder, rows in folders(results):
        ops = by_op(rows)
        figure, axis = plt.subplots(figsize=(9, 0.35 * len(ops) + 1.2), layout="constrained")
        for y, own in enumerate(ops.values()):
            values = [value for value in map(best_peer, by_case(own).values()) if value is not None]
            axis.plot(values, [y] * len(values), "o", color="#1f77b4", alpha=0.6)
        axis.axvline(1, color="#d62728", linewidth=1)
        axis.set(
            xscale="log",
            xlabel="fastest peer, times ours; a dot for each case",
            yticks=range(len(ops)),
            yticklabels=list(ops),
        )
        low, high = axis.get_xlim()
        powers = [2.0**n for n in range(-6, 11) if low <= 2.0**n <= high]
        axis.set_xticks(powers, [f"{power:g}x" for power in powers])
        axis.minorticks_off()
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(rows[0]["device"])
        images.mkdir(parents=True, exist_ok=True)
        figure.savefig(images / f"bench_{folder}.png", dpi=110)
        plt.close(figure)
