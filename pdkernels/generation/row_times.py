"""The time of a forward by its number of rows on this device, and the knee where rows stop being free.

Source: "Jacobi Forcing", appendix D (figure 5): block size times candidates is bounded by the number of rows whose
forward takes as long as that of one row.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple
from weakref import finalize

import torch

from pdkernels._validation import check

_OP = "generation.row_times"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class RowTimes(NamedTuple):
    """Seconds of forwards, and ``max(flat, start + slope * rows)`` fitted to them."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    """Median of each size."""
    flat: float
    start: float
    slope: float
    sequence: float = 0.0
    """Seconds that a row of another sequence takes longer than another row of the same one, where that was measured."""
    packing: float = 0.0
    """Seconds that a forward takes longer if its sequences have different numbers of rows, where that was measured."""

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
        budget = self.rows[0]
        for count, seconds in zip(self.rows, self.seconds):
            if seconds > (1 + slack) * self.seconds[0]:
                break
            budget = count
        return budget

    def at(self, rows: int) -> float:
        """The fitted seconds of a forward over that many rows.

        >>> fit_row_times([1, 2, 4, 8, 16, 32], [6.0, 6.0, 6.0, 6.0, 9.0, 17.0]).at(20)
        11.0
        """
        return max(self.flat, self.start + self.slope * rows)

    def between(self, rows: int) -> float:
        """The measured seconds, for other numbers of rows on the line between their neighbours, or along the last one.

        >>> fit_row_times([1, 2, 4, 8], [5.0, 6.0, 8.0, 16.0]).between(6)
        12.0
        """
        right = min(max(bisect.bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (a, b), (x, y) = self.rows[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return x + (y - x) * (rows - a) / (b - a)

    def as_json(self) -> dict[str, Any]:
        """All fields, the knee and the budget as plain values; an infinite knee is None."""
        knee = self.knee if math.isfinite(self.knee) else None
        return {**self._asdict(), "knee": knee, "budget": self.budget()}


def fit_row_times(rows: Sequence[int], seconds: Sequence[float]) -> RowTimes:
    """Fits a floor and a line to measured times: the split of the points that leaves the least squared error, relative
    to the times.

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
    lines = []
    if len(rows) > 1:
        # Relative errors, so that the largest times do not dominate.
        weights = [1 / second**2 for second in seconds]
        total = sum(weights)
        mean = sum(w * x for w, x in zip(weights, rows)) / total
        height = sum(w * y for w, y in zip(weights, seconds)) / total
        slope = sum(w * (x - mean) * (y - height) for w, x, y in zip(weights, rows, seconds))
        slope /= sum(w * (x - mean) ** 2 for w, x in zip(weights, rows))
        lines.append((height - slope * mean, slope))
    slope = (seconds[-1] - flat) / (rows[-1] - last)
    lines.append((flat - slope * last, slope))
    return lines


def measure_row_times(
    model: Any, rows: Sequence[int] = ROWS, *, prefix: int = 128, repeats: int = 15, batch: int = 1
) -> RowTimes:
    """Median seconds of forwards over `rows` new rows after a cached prefix, logits included.

    Sizes take turns, so that other load on the machine affects all of them alike. On a CPU with one thread it is the
    time of that thread.

    Args:
        model: a causal one; tokens do not matter.
        prefix: tokens in the cache.
        repeats: forwards of each size, after a warm-up.
        batch: sequences, each with that many rows.

    Example:
        >>> import pdkernels as pd
        >>> times = measure_row_times(pd.models.load("tiny-code"), (1, 8), prefix=16, repeats=3)
        >>> times.rows, all(second > 0 for second in times.seconds)
        ((1, 8), True)
    """
    seconds = _row_seconds(model, rows, prefix, repeats, batch)
    return fit_row_times(list(rows), [statistics.median(seconds[count]) for count in rows])


def _row_seconds(
    model: Any,
    rows: Sequence[int],
    prefix: int,
    repeats: int,
    batch: int,
    patience: float = math.inf,
    packed: bool = False,
) -> dict[int, list[float]]:
    """Seconds of each forward, by the rows of each sequence, or with `packed` by those of the first, beside one of each
    other. Sizes get no second one after `patience` seconds."""
    for name, value in (("prefix", prefix), ("repeats", repeats), ("batch", batch)):
        check(value >= 1, _OP, name, "be at least 1", value)
    cache = model.new_cache(batch, prefix + max(rows))
    device = cache.lengths.device
    # The time of the only thread does not depend on what else runs on the machine.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    last = torch.full((batch, 1), prefix - 1, device=device)
    with torch.inference_mode():
        model(torch.ones(batch, prefix, dtype=torch.int64, device=device), cache=cache, rows=last)
        cache.commit_(torch.full((batch,), prefix, device=device))
        blocks, packing = dict[int, torch.Tensor](), dict[int, dict[str, torch.Tensor]]()
        for count in rows:
            shape = (1, count + batch - 1) if packed else (batch, count)
            blocks[count] = torch.ones(shape, dtype=torch.int64, device=device)
            begins = torch.tensor([0, *range(count, count + batch)], device=device)
            packing[count] = {"cu_seqlens": begins} if packed else {}
        seconds: dict[int, list[float]] = {count: [] for count in rows}
        for turn in range(repeats + 1):
            if turn > 1 and sum(map(sum, seconds.values())) > patience:
                break
            for count in rows:
                _wait(device)
                started = clock()
                model(blocks[count], cache=cache, **packing[count])
                _wait(device)
                if turn:
                    seconds[count].append(clock() - started)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_kept: dict[str | None, RowTimes] = {}
_of_functions: dict[int, dict[type, dict[str | None, RowTimes]]] = {}
_SEVERAL = 8  # sequences with a row each
_PATIENCE = 2.0  # seconds: small models have all repeats, large ones a few
_FRESH, _KEPT = 3600.0, 7 * 86400.0
"""Seconds for which a record is taken as it is, and after which it is forgotten."""


class _Record(NamedTuple):
    """The least seconds of forwards, as a file keeps them."""

    rows: list[int]
    seconds: list[float]
    several: float
    """Of one row of each of some sequences."""
    packed: float
    """Of two rows of the first of them and one of each other, without padding; `several` where that cannot be."""
    first: float
    """Of the clock, when these rows were first measured."""
    last: float

    @classmethod
    def of(cls, values: Any) -> _Record | None:
        """From a file; None: damaged, or of an earlier version."""
        try:
            record = cls(*values)
            numbers = [*record.seconds, *record[2:]]
            valid = len(record.rows) == len(record.seconds) >= 2 and all(0 < each < math.inf for each in numbers)
            return record if valid else None
        except (TypeError, ValueError):
            return None

    def least(self, other: _Record) -> _Record:
        """Of both: what else runs on a machine makes a forward take longer, never shorter."""
        if self.rows != other.rows:
            return other
        seconds = list(map(min, self.seconds, other.seconds))
        several, packed = min(self.several, other.several), min(self.packed, other.packed)
        return _Record(self.rows, seconds, several, packed, self.first, other.last)

    def times(self) -> RowTimes:
        times = fit_row_times(self.rows, list(accumulate(self.seconds, max)))  # more rows never take less time
        further = max(0.0, self.several - times.between(_SEVERAL))
        packing = max(0.0, self.packed - times.between(_SEVERAL + 1) - further)
        return times._replace(sequence=further / (_SEVERAL - 1), packing=packing)


def _measurable(model: Any) -> tuple[list[int], int]:
    """Numbers of rows that a model takes, and the tokens before them.

    >>> from types import SimpleNamespace
    >>> _measurable(SimpleNamespace(config=SimpleNamespace(max_positions=20)))
    ([1, 2, 4, 8], 12)
    """
    config = getattr(getattr(model, "model_itself", model), "config", None)
    limits = (getattr(config, name, None) for name in ("max_positions", "max_position_embeddings"))
    limit = min((limit for limit in limits if isinstance(limit, int)), default=1 << 20)
    rows = [count for count in (1, 2, 4, 8, 16, 32) if count <= max(2, limit // 2)]
    return rows, max(1, min(128, limit - rows[-1]))


def kept_row_times(model: Any) -> RowTimes:
    """As `measure_row_times`, and `RowTimes.sequence`, for a model on this machine, once in a process: the result is kept in memory, and in a
    file of the user's cache folder.

    A process that finds a record there older than an hour measures again, and the file keeps the least of both, so that
    a busy machine is not remembered; a week after the first one it is replaced.

    Two models are the same here if they have the same sizes, dtype and formats of matrices. A function says nothing of
    these: its times are its own, and in no file.
    """
    name = _name_of(model)
    kept = _kept if name is not None else _of_function(model)
    if name not in kept:
        file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdkernels" / "step_minima.json"
        now, recorded = time.time(), None if name is None else _read(file).get(name)
        if recorded is not None and not 0 <= now - recorded.first < _KEPT:
            recorded = None
        if recorded is None or not 0 <= now - recorded.last < _FRESH:
            rows, prefix = _measurable(model)
            seconds = _row_seconds(model, rows, prefix, 7, 1, _PATIENCE)
            several = packed = min(_row_seconds(model, [1], prefix, 7, _SEVERAL, _PATIENCE)[1])
            if getattr(model, "packs_rows", False) and getattr(model, "device", None) == torch.device("cpu"):
                packed = min(_row_seconds(model, [2], prefix, 7, _SEVERAL, _PATIENCE, packed=True)[2])
            measured = _Record(list(seconds), list(map(min, seconds.values())), several, packed, now, now)
            recorded = measured if recorded is None else recorded.least(measured)
            if name is not None:
                _write(file, _read(file) | {name: recorded})  # others may have written meanwhile
        kept[name] = recorded.times()
    return kept[name]


def _holders(model: Any) -> list[Any]:
    """A model and what it wraps, the innermost last: down to what has parameters, or to what can be seen."""
    holders = [getattr(model, "model_itself", model)]
    while not hasattr(holders[-1], "named_parameters"):
        wrapped = getattr(holders[-1], "model", None)
        if wrapped is None or isinstance(wrapped, MethodType):  # a method is another object each time
            break
        holders.append(wrapped)
    return holders


def _of_function(model: Any) -> dict[str | None, RowTimes]:
    """The times of a model without parameters, and of what runs it in another way: as long as what it wraps is there."""
    for holder in reversed(_holders(model)):
        if id(holder) not in _of_functions:
            try:
                finalize(holder, _of_functions.pop, id(holder), None)
            except TypeError:  # it takes no weak reference
                continue
        return _of_functions.setdefault(id(holder), {}).setdefault(type(model), {})
    return {}


def _name_of(model: Any) -> str | None:
    """None: no parameters are to be seen."""
    holders = _holders(model)
    inner, module = holders[0], holders[-1]
    if not hasattr(module, "named_parameters"):
        return None
    tensors = *module.named_parameters(), *module.named_buffers()
    sizes = [(name, tuple(each.shape), str(each.dtype)) for name, each in tensors]
    shared = getattr(model, "shared", None)  # a matrix of the target's that a drafter reads
    sizes += [] if shared is None else [("shared", tuple(shared.shape), getattr(shared, "format", str(shared.dtype)))]
    device = getattr(inner, "device", torch.device("cpu"))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.processor()} {os.cpu_count()}"
    kinds = " ".join(type(each).__name__ for each in (model, inner, module))
    identity = f"{kinds} {inner.config} {sizes} {where} {torch.get_num_threads()} {torch.__version__}"
    return hashlib.sha256(identity.encode()).hexdigest()[:24]


def _read(file: Path) -> dict[str, _Record]:
    """What the file holds; nothing if it is missing or damaged."""
    try:
        records = {name: _Record.of(values) for name, values in json.loads(file.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}
    return {name: record for name, record in records.items() if record is not None}


def _write(file: Path, values: dict[str, _Record]) -> None:
    """Replaces the file as a whole; where that is not allowed, times are measured again in the next process."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(values))
        os.replace(unfinished, file)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
