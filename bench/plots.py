"""The plots in the README and the docs, drawn from benchmark rows."""

from __future__ import annotations

import json
from pathlib import Path

from bench.rows import Row, best_settings, family
from bench.sweep_report import SWEEPS
from pdkernels.evaluation import plot, plot_frontier, plot_masked, plot_recurrent
from pdkernels.evaluation.plot_rows import NAMES

OURS, OTHERS = "#4c78a8", "#9a9a9a"


def kv_commit(rows: list[Row], path: Path) -> None:
    """Commit times of all candidates as dots with their values, the copy of the same bytes as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["op"] == "kv_commit_" and row["batch"] == 1]
    groups = list(dict.fromkeys(row["accepted"] for row in rows))
    figure, axes = plt.subplots(1, len(groups), figsize=(12, 3.4), sharey=True, squeeze=False, layout="constrained")
    for axis, accepted in zip(axes[0], groups):
        part = [row for row in rows if row["accepted"] == accepted]
        copied = part[0]["baseline_median_us"]
        axis.axvline(copied, color="#c44e52", linewidth=1, zorder=0)
        axis.text(copied, -0.75, f"memcpy of the same bytes, {told(copied)}", fontsize=7.5, color="#c44e52", ha="left")
        for y, row in enumerate(part):
            ours = row["candidate"].startswith("pdkernels")
            axis.hlines(y, 10, row["median_us"], color="#e4e4e4", linewidth=1, zorder=0)
            axis.plot(row["median_us"], y, "o", color=OURS if ours else OTHERS, markersize=6)
            axis.text(
                row["median_us"] * 1.5,
                y,
                told(row["median_us"]),
                fontsize=8,
                va="center",
                fontweight="bold" if ours else "normal",
            )
        axis.set(xscale="log", xlim=(10, 6e6), ylim=(len(part) - 0.5, -1.1), xlabel="median, logarithmic")
        axis.set_xticks([1e1, 1e2, 1e3, 1e4, 1e5], ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms"], fontsize=8)
        axis.set_title(f"{accepted} of {part[0]['drafted']} accepted", fontsize=10, loc="left")
        axis.set_yticks(range(len(part)), [row["candidate"] for row in part], fontsize=8.5)
        axis.tick_params(axis="y", length=0)
        axis.minorticks_off()
        axis.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(
        "kv_commit_, 36 layers of (1, 4096, 8, 128) in bf16", fontsize=11, fontweight="bold", x=0.01, ha="left"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def told(microseconds: float) -> str:
    """A time with its unit.

    >>> told(28.4), told(1234.0), told(231000.0)
    ('28 µs', '1.2 ms', '231 ms')
    """
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.1f} ms" if microseconds < 1e5 else f"{microseconds / 1000:.0f} ms"


def block_sparse_attention(rows: list[Row], path: Path) -> None:
    """Times of all candidates in bf16 with heads of 128, forward above and with backward below, as multiples of ours on one scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [
        row
        for row in rows
        if row["op"] == "block_sparse_attention" and row["dtype"] == "bf16" and row["head_dim"] == 128
    ]
    rows = best_settings(rows)
    passes = [
        list(dict.fromkeys(row["case"] for row in rows if row["backward"] == backward)) for backward in (False, True)
    ]
    if not all(passes):
        return
    figure = plt.figure(figsize=(13, 6.0), layout="constrained")
    parts = figure.subfigures(2, 1)
    for part, cases, title in zip(parts, passes, ("Forward", "Forward and backward")):
        axes = part.subplots(1, len(cases), sharex=True, squeeze=False)[0]
        largest = 1.0
        for axis, case in zip(axes, cases):
            own = [row for row in rows if row["case"] == case]
            ours = next(row["median_us"] for row in own if row["candidate"] == "pdkernels")
            largest = max(largest, *(row["median_us"] / ours for row in own))
            axis.axvline(1, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
            for y, row in enumerate(own):
                times = row["median_us"] / ours
                axis.barh(y, times, height=0.7, color=OURS if row["candidate"] == "pdkernels" else OTHERS)
                factor = "" if times == 1 else f", {times:.1f}x"
                white = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
                text = f"{row['median_us'] / 1e3:.1f} ms{factor}"
                axis.text(times + 0.4, y, text, fontsize=7.5, va="center", bbox=white)
            axis.set_yticks(range(len(own)), [row["candidate"] for row in own], fontsize=7.5)
            axis.set_ylim(len(own) - 0.5, -0.5)
            axis.set_title(case_name(case), fontsize=9, loc="left")
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.tick_params(axis="y", length=0)
            axis.tick_params(axis="x", labelsize=7.5)
        axes[0].set_xlim(0, 1.5 * largest)
        part.supxlabel("median time over that of pdkernels", fontsize=8)
        part.suptitle(f"{title}, bf16, heads of 128", fontsize=11, fontweight="bold", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def case_name(case: str) -> str:
    """The title of a panel.

    >>> case_name("noise-aware 1152 d128 bf16 fwd")
    'noise-aware, 1152 tokens'
    """
    layout, tokens, *_ = case.split()
    return f"{layout}, {tokens} tokens"


def evaluations(rows: list[Row], images: Path) -> None:
    """The pictures that the command line draws."""
    for name, suffix, draw in (
        ("causal", "", plot),
        ("recurrent", "_recurrent", plot_recurrent),
        ("masked", "_masked", plot_masked),
    ):
        own = [row for row in rows if family(row) == name]
        if own:
            draw(own, images / f"bench_evaluation{suffix}.png")
    for name in ("deep", "trimode"):
        if SWEEPS[name].exists():
            plot_frontier(json.loads(SWEEPS[name].read_text())["rows"], images / f"bench_evaluation_{name}.png")


GROUPS = {
    "causal": ("Same tokens as greedy decoding", "#e39c37"),
    "recurrent": ("Recurrent depth on chains of links, no less accurate", "#54a24b"),
    "masked": ("Masked diffusion, no less accurate", "#4c78a8"),
}


def headline(rows: list[Row], path: Path) -> None:
    """The fastest setting of each method that is right at least as often as its baseline, whose speed is 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if family(row) and row["task"] in ("sums", "chains")]
    figure, axis = plt.subplots(figsize=(9, 4.6), layout="constrained")
    y, names = 0.0, {}
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for name, (title, colour) in GROUPS.items():
        own = [row for row in rows if family(row) == name and (row["lossless"] or name != "causal")]
        axis.text(0, y, title, fontsize=10, fontweight="bold", va="center", bbox=white)
        for row in fastest(own):
            y += 1
            names[y] = NAMES.get(row["method"], row["method"])
            axis.barh(y, row["speedup"], height=0.72, color=colour)
            end = row["speedup"]
            if row.get("speedup_quartiles"):
                axis.plot(row["speedup_quartiles"], [y, y], color="#333333", linewidth=1.2)
                end = max(end, row["speedup_quartiles"][1])
            label = f"{row['speedup']:.2f}x"
            if name != "recurrent":  # there recurrences are saved, not forwards
                label += f"   {row['tokens_per_forward']:.1f} tokens per forward"
            axis.text(end + 0.15, y, label, fontsize=9, va="center", bbox=white)
        y += 1.4
    axis.axvline(1, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
    axis.set(xlim=(0, 25), ylim=(y - 0.7, -0.7), yticks=list(names), yticklabels=list(names.values()))
    axis.set_xlabel(
        "speed on worked-out sums, one CPU thread; 1 is the same model at one token per forward; lines: quartiles over prompts",
        fontsize=9,
    )
    axis.tick_params(labelsize=9)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def fastest(rows: list[Row]) -> list[Row]:
    """The fastest row of each method, baselines left out, that is right at least as often as its model's baseline."""
    best: dict[str, Row] = {}
    for row in rows:
        baseline = next(r for r in rows if r["model"] == row["model"] and r["speedup"] == 1)
        if (
            row is baseline
            or row["speedup"] is None
            or row["right"] < baseline["right"]
            or row["method"] == baseline["method"]
        ):
            continue
        if row["method"] not in best or row["speedup"] > best[row["method"]]["speedup"]:
            best[row["method"]] = row
    return list(best.values())
