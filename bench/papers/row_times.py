"""Measures the time of a forward by its number of rows on this device, and the knee where rows stop being free.

Source: "Jacobi Forcing", appendix D (figure 5): block size times candidates is bounded by the number of rows whose forward takes
as long as that of one row. `bench.papers.theory.tensor_budget` is the same number from a data sheet.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdkernels._validation import check

_OP = "papers.row_times"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class RowTimes(NamedTuple):
    """Seconds of forwards, and ``max(flat, start + slope * rows)`` fitted to them."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    """Median of each size."""
    flat: float
    start: float
    slope: float

    @property
    def knee(self) -> float:
        """Rows where the fitted line leaves the floor; infinite if it never does.

        >>> fit_row_times([1, 2, 4, 8, 16], [3.0, 3.0, 3.0, 3.0, 3.0]).knee
        inf
        """
        return max(1.0, (self.flat - self.start) / self.slope) if self.slope > 0 else math.inf

    def budget(self, slack: float = 0.1) -> int:
        """The most rows for which this and all smaller measured numbers cost at most ``1 + slack`` times the first.

        >>> fit_row_times([1, 2, 4, 8], [1.0, 1.05, 1.2, 1.05]).budget()
        2
        """
        found = self.rows[0]
        for count, seconds in zip(self.rows, self.seconds):
            if seconds > (1 + slack) * self.seconds[0]:
                break
            found = count
        return found

    def as_json(self) -> dict[str, Any]:
        """All fields, the knee and the budget as plain values; an infinite knee is None."""
        knee = self.knee if math.isfinite(self.knee) else None
        return {**self._asdict(), "knee": knee, "budget": self.budget()}


def fit_row_times(rows: Sequence[int], seconds: Sequence[float]) -> RowTimes:
    """Fits a floor and a line to measured times: the split of the points that leaves the least squared error, relative to the times.

    Args:
        rows: ascending.
        seconds: of one forward over that many rows.

    Raises:
        ValueError: fewer than two points, rows that do not ascend, a time that is not positive.

    Example:
        >>> fit = fit_row_times([1, 2, 4, 8, 16, 32], [6.0, 6.0, 6.0, 6.0, 9.0, 17.0])   # max(6, 1 + rows / 2)
        >>> round(fit.flat, 6), round(fit.start, 6), round(fit.slope, 6), round(fit.knee, 6), fit.budget()
        (6.0, 1.0, 0.5, 10.0, 8)
    """
    check(len(rows) == len(seconds) >= 2, _OP, "rows", "be two or more, with a time for each", len(rows))
    check(all(a < b for a, b in zip(rows, rows[1:])), _OP, "rows", "ascend", tuple(rows))
    check(all(second > 0 for second in seconds), _OP, "seconds", "be positive", min(seconds))
    best: tuple[float, float, float, float] | None = None
    for split in range(1, len(rows) + 1):
        flat = statistics.fmean(seconds[:split])
        for start, slope in _lines(rows[split:], seconds[split:], rows[split - 1], flat):
            fitted = (max(flat, start + slope * count) for count in rows)
            error = sum((a / b - 1) ** 2 for a, b in zip(fitted, seconds))
            if best is None or error < best[0] - 1e-15:
                best = (error, flat, start, slope)
    assert best is not None
    return RowTimes(tuple(rows), tuple(seconds), *best[1:])


def _lines(rows: Sequence[int], seconds: Sequence[float], last: int, flat: float) -> list[tuple[float, float]]:
    """Candidates for the line after a floor that ends at `last`: by least squares, and the one from the floor's end."""
    if not rows:
        return [(flat, 0.0)]
    found = []
    if len(rows) > 1:
        # Relative errors, so that the largest times do not dominate.
        weights = [1 / second**2 for second in seconds]
        total = sum(weights)
        mean = sum(w * x for w, x in zip(weights, rows)) / total
        height = sum(w * y for w, y in zip(weights, seconds)) / total
        slope = sum(w * (x - mean) * (y - height) for w, x, y in zip(weights, rows, seconds))
        slope /= sum(w * (x - mean) ** 2 for w, x in zip(weights, rows))
        found.append((height - slope * mean, slope))
    slope = (seconds[-1] - flat) / (rows[-1] - last)
    found.append((flat - slope * last, slope))
    return found


def measure_row_times(
    model: Any, rows: Sequence[int] = ROWS, *, prefix: int = 128, repeats: int = 15, batch: int = 1
) -> RowTimes:
    """Median seconds of forwards of a transformer over `rows` new rows that see each other and a cached prefix, logits included.

    Sizes take turns, so that other load on the machine affects all of them alike.

    Args:
        model: a `Transformer`; tokens do not matter.
        prefix: tokens in the cache.
        repeats: forwards of each size, after a warm-up.
        batch: sequences, each with that many rows.

    Example:
        >>> import pdkernels as pd
        >>> times = measure_row_times(pd.models.load("tiny-code"), (1, 8), prefix=16, repeats=3)
        >>> times.rows, all(second > 0 for second in times.seconds)
        ((1, 8), True)
    """
    from pdkernels.masks import full

    for name, value in (("prefix", prefix), ("repeats", repeats), ("batch", batch)):
        check(value >= 1, _OP, name, "be at least 1", value)
    device = model.device
    cache = model.new_cache(batch, prefix + max(rows))
    model(torch.ones(batch, prefix, dtype=torch.int64, device=device), cache=cache, rows=slice(prefix - 1, prefix))
    cache.commit_(torch.full((batch,), prefix, device=device))
    nothing = torch.zeros(batch, dtype=torch.int64, device=device)
    blocks = {count: torch.ones(batch, count, dtype=torch.int64, device=device) for count in rows}
    plans = {count: full(count).plan(64, 64, device) for count in rows}
    taken: dict[int, list[float]] = {count: [] for count in rows}
    for turn in range(repeats + 1):
        for count in rows:
            _wait(device)
            started = time.perf_counter()
            model(blocks[count], cache=cache, counts=nothing, mask=plans[count])
            _wait(device)
            if turn:
                taken[count].append(time.perf_counter() - started)
    return fit_row_times(list(rows), [statistics.median(taken[count]) for count in rows])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
