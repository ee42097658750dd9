"""Theoretical gains of width, depth and block size: costs of prefilling and decoding with recurrent depth, and roofline budgets.

Counts are exact integers. Times are in units of one forward over one row unless a device is given; they are models, not measurements
(`bench.papers.row_times` measures).

Sources: "Efficient parallel samplers for recurrent-depth models", theorems 4.2 and 4.4, remarks 4.3 and A.1 (counts are derived from
its definitions of the layouts, since the theorems are informal);
"Jacobi Forcing", appendix D (the number of rows that a device computes in the time of one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from pdkernels._validation import check

_OP = "papers.theory"


class Device(NamedTuple):
    """Peaks of a device, from its data sheet."""

    flops: float
    """Dense 16-bit products, operations per second."""
    bandwidth: float
    """Memory bandwidth, bytes per second."""

    @property
    def knee(self) -> float:
        """Rows at which a product of 16-bit weights is bound by arithmetic instead of memory: each weight is 2 bytes and 2
        FLOPs per row.

        >>> {name: int(device.knee) for name, device in DEVICES.items()}
        {'H200': 206, 'A100-40GB': 200, 'A100-80GB': 153, 'B200': 281}
        """
        return self.flops / self.bandwidth


DEVICES = {
    "H200": Device(989e12, 4.8e12),
    "A100-40GB": Device(312e12, 1.555e12),
    "A100-80GB": Device(312e12, 2.039e12),
    "B200": Device(2250e12, 8e12),
}


class PrefillCost(NamedTuple):
    """Result of `prefill_cost`, one field per way to apply a block s times to L tokens."""

    rows: int
    """Rows through the block, the same in every scheme."""
    pairs: tuple[int, int, int]
    """Visible pairs of a query and a key: depth, width with shared K/V, width without."""
    flops: tuple[int, int, int]
    """FLOPs of products and attention, in the same order."""
    cached_rows: tuple[int, int, int]
    """Rows of K/V that later tokens need, in the same order."""


def prefill_cost(length: int, factor: int, hidden: int, params: int | None = None) -> PrefillCost:
    """Exact work of a prefill that applies the recurrent block `factor` times to every token.

    *Depth* passes over the prompt `factor` times. The *width* schemes put that many copies of every token next to each other: with
    shared K/V a copy sees the last copy of each earlier token, and the copies of its own token up to itself; without, all
    copies of earlier tokens. With c = 2 params FLOPs per row and a = 4 hidden per pair the differences are
    ``a L s (s - 1) / 2`` and ``a s (s - 1) L (L - 1) / 2``: depth is never more expensive, shared K/V hardly more than depth.

    Args:
        length: L, tokens of the prompt.
        factor: s, applications of the block.
        hidden: width of the model.
        params: of the block; None: 12 hidden², a plain block.

    Raises:
        ValueError: a number below 1.

    Source: theorem 4.2.

    Example:
        >>> prefill_cost(3, 2, 1).pairs, prefill_cost(5, 3, 1).pairs
        ((12, 15, 21), (45, 60, 120))
        >>> for length in (1, 512, 4096):
        ...     depth, shared, unshared = prefill_cost(length, 4, 1024).flops
        ...     print(f"{depth:.4e} {shared / depth:.6f} {unshared / depth:.4f}")
        1.0068e+08 1.000244 1.0002
        5.3691e+10 1.000234 1.1200
        5.4979e+11 1.000183 1.7500
        >>> prefill_cost(512, 4, 1024).cached_rows
        (512, 515, 2048)
    """
    params = 12 * hidden * hidden if params is None else params
    for name, value in (("length", length), ("factor", factor), ("hidden", hidden), ("params", params)):
        check(value >= 1, f"{_OP}.prefill_cost", name, "be at least 1", value)
    rows = factor * length
    depth = factor * length * (length + 1) // 2
    shared = factor * length * (length - 1) // 2 + length * factor * (factor + 1) // 2
    unshared = rows * (rows + 1) // 2
    flops = tuple(2 * params * rows + 4 * hidden * pairs for pairs in (depth, shared, unshared))
    return PrefillCost(
        rows, (depth, shared, unshared), (flops[0], flops[1], flops[2]), (length, length + factor - 1, rows)
    )


def width_advantage(length: int, factor: int, knee: int) -> Fraction:
    """Speedup of a prefill by width scaling over depth scaling, if rows up to `knee` cost as much as one.

    It is `factor` for short prompts, 1 from the knee on: the theorem's ratio ``factor²`` is of width to depth, not of times.

    Raises:
        ValueError: a number below 1.

    Source: theorem 4.2 (parallelism), with a saturation point made explicit.

    Example:
        >>> [float(round(width_advantage(length, 4, 206), 3)) for length in (16, 51, 128, 206, 1024)]
        [4.0, 4.0, 1.609, 1.0, 1.0]
    """
    for name, value in (("length", length), ("factor", factor), ("knee", knee)):
        check(value >= 1, f"{_OP}.width_advantage", name, "be at least 1", value)
    depth = factor * max(Fraction(1), Fraction(length, knee))
    return depth / max(Fraction(1), Fraction(factor * length, knee))


def depth_preferred(lengths: Sequence[int], knee: int) -> Fraction:
    """Share of prompts long enough that depth scaling is as fast as width scaling.

    Raises:
        ValueError: no lengths.

    Source: remark 4.3.

    Example:
        >>> depth_preferred([50, 200, 500, 1000], 206)
        Fraction(1, 2)
    """
    check(len(lengths) > 0, f"{_OP}.depth_preferred", "lengths", "hold at least one", 0)
    return Fraction(sum(length >= knee for length in lengths), len(lengths))


class DecodeBudget(NamedTuple):
    """Result of `decode_budget`."""

    wave: int
    """Tokens processed at once when the wavefront is full: ceil(r / r')."""
    tokens: tuple[int, int]
    """Tokens finished by autoregressive decoding and by the sampler."""
    widths: tuple[int, ...]
    """Rows of the sampler in each application of the block; 1 for autoregressive decoding. Its sum is the states processed."""
    products: Fraction
    """FLOPs of products per token over those of autoregressive decoding, if prelude and coda together cost one block."""
    limit: Fraction
    """Tokens over those of autoregressive decoding for infinite budgets."""


def decode_budget(steps: int, recurrences: int, inner: int, knee: int | None = None) -> DecodeBudget:
    """Tokens that the diffusion-forcing sampler and autoregressive decoding finish in a budget of `steps` block applications.

    Both go `steps` deep. The sampler advances a wavefront by `inner` applications before the next token enters, so its width is
    ``min(1 + floor((t - 1) / inner), wave)`` at application t, and it finishes ``floor(steps / inner) - wave + 1`` tokens
    against ``floor(steps / recurrences)``. It is ahead unless the wave is one token wide, and except at the very start.

    Args:
        steps: T, sequential applications of the block.
        recurrences: r of a finished token.
        inner: r' of a sampler's step; a divisor of `recurrences` or not, at most as large.
        knee: rows that cost as much as one; a wider wave takes longer, and the sampler's budget shrinks accordingly. None: the
            theorem's assumption, that the wave is free.

    Raises:
        ValueError: a number below 1, or `inner` above `recurrences`.

    Source: theorem 4.4, remark A.1. Here nothing settles early, and no token changes late.

    Example:
        >>> [decode_budget(steps, 32, 4).tokens for steps in (32, 64, 128, 320)]
        [(1, 1), (2, 9), (4, 25), (10, 73)]
        >>> one = decode_budget(12, 8, 4)
        >>> one.wave, one.widths
        (2, (1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2))
        >>> [(inner, float(round(decode_budget(64, 32, inner).products, 2))) for inner in (4, 2, 1, 32)]
        [(4, 1.21), (2, 1.45), (1, 1.94), (32, 1.0)]
        >>> [int(decode_budget(64, 32, inner).limit) for inner in (4, 2, 1)]
        [8, 16, 32]
    """
    for name, value in (("steps", steps), ("recurrences", recurrences), ("inner", inner), ("knee", knee or 1)):
        check(value >= 1, f"{_OP}.decode_budget", name, "be at least 1", value)
    check(inner <= recurrences, f"{_OP}.decode_budget", "inner", f"be at most recurrences ({recurrences})", inner)
    wave = -(-recurrences // inner)
    slower = max(Fraction(1), Fraction(wave, knee)) if knee else Fraction(1)
    done = math.floor(steps / slower)
    widths = tuple(min(1 + t // inner, wave) for t in range(done))
    products = (recurrences + Fraction(recurrences, inner)) / (recurrences + 1)
    finished = max(0, done // inner - wave + 1)
    return DecodeBudget(wave, (steps // recurrences, finished), widths, products, Fraction(recurrences, inner) / slower)


def row_cost(rows: int, device: Device, params: float, *, cached_bytes: float = 0.0) -> float:
    """Seconds of a forward over `rows` by the roofline: weights once, K/V for every row, or the products, whichever is slower.

    Args:
        params: of the model, 2 bytes and 2 FLOPs per row each.
        cached_bytes: of K/V that each row reads separately; 0 for rows of one sequence, which share them.

    Example:
        >>> h200 = DEVICES["H200"]
        >>> [round(row_cost(rows, h200, 8e9) * 1e3, 2) for rows in (1, 64, 206, 412)]
        [3.33, 3.33, 3.33, 6.67]
    """
    check(rows >= 1, f"{_OP}.row_cost", "rows", "be at least 1", rows)
    return max((2 * params + rows * cached_bytes) / device.bandwidth, 2 * params * rows / device.flops)


def tensor_budget(device: Device, slack: float = 0.0) -> int:
    """The most rows whose forward costs at most ``1 + slack`` times one row's: the limit of a block times its candidates.

    Source: Jacobi Forcing, appendix D, which measured 256 (H200, B200) and 128 (A100).

    Example:
        >>> [tensor_budget(DEVICES[name]) for name in ("H200", "A100-40GB", "B200")], tensor_budget(DEVICES["H200"], 0.25)
        ([206, 200, 281], 257)
    """
    check(slack >= 0, f"{_OP}.tensor_budget", "slack", "not be negative", slack)
    return int((1 + slack) * device.knee)


def expected_speedup(tokens_per_forward: float, rows: int, knee: float) -> float:
    """Speed relative to decoding token by token, if rows up to the knee are free and cost grows linearly from there.

    Example:
        >>> round(expected_speedup(4.21, 256, 206), 2), expected_speedup(4.21, 256, 281)
        (3.39, 4.21)
    """
    check(rows >= 1 and knee > 0, f"{_OP}.expected_speedup", "rows and knee", "be positive", (rows, knee))
    return tokens_per_forward / max(1.0, rows / knee)


def crossover(knee: float, accepted: float, block_size: int, forwards: int = 2) -> float:
    """Concurrent requests at which a method that spends `forwards` of a block on `accepted` tokens gains nothing over decoding token
    by token, whose rows stay below the knee: block rows C B then cost ``accepted / forwards`` forwards.

    Args:
        accepted: tokens per cycle (linear self-speculation, two forwards) or per forward (block diffusion, one).

    Source: a model of the throughput-latency curves of Nemotron-Labs-Diffusion, not a figure of the paper.

    Example:
        >>> round(crossover(206, 6.82, 32))
        22
    """
    check(block_size >= 1 and forwards >= 1, f"{_OP}.crossover", "block_size and forwards", "be at least 1", block_size)
    return knee * accepted / (forwards * block_size)
