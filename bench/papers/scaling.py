"""Memory traffic, FLOPs and communication of a decoding step of a large model on several devices, and the batch size at which
parallel decoding stops paying off.

A roofline, not a measurement: weights and caches are read once per forward, products run at the device's peak, and exchanges
between ranks cost their bytes and a latency each; nothing overlaps. The exchanges are those of `pdkernels.distributed`
(docs/distributed.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from bench.papers.theory import DEVICES, Device
from pdkernels._validation import check

_OP = "papers.scaling"
_NUMBER = 2
"""Bytes of a weight, of an activation and of a cached number."""
_SMALL = 1 << 16
"""Up to this many bytes a sum over ranks is one exchange of whole tensors."""


class Shape(NamedTuple):
    """Sizes of a transformer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def products(self) -> int:
        """Weights used by every row: those of the layers and of the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary


EIGHT_BILLION = Shape(4096, 32, 32, 8, 128, 14336, 128_256)
"""Of Llama 3 8B."""


class Link(NamedTuple):
    """The interconnect of ranks."""

    bandwidth: float
    """Bytes per second that a rank receives."""
    latency: float
    """Seconds of an empty exchange."""


NVLINK = Link(450e9, 10e-6)
"""NVLink of an H100 or H200, from the data sheet; the latency is assumed."""


class Recipe(NamedTuple):
    """The rows and gain of a method's forward."""

    rows: int
    """Rows of a sequence in a forward."""
    tokens: Fraction
    """Tokens that a forward gains, on average."""


# Tokens are those that the papers report for their models of 7 to 14 billion parameters; see docs/theory.md.
RECIPES = {
    "autoregressive": Recipe(1, Fraction(1)),
    "linear self-speculation, 32": Recipe(32, Fraction(682, 200)),
    "Jacobi Forcing, 256": Recipe(256, Fraction(421, 100)),
}


class StepCost(NamedTuple):
    """A forward on one of the ranks."""

    weight_bytes: int
    """Read."""
    cache_bytes: int
    """Keys and values read."""
    flops: int
    exchanges: int
    exchanged_bytes: int
    """Bytes received from other ranks."""
    seconds: float


def step_cost(
    shape: Shape,
    device: Device,
    *,
    rows: int = 1,
    batch: int = 1,
    prefix: int = 1024,
    ranks: int = 1,
    link: Link = NVLINK,
) -> StepCost:
    """A forward of `rows` new rows for each of `batch` sequences with `prefix` cached tokens.

    Raises:
        ValueError: numbers below 1, heads or an inner width that the ranks do not divide.

    Example:
        >>> cost = step_cost(EIGHT_BILLION, DEVICES["H200"], ranks=4)
        >>> cost.weight_bytes, cost.exchanges, cost.exchanged_bytes
        (3752329216, 66, 1597752)
        >>> round(cost.seconds * 1e3, 2), round(step_cost(EIGHT_BILLION, DEVICES["H200"]).seconds * 1e3, 2)
        (1.45, 3.15)
    """
    numbers = {"rows": rows, "batch": batch, "prefix": prefix, "ranks": ranks}
    for name, value in numbers.items():
        check(value >= 1, f"{_OP}.step_cost", name, "be at least 1", value)
    cut = shape.heads % ranks == 0 and shape.intermediate % ranks == 0
    check(cut, f"{_OP}.step_cost", "ranks", "divide the heads and the inner width", ranks)
    kv_heads = max(shape.kv_heads // ranks, 1)
    weights = shape.products * _NUMBER // ranks
    cache = 2 * batch * prefix * shape.layers * kv_heads * shape.head_dim * _NUMBER
    every = rows * batch
    pairs = every * (prefix + rows) * shape.layers * shape.heads // ranks * shape.head_dim
    flops = 2 * every * shape.products // ranks + 4 * pairs
    exchanges, received = _exchanged(shape, every, ranks)
    seconds = max((weights + cache) / device.bandwidth, flops / device.flops)
    seconds += exchanges * link.latency + received / link.bandwidth
    return StepCost(weights, cache, flops, exchanges, received, seconds)


def _exchanged(shape: Shape, rows: int, ranks: int) -> tuple[int, int]:
    """Two sums per layer, one for the embedding, and a record of 104 bytes per row for its token."""
    if ranks == 1:
        return 0, 0
    sums, size = 2 * shape.layers + 1, rows * shape.hidden * _NUMBER
    whole = ranks == 2 or size <= _SMALL
    share = -(-size // ranks)
    received = size * (ranks - 1) if whole else 2 * share * (ranks - 1)
    return sums * (1 if whole else 2) + 1, sums * received + (ranks - 1) * rows * 104


def tokens_per_second(
    recipe: Recipe,
    shape: Shape,
    device: Device,
    *,
    batch: int = 1,
    prefix: int = 1024,
    ranks: int = 1,
    link: Link = NVLINK,
) -> float:
    """Tokens per second over all sequences.

    >>> h200 = DEVICES["H200"]
    >>> [round(tokens_per_second(recipe, EIGHT_BILLION, h200)) for recipe in RECIPES.values()]
    [317, 1081, 1037]
    """
    cost = step_cost(shape, device, rows=recipe.rows, batch=batch, prefix=prefix, ranks=ranks, link=link)
    return float(recipe.tokens) * batch / cost.seconds


def largest_batch(
    recipe: Recipe,
    shape: Shape,
    device: Device,
    *,
    prefix: int = 1024,
    ranks: int = 1,
    link: Link = NVLINK,
    batches: Iterable[int] = tuple(range(1, 513)),
) -> int:
    """The largest of `batches` up to which a method gives more tokens per second than one row per forward; 0: none.

    >>> largest_batch(RECIPES["linear self-speculation, 32"], EIGHT_BILLION, DEVICES["H200"])
    26
    """
    token_by_token, last = RECIPES["autoregressive"], 0
    for batch in batches:
        ours, theirs = (
            tokens_per_second(one, shape, device, batch=batch, prefix=prefix, ranks=ranks, link=link)
            for one in (recipe, token_by_token)
        )
        if ours <= theirs:
            break
        last = batch
    return last


def table(
    shape: Shape = EIGHT_BILLION,
    device: Device = DEVICES["H200"],
    *,
    batches: Sequence[int] = (1, 8, 32, 128, 512),
    ranks: Sequence[int] = (1, 2, 4, 8),
    prefix: int = 1024,
    link: Link = NVLINK,
) -> str:
    """Predicted tokens per second in Markdown: a row per method and number of ranks, a column per batch, and the last
    batch at which the method gains.

    >>> print(table(batches=(1,), ranks=(1,)).splitlines()[2])
    | autoregressive | 1 | 317 | |
    """
    lines = [
        f"| method | ranks | {' | '.join(f'batch {batch}' for batch in batches)} | gains up to batch |",
        f"|---|---:|{'---:|' * len(batches)}---:|",
    ]
    for name, recipe in RECIPES.items():
        for count in ranks:
            speeds = (
                tokens_per_second(recipe, shape, device, batch=batch, prefix=prefix, ranks=count, link=link)
                for batch in batches
            )
            cells = " | ".join(f"{speed:.0f}" for speed in speeds)
            last = (
                largest_batch(recipe, shape, device, prefix=prefix, ranks=count, link=link) if recipe.rows > 1 else ""
            )
            lines.append(f"| {name} | {count} | {cells} | {last} |".replace("|  |", "| |"))
    return "\n".join(lines)
