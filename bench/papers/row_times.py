"""A picture of the times of forwards by their number of rows (`pdkernels.generation.row_times`).

`bench.papers.theory.tensor_budget` is the budget of rows from a data sheet.
"""

from __future__ import annotations

from pathlib import Path

from pdkernels.generation.row_times import RowTimes, fit_row_times, measure_row_times

__all__ = ["RowTimes", "fit_row_times", "measure_row_times", "plot_row_times"]


def plot_row_times(times: RowTimes, path: Path, *, title: str = "Seconds of a forward against its rows") -> None:
    """The measured points, the fit and its knee.

    Args:
        path: of the PNG.

    Raises:
        ImportError: no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    axis.plot(times.rows, [1e3 * second for second in times.seconds], "o", color="#4c78a8", label="measured, median")
    fitted = [1e3 * max(times.flat, times.start + times.slope * count) for count in times.rows]
    axis.plot(times.rows, fitted, color="#777777", linewidth=1.2, label="max(floor, line)")
    if times.rows[0] < times.knee < times.rows[-1]:
        axis.axvline(times.knee, color="#c44e52", linewidth=1, linestyle=":")
        axis.annotate(
            f"knee at {times.knee:.0f} rows",
            (times.knee, 1e3 * times.flat),
            (6, -14),
            textcoords="offset points",
            color="#c44e52",
            fontsize=9,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(times.rows, [str(count) for count in times.rows])
    axis.set(xlabel="rows", ylabel="milliseconds", ylim=(0, None))
    axis.set_title(title, loc="left", fontsize=11)
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
