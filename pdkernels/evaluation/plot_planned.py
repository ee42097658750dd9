"""Draws an evaluation of plans: Figures 2 and 3 of Planned Diffusion in miniature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkernels._validation import check

_COLOURS = {False: "#4c78a8", True: "#e39c37", None: "#777777"}
_NAMES = {False: "dense", True: "sparse", None: "token by token"}
_PHASES = {"plan": "#b279a2", "chunks": "#4c78a8", "refresh": "#54a24b"}
_PLAIN = {"steps_ratio": 1.0}


def plot_planned(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Right orders against the critical path, the critical path by phase, models without topics or syncs, length
    factors.

    Args:
        rows: the ``extra_info`` of `planned_json`. Of several batch sizes, the one with the most rows is drawn. If
            several models plan, the one with the most settings comes first, and the others are drawn next to it as
            ablations. Models without plans are the autoregressive baseline.
        path: of the PNG.

    Raises:
        ValueError: no row of a model that plans.
        ImportError: no matplotlib.
    """
    check(bool(rows), "evaluation.plot_planned", "rows", "hold a model that plans", "none")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # One point for each setting, for the batch size with the most settings.
    size, _ = Counter(row["batch_size"] for row in rows).most_common(1)[0]
    rows = [row for row in rows if row["batch_size"] == size]
    planned = [row for row in rows if row["valid_plans"] is not None]
    baseline_rows = [row for row in rows if row["valid_plans"] is None]
    check(bool(planned), "evaluation.plot_planned", "rows", "hold a model that plans", "none")
    models = list(dict.fromkeys(row["model"] for row in planned))
    model_rows = [row for row in planned if row["model"] == models[0]]
    figure, axes = plt.subplots(2, 2, figsize=(11.5, 8), layout="constrained")
    (frontier, phases), (ablations, lengths) = axes
    _frontier(frontier, model_rows, baseline_rows)
    _phases(phases, model_rows, baseline_rows)
    _ablations(ablations, planned, models)
    _lengths(lengths, model_rows)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    count = f"{model_rows[0]['problems']} held-out prompts with {model_rows[0]['items'][1]} orders"
    figure.supxlabel(f"{models[0]}, {count}; lines at the points are 95 % intervals.", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _share(row: Mapping[str, Any]) -> float:
    right, count = row["items"]
    share: float = 100 * right / max(1, count)
    return share


def _spread(row: Mapping[str, Any]) -> list[list[float]]:
    """The interval below and above the share, for error bars."""
    low, high = (100 * end for end in row["interval"])
    return [[_share(row) - low], [high - _share(row)]]


def _of(rows: Sequence[Mapping[str, Any]], sparse: bool, option: str) -> list[Mapping[str, Any]]:
    """Rows that differ only in one option, in its order."""
    matching = [
        row for row in rows if row["settings"]["sparse"] is sparse and set(row["settings"]) - {"sparse"} == {option}
    ]
    return sorted(matching, key=lambda row: float(row["settings"][option]))


def _is_plain(row: Mapping[str, Any]) -> bool:
    return {name: value for name, value in row["settings"].items() if name != "sparse"} == _PLAIN


def _frontier(axis: Any, rows: Sequence[Mapping[str, Any]], baseline_rows: Sequence[Mapping[str, Any]]) -> None:
    for sparse in (False, True):
        for option, marker, style, name in (
            ("steps_ratio", "o", "-", "share of steps"),
            ("threshold", "^", ":", "threshold"),
        ):
            series = _of(rows, sparse, option)
            if not series:
                continue
            x = [row["critical_path"] for row in series]
            # The lower marker is larger, so that both are visible where they coincide.
            axis.plot(
                x, [_share(row) for row in series], style, marker=marker, color=_COLOURS[sparse],
                ms=6 if sparse else 10, label=f"{_NAMES[sparse]}, {name}",
            )  # fmt: skip
            for row in series:
                axis.errorbar(row["critical_path"], _share(row), yerr=_spread(row), color=_COLOURS[sparse], lw=0.7)
            if not sparse:
                continue
            if option == "threshold" and x[-1] - x[0] < 0.02 * max(x):  # one label where the points are one
                labels = [(series[-1], f"{series[0]['settings'][option]:g} to {series[-1]['settings'][option]:g}")]
            else:
                labels = [(row, f"{row['settings'][option]:g}") for row in series]
            for row, text in labels:
                at = (row["critical_path"], _share(row))
                axis.annotate(text, at, (6, -13), textcoords="offset points", fontsize=7.5)
    for row in baseline_rows:
        axis.errorbar(row["critical_path"], _share(row), yerr=_spread(row), marker="s", color=_COLOURS[None],
                      label=_NAMES[None], ls="none")  # fmt: skip
    axis.set(xlabel="critical path, forwards", ylabel="orders right, %", xlim=(0, None))
    axis.margins(y=0.15)
    axis.set_title("Quality and critical path (Figure 2 left, 3 right)", loc="left", fontsize=11)
    axis.legend(fontsize=8, frameon=False)


def _phases(axis: Any, rows: Sequence[Mapping[str, Any]], baseline_rows: Sequence[Mapping[str, Any]]) -> None:
    bars = [(f"{_NAMES[row['settings']['sparse']]}", row) for row in rows if _is_plain(row)]
    bars += [(_NAMES[None], row) for row in baseline_rows]
    for y, (_, row) in enumerate(bars):
        offset = 0.0
        for phase, colour in _PHASES.items():
            width = row["forwards"].get(phase, 0.0)
            axis.barh(y, width, left=offset, height=0.6, color=colour)
            if width >= 0.04 * max(each["critical_path"] for _, each in bars):
                axis.text(offset + width / 2, y, f"{width:.1f}", ha="center", va="center", fontsize=8, color="white")
            offset += width
        if offset == 0.0:
            axis.barh(y, row["critical_path"], height=0.6, color=_COLOURS[None])
        axis.text(row["critical_path"], y, f"  {row['critical_path']:.1f}", va="center", fontsize=8.5)
    axis.set(xlabel="forwards that wait for each other, mean", yticks=range(len(bars)), ylim=(len(bars) - 0.4, -0.6))
    axis.set_yticklabels([name for name, _ in bars])
    axis.set_xlim(0, 1.12 * max(row["critical_path"] for _, row in bars))
    handles = [axis.barh(0, 0, color=colour, label=phase) for phase, colour in _PHASES.items() if phase != "refresh"]
    axis.legend(handles=handles, fontsize=8, frameon=False, loc="upper right")
    axis.set_title("Critical path by phase (Figure 2 middle)", loc="left", fontsize=11)


def _ablations(axis: Any, planned: Sequence[Mapping[str, Any]], models: Sequence[str]) -> None:
    """Kinds of orders next to each other: without topics a model loses lists, without a sync lists of picks."""
    kinds = list(planned[0]["right"])
    sampled: Callable[[Mapping[str, Any]], bool] = lambda row: row["settings"].get("temperature") == 1.0  # noqa: E731
    compared = [row for row in planned if sampled(row)] or [row for row in planned if _is_plain(row)]
    names = []
    for slot, row in enumerate(compared):
        for number, kind in enumerate(kinds):
            right, count = row["right"][kind]
            colour = _COLOURS[row["settings"]["sparse"]]
            axis.bar(slot + 0.27 * (number - 1), 100 * right / max(1, count), width=0.24, color=colour,
                     alpha=(1.0, 0.65, 0.35)[number], label=kind if slot == 0 else None)  # fmt: skip
            axis.text(slot + 0.27 * (number - 1), 100 * right / max(1, count) + 1, f"{100 * right / max(1, count):.0f}",
                      ha="center", fontsize=7.5)  # fmt: skip
        model_name = "whole plans" if row["model"] == models[0] else row["model"].replace("-", " ")
        names.append(f"{model_name}\n{_NAMES[row['settings']['sparse']]}")
    axis.set(ylabel="right, %", ylim=(0, 125), xticks=range(len(compared)))
    axis.set_xticklabels(names, fontsize=7.5)
    axis.legend(fontsize=8, frameon=False, ncols=3, loc="upper center")
    drawn = ", drawn at temperature 1" if any(map(sampled, compared)) else ""
    axis.set_title(f"What plans need (Figure 3 left){drawn}", loc="left", fontsize=11)


def _lengths(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for sparse in (False, True):
        default_rows = [row for row in rows if row["settings"]["sparse"] is sparse and _is_plain(row)]
        points = [(1.0, row) for row in default_rows]
        points += [(float(row["settings"]["length_scale"]), row) for row in _of(rows, sparse, "length_scale")]
        points.sort(key=lambda each: each[0])
        axis.plot([x for x, _ in points], [_share(row) for _, row in points], "o-", color=_COLOURS[sparse],
                  label=_NAMES[sparse])  # fmt: skip
        for x, row in points:
            axis.errorbar(x, _share(row), yerr=_spread(row), color=_COLOURS[sparse], lw=0.7)
            if not sparse:
                axis.annotate(
                    f"{row['critical_path']:.0f} forwards", (x, _share(row)), (5, -12 if _share(row) > 20 else 6),
                    textcoords="offset points", fontsize=7.5,
                )  # fmt: skip
    axis.set(xlabel="lengths, as multiples of those in the plan", ylabel="orders right, %", ylim=(0, 105))
    axis.set_title("Factor of lengths (Figure 3 middle)", loc="left", fontsize=11)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
