"""The common layout of pictures of candidates: accuracy, tokens per forward, speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkernels.decoding.method import WINGS
from pdkernels.decoding.methods import METHODS
from pdkernels.evaluation.planned import interval

NAMES = {name: method.title for name, method in METHODS.items()}
"""The names of methods in pictures."""

_GREY = "#8c8c8c"
_COLOURS = ("#4c78a8", "#b279a2", "#e39c37", "#54a24b", "#c44e52")


def _coloured() -> dict[str, str]:
    """A colour for each method, in the order of its wing; the baseline is grey."""
    colours: dict[str, str] = {}
    for wing in WINGS:
        names = [name for name, method in METHODS.items() if method.wing == wing]
        colours |= {name: _COLOURS[(index - 1) % len(_COLOURS)] if index else _GREY for index, name in enumerate(names)}
    return colours


COLOURS = _coloured()
"""Colours of the methods, the same in all pictures."""

_OPTIONS = {
    "block_size": "blocks of {}",
    "steps": "{} steps",
    "threshold": "threshold {}",
    "factor": "factor {}",
    "recurrences": "r = {}",
    "inner_recurrence": "r' = {}",
    "draft_recurrences": "drafts of r = {}",
    "criterion": "by {}",
    "max_wavefront": "wave of {}",
    "tau_min": "τ min {}",
    "tau_high": "τ high {}",
    "max_exploration": "slow steps {}",
    "prompt_interval": "feature cache",
}
_VALUES = {("cache", "none"): "no cache", ("cache", "prefix"): "prefix cache", ("cache", "dual"): "dual cache"}
_SILENT = {"gen_interval", "transfer_ratio", "window"}  # the label includes their options
_TITLES = {
    "sums": "Sums worked out digit by digit",
    "chains": "Chains of links followed to their ends",
    "source": "Source text continued by 64 tokens",
}
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def friendly(method: str, width: int | None, settings: Mapping[str, Any]) -> str:
    """A candidate's name in a picture.

    >>> friendly("jacobi", 16, {}), friendly("recurrent_static", None, {"recurrences": 4})
    ('Jacobi, 16', 'fixed depth, r = 4')
    >>> friendly("fast_dllm", None, {"block_size": 16, "cache": "dual", "threshold": None, "factor": 0.2})
    'Fast-dLLM, blocks of 16, dual cache, factor 0.2'
    """
    labels = [NAMES.get(method, method.replace("_", " "))] + ([] if width is None else [str(width)])
    for option, value in settings.items():
        if (option, value) in _VALUES:
            labels.append(_VALUES[option, value])
        elif value is not None and option not in _SILENT:
            labels.append(_OPTIONS.get(option, option.replace("_", " ") + " {}").format(value))
    return ", ".join(labels)


def plot_rows(rows: Sequence[Mapping[str, Any]], path: Path, note: str = "", *, forwards: bool = True) -> None:
    """Panels side by side for each task, a row for each candidate, under the names of their models.

    Accuracy is a dot with a 95 % interval, and is left out for tasks without right answers; speed has its quartiles
    over prompts. Tokens per forward are left out without `forwards`, for methods that save recurrences, whose bars
    would all be equal.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    models_of = {task: [row["model"] for row in rows if row["task"] == task] for task in tasks}
    heights = [1.1 + 0.27 * (len(names) + len(set(names))) for names in models_of.values()]
    figure = plt.figure(figsize=(12.5, sum(heights) + 0.25), layout="constrained")
    panels = figure.subfigures(len(tasks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, task in zip(panels, tasks):
        task_rows = [row for row in rows if row["task"] == task]
        judged = all(row["right"] is not None for row in task_rows)
        axes = panel.subplots(1, 1 + judged + forwards, sharey=True, squeeze=False)[0]
        heights, labels = _heights(task_rows, models)
        if judged:
            _shares(axes[0], task_rows, heights)
        if forwards:
            _bars(axes[-2], task_rows, heights, "tokens_per_forward", "{:.2f}", "tokens per forward")
        _bars(axes[-1], task_rows, heights, "speedup", "{:.2f}x", "speed; 1: the model's baseline")
        axes[0].set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=8.5)
        for label, (_, text) in zip(axes[0].get_yticklabels(), labels):
            label.set_fontweight("bold" if text in models else "normal")
        axes[0].set_ylim(max(heights) + 0.6, -0.6)
        for axis in axes:
            axis.tick_params(axis="y", length=0)
            axis.tick_params(axis="x", labelsize=8)
            axis.spines[["top", "right", "left"]].set_visible(False)
        title = f"{_TITLES.get(task, task)}, {task_rows[0]['problems']} prompts"
        panel.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    if note:
        figure.supxlabel(note, fontsize=8.5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _heights(rows: Sequence[Mapping[str, Any]], models: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights of the rows, and the labels on the left."""
    heights = [0.0] * len(rows)
    labels: list[tuple[float, str]] = []
    y = 0.0
    for model in models:
        indices = [number for number, row in enumerate(rows) if row["model"] == model]
        if indices:
            labels.append((y, model))
        for number in indices:
            y += 1
            row = rows[number]
            heights[number] = y
            labels.append((y, friendly(row["method"], row.get("width"), row.get("settings") or {})))
        y += 1 if indices else 0
    return heights, labels


def _shares(axis: Any, rows: Sequence[Mapping[str, Any]], heights: Sequence[float]) -> None:
    for row, y in zip(rows, heights):
        low, high = interval(row["right"], row["problems"])
        share = row["right"] / row["problems"]
        colour = COLOURS.get(row["method"], _GREY)
        axis.plot([100 * low, 100 * high], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
        axis.plot([100 * share], [y], "o", color=colour, markersize=5)
        axis.text(103, y, f"{share:.0%}", va="center", fontsize=8)
    axis.set(xlim=(0, 116), xticks=range(0, 101, 25))
    axis.set_title("right, % with 95 % interval", fontsize=9, loc="left")


def _bars(
    axis: Any, rows: Sequence[Mapping[str, Any]], heights: Sequence[float], figure: str, form: str, title: str
) -> None:
    ends = []
    axis.axvline(1, color="#444444", linewidth=0.8, linestyle=":", zorder=0)
    for row, y in zip(rows, heights):
        value, end = row[figure], row[figure]
        axis.barh(y, value, height=0.74, color=COLOURS.get(row["method"], _GREY))
        quartiles = row.get("speedup_quartiles") if figure == "speedup" else None
        if quartiles:
            axis.plot(quartiles, [y, y], color="#333333", linewidth=1.2)
            end = max(end, quartiles[1])
        ends.append(end)
    for value, y, end in zip((row[figure] for row in rows), heights, ends):
        axis.text(end + 0.02 * max(ends), y, form.format(value), va="center", fontsize=8, bbox=_WHITE)
    axis.set_xlim(0, 1.18 * max(ends))
    axis.set_title(title, fontsize=9, loc="left")
