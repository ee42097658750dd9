"""Rotary position embedding: tables and rotation, for half-split and interleaved pairs, and scaling rules.

Sources: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", equation 34; Chen et al.,
"Extending Context Window of Large Language Models via Positional Interpolation", section 2.3; Peng et al., "YaRN:
Efficient Context Window Extension of Large Language Models", section 3; the model code of Llama 3.1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from pdkernels import _memory
from pdkernels._validation import FINITE, check, check_flag, check_int, check_number

RopeStyle = Literal["half", "interleaved"]


class RopeScaling(ABC):
    """A rule that scales RoPE for contexts longer than those of the original training."""

    attention_factor = 1.0
    """Multiplies rotated q and k."""

    @abstractmethod
    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """The scaled `frequencies` ``theta ** (-2i / head_dim)`` of all pairs, in radians per position."""

    def reach(self, positions: int) -> int:
        """The number of usable positions of a model whose configuration says `positions`."""
        return positions

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        """An additional factor of q at each of the `positions`; None: 1."""
        return None


def _check_factor(op: str, factor: float) -> None:
    check_number(op, "factor", factor, 1, FINITE, "be at least 1")


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """All frequencies are divided by `factor`, as if positions were that much closer together."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor("LinearScaling", self.factor)

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class PartialRotation(RopeScaling):
    """Only `rotated` components of a head turn, with the frequencies of a head of that size: the first pairs."""

    rotated: int

    def __post_init__(self) -> None:
        check_int("PartialRotation", "rotated", self.rotated, 2)
        check(self.rotated % 2 == 0, "PartialRotation", "rotated", "be even", self.rotated)

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        result, pairs = torch.zeros_like(frequencies), self.rotated // 2
        turning = torch.arange(0, self.rotated, 2, dtype=frequencies.dtype, device=frequencies.device)
        result[:pairs] = theta ** (-turning / self.rotated)
        return result


@dataclass(frozen=True)
class ProportionalRotation(RopeScaling):
    """Only the first `pairs` of a head turn, with the frequencies that they have in a whole head, divided by `factor`
    (Gemma 4)."""

    pairs: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        op = "ProportionalRotation"
        check_int(op, "pairs", self.pairs, 0)
        check_number(op, "factor", self.factor, 0, FINITE, "be positive")
        check(self.factor > 0, op, "factor", "be positive", self.factor)

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        turning = torch.arange(len(frequencies), device=frequencies.device) < self.pairs
        return frequencies / self.factor * turning


@dataclass(frozen=True)
class FactorScaling(RopeScaling):
    """The frequency of each pair is divided by its own factor, as GGUF files store Llama 3.1's rule."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        for factor in self.factors:
            check_number("FactorScaling", "factors", factor, 2.0**-100, FINITE, "be positive numbers")

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        return frequencies / torch.tensor(self.factors, dtype=frequencies.dtype, device=frequencies.device)


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Frequencies of Llama 3.1 and its successors, originally trained on `original_positions`.

    Pairs that turn at least `high_freq_factor` times within the original positions keep their frequency. The frequency
    of pairs that turn at most `low_freq_factor` times is divided by `factor`, and the others are interpolated by the
    number of turns.
    """

    factor: float
    original_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        op = "Llama3Scaling"
        _check_factor(op, self.factor)
        check_int(op, "original_positions", self.original_positions, 1)
        for name in ("low_freq_factor", "high_freq_factor"):
            check_number(op, name, getattr(self, name), 0, FINITE, "be a finite number above 0")
        check(
            self.high_freq_factor > self.low_freq_factor > 0,
            op,
            "high_freq_factor",
            f"be more than low_freq_factor ({self.low_freq_factor}) > 0",
            self.high_freq_factor,
        )

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        turns = frequencies * (self.original_positions / (2 * math.pi))
        unscaled_share = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (unscaled_share + (1 - unscaled_share) / self.factor)


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """Frequencies for a context `factor` times as long as the `original_positions` of the original training.

    Pairs that turn more than `beta_fast` times within the original positions keep their frequency. The frequency of
    pairs that turn less than `beta_slow` times is divided by `factor`, and the others are interpolated.
    `attention_factor` multiplies rotated q and k. q at position p is further multiplied by 1 + query_beta * ln(1 +
    floor(p / original_positions)). `truncate`: the ends of the interpolation are rounded outward to whole pairs.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    query_beta: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        op = "YarnScaling"
        check_flag(op, "truncate", self.truncate)
        check_number(op, "factor", self.factor, 0, FINITE, "be positive")
        check(self.factor > 0, op, "factor", "be positive", self.factor)
        check_int(op, "original_positions", self.original_positions, 1)
        for name in ("beta_fast", "beta_slow", "attention_factor", "query_beta"):
            check_number(op, name, getattr(self, name), 0, FINITE, "be a finite number and not negative")
        check(
            self.beta_fast >= self.beta_slow > 0,
            op,
            "beta_fast",
            f"be at least beta_slow ({self.beta_slow}) > 0",
            self.beta_fast,
        )
        check(self.attention_factor > 0, op, "attention_factor", "be positive", self.attention_factor)

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        head_dim = 2 * len(frequencies)

        def pair_that_turns(times: float) -> float:
            return head_dim * math.log(self.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        pairs = torch.arange(len(frequencies), dtype=torch.float64, device=frequencies.device)
        slowed = ((pairs - low) / (high - low if high != low else 1e-3)).clamp(0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)

    def reach(self, positions: int) -> int:
        # Files name either the original length or the extended one.
        return max(positions, int(min(self.factor * self.original_positions, 2.0**31 - 1)))

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        if self.query_beta == 0:
            return None
        return 1 + self.query_beta * (positions / self.original_positions).floor().log1p()


class Rotation(NamedTuple):
    """Cosine and signed sine of positions, and the factor of their queries (None: 1).

    The sine of the first of each pair is negated, so that a rotation is ``x * cos + swap(x) * sin``. As a table the
    tensors have shape ``(positions, head_dim)``, the factor ``(positions, 1)``; `span` and `at` add the heads.

    With `positions`, cosine and sine are still tables, and row r uses entry ``positions[..., r]``: what
    `pdkernels.apply_rope_` takes.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None
    positions: torch.Tensor | None = None

    def span(self, start: int, rows: int) -> Rotation:
        """The positions start .. start + rows - 1 as ``(rows, 1, head_dim)``."""
        return self._mapped(lambda table: table[start : start + rows, None])

    def at(self, positions: torch.Tensor) -> Rotation:
        """These positions, of any shape, as ``(..., 1, head_dim)``."""
        return self._mapped(lambda table: F.embedding(positions, table).unsqueeze(-2))

    def _mapped(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> Rotation:
        return Rotation(rows(self.cos), rows(self.sin), None if self.query_scale is None else rows(self.query_scale))

    def kept_for(self, positions: torch.Tensor) -> Rotation:
        """These positions, ``(rows,)`` or ``(batch, rows)``, for `pdkernels.apply_rope_`: only the factor is copied."""
        factor = self.query_scale
        factor = None if factor is None else F.embedding(positions, factor).unsqueeze(-2)
        return Rotation(self.cos, self.sin, factor, positions)


def rope_tables(
    limit: int,
    head_dim: int,
    *,
    theta: float,
    style: RopeStyle,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Rotation:
    """The rotation of every position below `limit`: angles in fp64, rounded once to `dtype`.

    Component c of a head pairs with c + head_dim/2 ("half") or with the adjacent one ("interleaved").

    >>> table = rope_tables(4, 8, theta=10000.0, style="half")
    >>> table.cos.shape, bool((table.cos[0] == 1).all() and (table.sin[0] == 0).all())
    (torch.Size([4, 8]), True)
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    positions = torch.arange(limit, dtype=torch.float64, device=device)
    amplitude, query_scale = 1.0, None
    if scaling is not None:
        frequencies = scaling.scaled(frequencies, theta)
        amplitude, query_scale = scaling.attention_factor, scaling.query_scale(positions)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    if style == "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return Rotation(cos.to(dtype), sin.to(dtype), None if query_scale is None else query_scale[:, None].to(dtype))


class RopeTables:
    """The tables for every device and dtype that a model has used. They grow by doubling, and all forwards share them.

    Not a buffer: it follows neither `.to(dtype)` (bf16 models rotate in fp32) nor the state dict.

    >>> tables = RopeTables(8, 100, theta=10000.0, style="half")
    >>> len(tables.covering(3, torch.device("cpu"), torch.bfloat16).cos), len(tables.covering(101, torch.device("cpu"), torch.float32).cos)
    (100, 128)
    """

    def __init__(
        self, head_dim: int, max_positions: int, *, theta: float, style: RopeStyle, scaling: RopeScaling | None = None
    ) -> None:
        self._build = partial(rope_tables, head_dim=head_dim, theta=theta, style=style, scaling=scaling)
        self._start = min(max_positions, 4096)
        self._tables: dict[tuple[torch.device, torch.dtype], Rotation] = {}
        # All tables ever made: graphs may have captured them, and another thread may still read one that was replaced.
        # Together they are smaller than the next table would be.
        self._made: list[Rotation] = []

    def covering(self, limit: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        """A table of at least `limit` positions, in fp64 for fp64 and in fp32 for all other dtypes."""
        key = (device, torch.float64 if dtype == torch.float64 else torch.float32)
        table = None if _memory.is_faked() else self._tables.get(key)
        if table is None or len(table.cos) < limit:
            size = max(1 << max(limit - 1, 0).bit_length() if limit > self._start else 0, self._start)
            if _memory.is_faked():  # a table of shapes alone
                return self._build(size, dtype=key[1], device=device)
            with _memory.lasting():
                table = self._build(size, dtype=key[1], device=device)
            self._made.append(table)
            self._tables[key] = table
        return table


def apply_rope(x: torch.Tensor, rotation: Rotation, style: RopeStyle) -> torch.Tensor:
    """Rotates ``(batch, rows, heads, head_dim)`` in the dtype of the rotation; the result has the dtype of `x`.

    >>> x = torch.randn(1, 3, 2, 4)
    >>> y = apply_rope(x, rope_tables(3, 4, theta=10000.0, style="interleaved").span(0, 3), "interleaved")
    >>> torch.allclose(x.norm(dim=-1), y.norm(dim=-1), atol=1e-5)
    True
    """
    wide = x.to(rotation.cos.dtype)
    if style == "half":
        swapped = wide.roll(x.shape[-1] // 2, -1)
    else:
        swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(wide * rotation.cos, swapped, rotation.sin).to(x.dtype)
