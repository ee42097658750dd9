"""The plots in the README and the docs, drawn from benchmark rows."""

from __future__ import annotations

from pathlib import Path

from bench.rows import Row, best_settings, family
from pdkernels.evaluation import plot, plot_masked, plot_recurrent


def kv_commit(rows: list[Row], path: Path) -> None:
    """Commit times of all candidates, logarithmic, the copy of the same bytes as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["op"] == "kv_commit_" and row["batch"] == 1]
    groups = list(dict.fromkeys(row["accepted"] for row in rows))
    figure, axes = plt.subplots(1, len(groups), figsize=(11, 3.2), sharey=True, layout="constrained")
    for axis, accepted in zip(axes, groups):
        part = [row for row in rows if row["accepted"] == accepted]
        colours = ["#1f77b4" if row["candidate"].startswith("pdkernels") else "#bbbbbb" for row in part]
        axis.barh([row["candidate"] for row in part], [row["median_us"] for row in part], color=colours)
        axis.axvline(part[0]["baseline_median_us"], color="#d62728", linewidth=1, label="memcpy of the same bytes")
        axis.set(
            xscale="log", xlim=(10, 1e6), xlabel="µs (median)", title=f"{accepted} of {part[0]['drafted']} accepted"
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    axes[-1].legend(loc="lower right", frameon=False, fontsize=8)
    figure.suptitle("kv_commit_, 36 layers x [1, 4096, 8, 128] bf16")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def block_sparse_attention(rows: list[Row], path: Path) -> None:
    """Times of all candidates in bf16 with heads of 128, forward above and with backward below."""
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
    figure, grid = plt.subplots(2, max(map(len, passes)), figsize=(13, 5.2), squeeze=False, layout="constrained")
    for axes, cases in zip(grid, passes):
        for axis in axes[len(cases) :]:
            axis.set_visible(False)
        for axis, case in zip(axes, cases):
            part = [row for row in rows if row["case"] == case][::-1]
            colours = ["#1f77b4" if row["candidate"] == "pdkernels" else "#bbbbbb" for row in part]
            bars = axis.barh(
                [row["candidate"] for row in part], [row["median_us"] / 1e3 for row in part], color=colours
            )
            axis.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
            axis.set_xlabel("ms (median)", fontsize=8)
            axis.set_title(case, fontsize=10)
            axis.margins(x=0.15)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def evaluations(rows: list[Row], images: Path) -> None:
    """The pictures that the command line draws."""
    for name, suffix, draw in (
        ("transformer", "", plot),
        ("recurrent", "_recurrent", plot_recurrent),
        ("masked", "_masked", plot_masked),
    ):
        own = [row for row in rows if family(row) == name]
        if own:
            draw(own, images / f"bench_evaluation{suffix}.png")


GROUPS = {
    "transformer": ("Same tokens as greedy decoding", "#e39c37"),
    "recurrent": ("Recurrent depth, no less accurate", "#54a24b"),
    "masked": ("Masked diffusion, no less accurate", "#4c78a8"),
}


def headline(rows: list[Row], path: Path) -> None:
    """The fastest setting of each method that is right on sums at least as often as its baseline, whose speed is 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if family(row) and row["task"] == "sums"]
    figure, axis = plt.subplots(figsize=(9, 4.6), layout="constrained")
    y, names = 0.0, {}
    for name, (title, colour) in GROUPS.items():
        own = [row for row in rows if family(row) == name and (row["lossless"] or name != "transformer")]
        axis.text(
            0,
            y,
            title,
            fontsize=10,
            fontweight="bold",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
        for row in fastest(own):
            y += 1
            names[y] = row["method"]
            axis.barh(y, row["speedup"], height=0.72, color=colour)
            label = f"{row['speedup']:.2f}x"
            if name != "recurrent":  # there recurrences are saved, not forwards
                label += f"   {row['tokens_per_forward']:.1f} tokens per forward"
            axis.text(row["speedup"] + 0.15, y, label, fontsize=9, va="center")
        y += 1.4
    axis.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    axis.set(xlim=(0, 22.5), ylim=(y - 0.7, -0.7), yticks=list(names), yticklabels=list(names.values()))
    axis.set_xlabel("speed on sums, one CPU thread; 1 is the same model at one token per forward", fontsize=9)
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
