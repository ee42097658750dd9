"""The device and the sizes of a benchmark.

`by_device` parametrizes a benchmark by its device together with what differs between devices. A GPU gets the sizes of an 8B
model. ``PDKERNELS_BENCH_DRY=1`` tries the benchmarks of a GPU on a machine without one: on a pretended GPU, in tiny sizes
(see `bench/dry_run.py`); it times nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bench.gpu_clock import gpu_clock

DRY_RUN = os.environ.get("PDKERNELS_BENCH_DRY") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICES = ["cuda"] if DRY_RUN else ["cpu", *(["cuda"] if HAS_GPU else [])]

Sizes = Mapping[str, Sequence[Any]]


def sizes(device: str, of: Mapping[str, Any]) -> Any:
    """The row that applies here of a table with the keys ``cpu``, ``cuda`` and ``dry``."""
    return of["dry" if DRY_RUN else device]


@contextmanager
def refusals(name: str, device: str) -> Iterator[None]:
    """On a GPU a peer may have no kernel for a case, or not enough memory: that is a property of the peer, not a failure of ours."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if device == "cpu" or DRY_RUN or name.startswith("pdkernels"):
            raise
        pytest.skip(f"{name} refuses: {str(error).strip().splitlines()[0][:200]}")


def by_device(names: str, table: Sizes) -> pytest.MarkDecorator:
    """Parametrizes ``device`` and `names`, whose values are in `table` by device."""
    several = "," in names
    cases = []
    for device in DEVICES:
        # The clock of a GPU is its own events.
        marks = [pytest.mark.benchmark(timer=gpu_clock)] if device == "cuda" else []
        for values in sizes(device, table):
            values = tuple(values) if several else (values,)
            label = "-".join([device, *(getattr(value, "name", str(value)).replace(" ", "-") for value in values)])
            cases.append(pytest.param(device, *values, marks=marks, id=label))
    return pytest.mark.parametrize(f"device, {names}", cases)
