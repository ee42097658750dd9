"""What an H200 has timed of our kernels, beside what the model says of the same work."""

from __future__ import annotations

import json
from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

from bench.predict import gluon, statistics_figures
from bench.predict.device import RECORD, Device
from bench.predict.model import Attention, packed, product, speculative, statistics
from pdkernels import masks
from pdkernels.masks.tile_plan import TilePlan

SINGLE = RECORD / "single_runs.json"
VOCABULARY = 126464
LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Outputs and columns of the products of an 8B layer."""
NOISE_AWARE, QUADRATIC = "noise-aware 4608", "quadratic 16k"
FITTED = (NOISE_AWARE, "causal 8192")
"""Programs of few tiles, and of many."""
FORMATS = {"q4_0": ("half 4", "Q4_0"), "q8_0": ("half 8", "Q8_0"), "q4_k": ("super 4", "Q4_K")}
EARLIER = (32, 128, 4, 4)
"""The tiling of `linear` for few rows when its sum over a layer was timed: outputs, depth, warps, stages."""


class Comparison(NamedTuple):
    """Seconds of one work."""

    work: str
    measured: float
    predicted: float
    fits: str = ""
    """The numbers of the device that are fitted to this row; empty: it is held out."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def times() -> dict[tuple[str, str], float]:
    """Seconds by case and candidate: of our kernels, in the runs of the benchmarks and in single runs."""
    seconds = {}
    for path in sorted(RECORD.glob("benchmarks-*.json")):
        for benchmark in json.loads(path.read_text())["benchmarks"]:
            info, case = benchmark["extra_info"], benchmark["group"].removesuffix(", cuda")
            if info["candidate"] in ("pdkernels", *FORMATS):
                seconds[case, info["candidate"]] = info["median_us"] * 1e-6
            if info["baseline"] == "linear, bf16":
                seconds.setdefault((case, info["baseline"]), info["baseline_median_us"] * 1e-6)
    runs = json.loads(SINGLE.read_text())
    for case, candidates in runs["attention"]["us"].items():
        seconds |= {(case, name): candidates[name] * 1e-6 for name in ("triton", "gluon")}
    for case, candidates in runs["linear"]["us"].items():
        seconds |= {(case, name): us * 1e-6 for name, us in candidates.items() if name.startswith("(")}
    return seconds


@cache
def plans() -> dict[str, tuple[TilePlan, tuple[int, int]]]:
    """Plans of the masks that were timed, and query and KV heads."""
    return {
        NOISE_AWARE: (masks.noise_aware_causal(512, 32, 64, layout="streams").plan(128, 128), (28, 4)),
        "dual stream 8192": (masks.dual_stream(4096, 32).plan(128, 128), (32, 8)),
        "dual stream of 16,384 rows": (masks.dual_stream(8192, 32).plan(128, 128), (32, 8)),
        "causal 8192": (masks.causal(8192).plan(128, 128), (32, 8)),
    }


class Comparisons:
    """All that was timed of what the model knows, or the rows that fix some numbers; `left` is the rest."""

    sweep: list[float]
    """Errors of all tilings of `linear` that were tried, but for the one that is fitted to."""

    def __init__(self, device: Device, figures: dict[str, Any], only: str | None = None) -> None:
        self.device, self.figures, self.only = device, figures, only
        self.left = times()
        self.rows: list[Comparison] = []
        self._attention()
        self._drafts()
        self._linear()
        self._packed()
        self._statistics()

    def _add(self, work: str, timed: float, predict: Callable[[], float], fits: str = "") -> None:
        if self.only in (None, fits):
            self.rows.append(Comparison(work, timed, predict(), fits))

    def _first(self, predict: Callable[..., tuple[float, float]], *arguments: Any) -> Callable[[], float]:
        return lambda: predict(*arguments)[0]

    def _attention(self) -> None:
        case = "block_sparse_attention {} d128 bf16 {}"
        for name, benchmark in ((NOISE_AWARE, NOISE_AWARE), ("dual stream 8192", "dual-stream 8192")):
            forward = self.left.pop((case.format(benchmark, "fwd"), "pdkernels"))
            both = self.left.pop((case.format(benchmark, "fwd+bwd"), "pdkernels"))
            self._pass(name, "forward", "gluon", forward)
            self._pass(name, "backward", "gluon", both - forward)
        for name in plans():
            for direction in ("forward", "backward"):
                for kernel in ("gluon", "triton"):
                    timed = self.left.pop((f"{name}, {direction}", kernel), None)
                    if timed is not None:
                        again = ", again" if (name, kernel) == (NOISE_AWARE, "gluon") else ""
                        self._pass(name, direction, kernel, timed, again)

    def _pass(self, name: str, direction: str, kernel: str, timed: float, note: str = "") -> None:
        plan, heads = plans()[name]
        if kernel == "triton":
            note = ", Triton"
            predict = self._first(getattr(Attention(self.device, self.figures, plan, heads), direction))
        else:
            predict = self._first(getattr(gluon, direction), self.device, self.figures, plan, heads)
        self._add(f"{name}, {direction}{note}", timed, predict, "drain, program" if name in FITTED else "")

    def _drafts(self) -> None:
        timed = {
            prefix: self.left.pop((f"speculative_attention, width 8, prefix {prefix}, bf16", "pdkernels"))
            for prefix in (8192, 32768)
        }
        timed[16347] = self.left.pop((f"{QUADRATIC}, contiguous", "gluon"))
        for prefix, seconds in sorted(timed.items()):
            drafts = self.device, self.figures, 81, prefix, (32, 8)
            self._add(f"quadratic width 8, prefix {prefix:,}", seconds, self._first(gluon.speculative, *drafts))
        drafts = self.device, self.figures, 81, 16347, (32, 8)
        for layout, pages in (("contiguous", "contiguous"), ("paged", "pages of 16")):
            seconds = self.left.pop((f"{QUADRATIC}, {pages}", "triton"))
            work = f"quadratic width 8, prefix 16,347, {pages}, Triton"
            self._add(work, seconds, self._first(speculative, *drafts, layout))

    def _linear(self) -> None:
        from pdkernels.triton.linear import Tiling, choose_few

        self.sweep = []
        for case, name in [key for key in self.left if key[1].startswith("(")]:
            outputs, width = map(int, case.split(" x "))
            tiling = Tiling(16, *literal_eval(name))
            timed, predicted = self.left.pop((case, name)), product(self.device, 8, outputs, width, tiling)
            if tiling == choose_few(outputs):
                fits = "l2" if (outputs, width) == LAYER[-1] else ""
                self._add(f"linear, 8 rows, {outputs:,} x {width:,}", timed, partial(float, predicted), fits)
                if fits:
                    continue
            self.sweep.append(abs(predicted / timed - 1))
        for rows in (1, 4, 8, 16, 64):
            few = rows <= 16
            predicted = sum(
                product(self.device, rows, *shape, Tiling(16, *EARLIER) if few else None) for shape in LAYER
            )
            timed = self.left.pop((f"quantized_linear, 8B, {rows} rows", "linear, bf16"))
            work = f"linear, products of an 8B layer, {counted(rows)}{', earlier tilings' * few}"
            self._add(work, timed, partial(float, predicted))

    def _packed(self) -> None:
        def layer(kind: str, rows: int) -> float:
            return sum(packed(self.device, self.figures, kind, rows, outputs, width) for outputs, width in LAYER)

        for case, name in [key for key in self.left if key[1] in FORMATS]:
            rows = int(case.split(", ")[2].split()[0])
            kind, label = FORMATS[name]
            work = f"packed products of an 8B layer, {label}, {counted(rows)}, Triton"
            fits = "alone" if name == "q4_0" and rows <= 8 else ""
            self._add(work, self.left.pop((case, name)), partial(layer, kind, rows), fits)

    def _statistics(self) -> None:
        for rows in (1, 32, 256):
            predict = partial(statistics, self.device, statistics_figures.TIMED, rows, VOCABULARY)
            timed = self.left.pop((f"token_statistics, bf16, {rows} rows", "pdkernels"))
            work = f"token statistics, earlier kernel, {rows} x {VOCABULARY:,}"
            self._add(work, timed, predict, "latency" if rows == 1 else "")


def counted(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def sizes(errors: Sequence[float]) -> str:
    return f"{median(errors):.0%} in the median and {max(errors):.0%} at most".replace("%", " %")


def lines(device: Device, figures: dict[str, Any]) -> list[str]:
    """The table of all that was timed, and what it amounts to."""
    compared = Comparisons(device, figures)
    table = ["| work (H200) | measured | predicted | error | fitted here |", "|---|---:|---:|---:|---|"]
    for row in compared.rows:
        cells = (f"{seconds * 1e6:.{1 if seconds < 1e-4 else 0}f} µs" for seconds in (row.measured, row.predicted))
        table.append(f"| {row.work} | {' | '.join(cells)} | {round(row.error * 100):+d} % | {row.fits} |")
    held_out = [abs(row.error) for row in compared.rows if not row.fits]
    unknown = ", ".join(dict.fromkeys(case for case, _ in compared.left))
    table += ["", f"The {len(held_out)} rows to which nothing is fitted are off by {sizes(held_out)}."]
    table[-1] += f" The {len(compared.sweep)} other tilings of `linear` that were tried: {sizes(compared.sweep)}."
    return [*table, f"Timed, but not modelled: {unknown}."]
