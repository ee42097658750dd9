"""Results of a sweep: Pareto fronts of accuracy and cost, and each candidate beside the cheapest equal baseline."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdkernels._validation import check
from pdkernels.evaluation.plot_rows import COLOURS, NAMES, friendly
from pdkernels.evaluation.sweep import SweepRow

_OP = "evaluation.frontier"
_RESAMPLED = 2000
TOLERANCE = 0.03
"""A baseline counts as equally accurate if its accuracy is lower by at most this much."""


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the (cost, gain) points that are not dominated, by increasing cost; of equal points the first.

    >>> pareto([(3, 0.9), (1, 0.5), (2, 0.4), (4, 0.9)])
    [1, 0]
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1], index)):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def paired_difference(answers: Sequence[bool], baseline: Sequence[bool]) -> tuple[float, float, float]:
    """The difference in accuracy on the same prompts, with a 95 % interval (Agresti and Min, for matched pairs).

    Raises:
        ValueError: answers to other numbers of prompts, or to none.

    Example:
        >>> [round(value, 3) for value in paired_difference([True] * 9 + [False], [True] * 7 + [False] * 3)]
        [0.2, -0.1, 0.433]
        >>> paired_difference([True, False], [True, False])[0]
        0.0
    """
    check(len(answers) == len(baseline) > 0, _OP, "answers", "be for the same prompts", (len(answers), len(baseline)))
    gained = sum(a and not b for a, b in zip(answers, baseline))
    lost = sum(b and not a for a, b in zip(answers, baseline))
    count = len(answers) + 2
    middle = (gained - lost) / count
    half = 1.959964 * math.sqrt(max(0.0, (gained + lost + 1) - (gained - lost) ** 2 / count)) / count
    return (gained - lost) / len(answers), max(-1.0, middle - half), min(1.0, middle + half)


def paired_ratio(baseline: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """The sum of `baseline` over that of `seconds`, with a 95 % bootstrap interval over the pairs. The resampling is
    the same in every call.

    >>> paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    (2.0, 2.0, 2.0)
    """
    check(len(seconds) == len(baseline) > 0, _OP, "seconds", "be for the same batches", (len(baseline), len(seconds)))
    chance, count = random.Random(0), len(seconds)
    drawn = []
    for _ in range(_RESAMPLED):
        chosen = chance.choices(range(count), k=count)
        drawn.append(sum(baseline[index] for index in chosen) / sum(seconds[index] for index in chosen))
    drawn.sort()
    return sum(baseline) / sum(seconds), drawn[int(0.025 * _RESAMPLED)], drawn[int(0.975 * _RESAMPLED) - 1]


@dataclass(frozen=True)
class Comparison:
    """A candidate compared with baselines of its model, on the same prompts.

    Attributes:
        label: of the candidate.
        baseline: label of the cheapest baseline, in seconds, that is right as often, up to `TOLERANCE`, or None.
        difference: share of prompts that only the candidate has right minus that of this baseline, with a 95 %
            interval.
        speedup: seconds of this baseline over the candidate's, with its 95 % interval.
        own_baseline: label of the default baseline, as in the papers.
        own_speedup: the speedup against that one.
    """

    model: str
    label: str
    baseline: str | None
    difference: tuple[float, float, float] | None
    speedup: tuple[float, float, float] | None
    own_baseline: str
    own_speedup: tuple[float, float, float]


def compare(rows: Sequence[SweepRow], tolerance: float = TOLERANCE) -> list[Comparison]:
    """Compares every other row with the cheapest equal baseline of its model, and with the default baseline.

    A speedup over a needlessly slow baseline says little: fewer recurrences or fewer steps may be right as often.

    Args:
        rows: of `sweep`; the first of each model is its default baseline.
    """
    comparisons = []
    for row in rows:
        if row.baseline:
            continue
        baselines = [other for other in rows if other.model == row.model and other.baseline]
        equal = [other for other in baselines if other.share >= row.share - tolerance - 1e-9]
        cheapest = min(equal, key=lambda other: other.seconds, default=None)
        comparisons.append(
            Comparison(
                row.model,
                row.label,
                cheapest.label if cheapest else None,
                paired_difference(row.answers, cheapest.answers) if cheapest else None,
                paired_ratio(cheapest.batches, row.batches) if cheapest else None,
                baselines[0].label,
                paired_ratio(baselines[0].batches, row.batches),
            )
        )
    return comparisons


COSTS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "forwards": lambda row: row["forwards"] / row["problems"],
    "seconds": lambda row: row["seconds"] / row["problems"],
}
"""The costs of a JSON row, per prompt."""


def fronts(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """For each model and each of `COSTS` the labels on the front of right answers against that cost, cheapest first.

    Args:
        rows: `SweepRow.as_json` of each.
    """
    by_model: dict[str, dict[str, list[str]]] = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        model_rows = [row for row in rows if row["model"] == model]
        by_model[model] = {
            cost: [model_rows[index]["label"] for index in pareto([(of(row), row["right"]) for row in model_rows])]
            for cost, of in COSTS.items()
        }
    return by_model


def plot_frontier(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Right answers against forwards and against seconds, with 95 % intervals; a line joins the numbered front.

    Args:
        rows: `SweepRow.as_json` of each; one row of panels per model.
        path: of the PNG.

    Raises:
        ValueError: no rows.
        ImportError: no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, ScalarFormatter

    check(bool(rows), f"{_OP}.plot_frontier", "rows", "hold at least one", "none")
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = plt.subplots(
        len(models), 2, figsize=(11.5, 0.4 + 5.2 * len(models)), squeeze=False, sharey="row", layout="constrained"
    )
    for panels, model in zip(grid, models):
        model_rows = [row for row in rows if row["model"] == model]
        lowest = 100 * min(row["interval"][0] for row in model_rows)
        bottom = 10 * int(lowest // 10) - 3 if lowest > 40 else -3
        for axis, (cost, of) in zip(panels, COSTS.items()):
            _panel(axis, model_rows, of)
            costs = [of(row) for row in model_rows]
            if max(costs) > 8 * min(costs):
                axis.set_xscale("log")
                axis.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
                for told in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
                    told(ScalarFormatter())
            else:
                axis.set_xlim(0, 1.06 * max(costs))
            axis.set(xlabel=f"{cost} per prompt", ylim=(bottom, 103))
        panels[0].set_ylabel("% right")
        panels[0].set_title(f"{model}, {model_rows[0]['problems']} prompts, 95 % intervals", loc="left", fontsize=11)
        panels[1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis: Any, rows: Sequence[Mapping[str, Any]], of: Callable[[Any], float]) -> None:
    for method in dict.fromkeys(row["method"] for row in rows):
        method_rows = [row for row in rows if row["method"] == method]
        colour = COLOURS.get(method, "#777777")
        shares = [100 * row["right"] / row["problems"] for row in method_rows]
        ends = [[100 * end for end in row["interval"]] for row in method_rows]
        below = [max(0.0, share - low) for share, (low, _) in zip(shares, ends)]
        above = [max(0.0, high - share) for share, (_, high) in zip(shares, ends)]
        axis.errorbar(
            [of(row) for row in method_rows], shares, yerr=[below, above],
            fmt="D" if method_rows[0]["baseline"] else "o", color=colour, ecolor=colour, elinewidth=0.8, markersize=5,
            alpha=0.9, label=NAMES.get(method, method.replace("_", " ")),
        )  # fmt: skip
    front = [rows[index] for index in pareto([(of(row), row["right"]) for row in rows])]
    axis.plot(
        [of(row) for row in front],
        [100 * row["right"] / row["problems"] for row in front],
        color="#444444",
        linewidth=1,
        linestyle=":",
        zorder=0,
    )
    key = []
    for number, row in enumerate(front, 1):
        point = (of(row), 100 * row["right"] / row["problems"])
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
        axis.annotate(str(number), point, (6, 4), textcoords="offset points", fontsize=8, bbox=white)
        key.append(f"{number}  {friendly(row['method'], None, row['settings'])}")
    axis.text(0, -0.17, "\n".join(key), transform=axis.transAxes, va="top", fontsize=7.5, color="#444444")
    axis.spines[["top", "right"]].set_visible(False)
