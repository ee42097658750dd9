"""The five numbers of the H200 that are fitted, each to named rows of what was timed; `bench.predict.device` has the result.

    python -m bench.predict.fit

What a row fits says the table of `bench.predict.measured`. All other rows are held out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.predict.device import DEVICES, Device
from bench.predict.measured import Comparisons

DRAINS, PROGRAMS = range(0, 257, 16), range(0, 10001, 1000)


def root(error: Callable[[float], float], low: float, high: float) -> float:
    """Where an error that grows with its argument, or falls, is zero.

    >>> round(root(lambda x: x * x - 2, 0, 2), 6)
    1.414214
    """
    falls = error(low) > error(high)
    for _ in range(40):
        middle = (low + high) / 2
        if (error(middle) > 0) == falls:
            low = middle
        else:
            high = middle
    return low


def fit(device: Device, figures: dict[str, Any]) -> Device:
    """The device with its fitted numbers anew: waits and programs of attention by least squares on a grid, the others exactly."""

    def errors(fits: str, **numbers: Any) -> list[float]:
        return [row.error for row in Comparisons(device._replace(**numbers), figures, fits).rows]

    for name, digits, low, high in (("l2", 1, 8.0, 128.0), ("alone", 2, 1.0, 20.0), ("latency", 8, 0.0, 3e-6)):
        number = root(lambda x, name=name: sum(errors(name, **{name: x})), low, high)  # type: ignore[misc]
        fitted: dict[str, Any] = {name: round(number, digits)}
        device = device._replace(**fitted)
    drain, program = min(
        ((drain, program) for drain in DRAINS for program in PROGRAMS),
        key=lambda pair: sum(x * x for x in errors("drain, program", drain=pair[0], program=pair[1])),
    )
    return device._replace(drain=drain, program=program)


if __name__ == "__main__":
    from bench.predict.figures import measure

    print(fit(DEVICES["h200"], measure()))
