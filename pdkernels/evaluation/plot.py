"""The picture of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkernels._validation import check

# One colour per model, and a lighter one for its autoregressive decoding, the baseline.
_COLOURS = (
    ("#4c78a8", "#b7c9de"),
    ("#54a24b", "#bbdab7"),
    ("#e39c37", "#f4d7af"),
    ("#b279a2", "#e0c9da"),
    ("#777777", "#cccccc"),
)
_TITLES = {"sums": "Sums worked out digit by digit", "source": "Source text continued by 64 tokens"}


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens per forward on the left, speed on the right, a row of panels per task, bars grouped by model.

    Args:
        rows: the ``extra_info`` of `as_json`. Those without cost figures are left out.
        path: of the PNG.

    Raises:
        ValueError: no row with figures.
        ImportError: no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["speedup"] is not None]
    check(bool(rows), "evaluation.plot", "rows", "hold figures to draw", "none")
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    heights = [sum(row["task"] == task for row in rows) + len(models) for task in tasks]
    figure, grid = plt.subplots(
        len(tasks),
        2,
        figsize=(11.5, 1.1 + 0.27 * sum(heights) + 0.5 * len(tasks)),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    for (forwards, speed), task in zip(grid, tasks):
        part = [row for row in rows if row["task"] == task]
        _bars(forwards, part, models, "tokens_per_forward", "{:.2f}")
        _bars(speed, part, models, "speedup", "{:.2f}x")
        forwards.set_title(
            f"{_TITLES.get(task, task)}, {part[0]['problems']} prompts\n", fontsize=11, fontweight="bold", loc="left"
        )
        forwards.text(0, 1.01, "tokens per forward", transform=forwards.transAxes, fontsize=9)
        speed.text(0, 1.01, "speed: 1 is the same model, one token at a time", transform=speed.transAxes, fontsize=9)
        speed.set_yticklabels([])
    figure.supxlabel("The number after a method is its width: tokens of a block or draft.", fontsize=8.5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], models: Sequence[str], figure: str, form: str) -> None:
    """One panel: for each model its name and below it a bar per candidate."""
    ticks, names = [], []
    y, largest = 0.0, max(row[figure] for row in rows)
    for model in models:
        strong, light = _COLOURS[models.index(model) % len(_COLOURS)]
        own = [row for row in rows if row["model"] == model]
        if own:
            ticks.append(y)
            names.append(model)
            y += 1
        for row in own:
            axis.barh(y, row[figure], height=0.78, color=light if row["verdict"] == "is greedy" else strong)
            text = form.format(row[figure])
            if figure == "tokens_per_forward" and row["right"] is not None:
                text += f"   {row['right'] / row['problems']:.0%} right"
            white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            axis.text(row[figure] + 0.015 * largest, y, text, va="center", fontsize=8, bbox=white)
            ticks.append(y)
            names.append(row["candidate"])
            y += 1
    axis.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    axis.set(xlim=(0, 1.3 * largest), ylim=(y - 0.3, -0.6), yticks=ticks)
    axis.set_yticklabels(names, fontsize=8.5)
    for label in axis.get_yticklabels():
        if label.get_text() in models:
            label.set_fontweight("bold")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
