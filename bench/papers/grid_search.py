"""Jacobi Forcing, appendix E: tokens per second over block size and verification size, and a smooth surface through them.

The paper fixes two blocks and a spawn ratio of 0.85, measures a grid, fits polynomials of total degree up to 6 by least squares, takes
the degree with the smallest mean squared error, and smooths the surface over a dense grid. It does not say in which coordinates; here
they are the sizes, or their logarithms. On the grid's own points the highest degree has the smallest error by construction, so the error
of points that are left out is reported too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels import decoding, models
from pdkernels.evaluation.machine import processor
from pdkernels.evaluation.tasks import make_task

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
VERIFICATION_SIZES = (1, 2, 4, 8, 12)
DEGREES = range(1, 7)
REPEATS = 2
_DENSE = 121  # points of the dense grid along each side
_SMOOTHING = 2.0  # its standard deviation, in points


class Surface(NamedTuple):
    """A polynomial in two coordinates, of the lowest degree with the smallest mean squared error on the measured points.

    Attributes:
        degree: total degree.
        errors: mean squared error for each degree of `DEGREES`.
        left_out: the same where each point is predicted by the fit to all others.
        best: the point of the dense, smoothed grid with the largest value, as given.
    """

    degree: int
    errors: list[float]
    left_out: list[float]
    best: tuple[float, float]


def fitted(points: Sequence[tuple[float, float]], values: Sequence[float], logarithms: bool = False) -> Surface:
    """The surface of appendix E through `values` at `points`.

    >>> points = [(x, y) for x in (1, 2, 4, 8) for y in (1, 3, 5, 7)]
    >>> surface = fitted(points, [10 - (x - 5) ** 2 - (y - 4) ** 2 for x, y in points])
    >>> surface.degree, [round(place, 1) for place in surface.best], surface.errors[1] < 1e-20 < surface.errors[0]
    (2, [5.0, 4.0], True)
    """
    at = torch.tensor(points, dtype=torch.float64)
    at = at.log2() if logarithms else at
    low, high = at.amin(0), at.amax(0)
    unit, measured = (at - low) / (high - low) * 2 - 1, torch.tensor(values, dtype=torch.float64)
    errors, left_out = [], []
    for degree in DEGREES:
        design = _design(unit, degree)
        errors.append((design @ _solved(design, measured) - measured).square().mean().item())
        misses = []
        for number in range(len(values)):
            others = torch.arange(len(values)) != number
            misses.append(design[number] @ _solved(design[others], measured[others]) - measured[number])
        left_out.append(torch.stack(misses).square().mean().item())
    exact = 1e-20 * max(measured.square().mean().item(), 1e-300)  # rounding alone
    degree = DEGREES[min(range(len(errors)), key=lambda n: max(errors[n], exact))]
    line = torch.linspace(-1, 1, _DENSE, dtype=torch.float64)
    dense = torch.cartesian_prod(line, line)
    surface = (_design(dense, degree) @ _solved(_design(unit, degree), measured)).view(_DENSE, _DENSE)
    place = (dense[_smoothed(surface).argmax()] + 1) / 2 * (high - low) + low
    x, y = (place.exp2() if logarithms else place).tolist()
    return Surface(degree, errors, left_out, (x, y))


def _design(unit: Tensor, degree: int) -> Tensor:
    """All products of powers of the two coordinates up to a total degree, ``(points, terms)``."""
    powers = [(i, total - i) for total in range(degree + 1) for i in range(total + 1)]
    return torch.stack([unit[:, 0] ** i * unit[:, 1] ** j for i, j in powers], 1)


def _solved(design: Tensor, values: Tensor) -> Tensor:
    """Least squares of the smallest norm: six block sizes do not determine a sixth power."""
    solution: Tensor = torch.linalg.lstsq(design, values[:, None], driver="gelsd").solution
    return solution[:, 0]


def _smoothed(surface: Tensor) -> Tensor:
    """Gaussian smoothing along both sides, the edges repeated."""
    reach = int(4 * _SMOOTHING)
    kernel = (-(torch.arange(-reach, reach + 1, dtype=surface.dtype) / _SMOOTHING).square() / 2).exp()
    kernel /= kernel.sum()
    for _ in range(2):
        wide = torch.cat([surface[:1].expand(reach, -1), surface, surface[-1:].expand(reach, -1)])
        surface = torch.einsum("nmk,k->nm", wide.unfold(0, len(kernel), 1), kernel).T
    return surface


def search(problems: int, progress: Any) -> dict[str, Any]:
    """Tokens per second of processor time: on a busy machine that is the time that a text takes of an idle one."""
    model: Any = models.load("tiny-jacobi")
    task = make_task("sums", problems)
    cells = [(size, number) for size in BLOCK_SIZES for number in VERIFICATION_SIZES]
    settings: list[tuple[Any, dict[str, Any]]] = [("autoregressive", {})]
    settings += [
        (
            "jacobi_multiblock",
            # As many sequences are kept as may be tried.
            {"block_size": size, "verification_size": number, "pool_size": max(4, number), "blocks": 2},
        )
        for size, number in cells
    ]
    seconds, tokens, forwards = ([0.0] * len(settings) for _ in range(3))
    for repeat in range(REPEATS):
        for number, (method, options) in enumerate(settings):
            progress(f"{method} {options}", (repeat + number / len(settings)) / REPEATS)
            began, texts = time.process_time(), []
            for prompt in task.prompts:
                given: dict[str, Any] = {"max_new_tokens": task.limit, **options}
                texts.append(decoding.generate(model, prompt, method, **given))
            taken = time.process_time() - began
            seconds[number] = min(taken, seconds[number]) if repeat else taken
            tokens[number] = sum(text.stats.tokens for text in texts)
            forwards[number] = sum(text.stats.forwards for text in texts)
    speeds = [count / taken for count, taken in zip(tokens, seconds)]
    rows: list[dict[str, Any]] = []
    for size in BLOCK_SIZES:
        own = {number: speeds[1 + cells.index((size, number))] for number in VERIFICATION_SIZES}
        row: dict[str, Any] = {"block size": size}
        row |= {f"tokens/s, {number} verified": round(speed) for number, speed in own.items()}
        middle = 1 + cells.index((size, 4))
        rows.append(row | {"tokens per forward, 4 verified": round(tokens[middle] / forwards[middle], 2)})
    measured = max(cells, key=lambda cell: speeds[1 + cells.index(cell)])
    return {
        "model": "tiny-jacobi",
        "device": processor(),
        "threads": torch.get_num_threads(),
        "problems": problems,
        "repeats": REPEATS,
        "seconds": round(sum(seconds)),
        "tokens/s token by token": round(speeds[0]),
        "fastest cell": "{} x {}".format(*measured),
        **_told("sizes", fitted(cells, speeds[1:])),
        **_told("logarithms", fitted(cells, speeds[1:], logarithms=True)),
        "rows": rows,
    }


def _told(coordinates: str, surface: Surface) -> dict[str, str]:
    size, number = surface.best
    least = DEGREES[min(range(len(surface.left_out)), key=surface.left_out.__getitem__)]
    found = f"degree {surface.degree} (left out: {least}), best at {size:.0f} x {number:.1f}"
    return {f"surface over {coordinates}": found}
