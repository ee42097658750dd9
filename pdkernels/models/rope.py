"""Rotary position embedding: tables and rotation, for half-split and interleaved pairs, with YaRN.

Sources: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", equation 34; Peng et al., "YaRN:
Efficient Context Window Extension of Large Language Models", section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from pdkernels._validation import check

RopeStyle = Literal["half", "interleaved"]


@dataclass(frozen=True)
class YarnScaling:
    """Frequencies for a context `factor` times longer than the `original_positions` of the first training.

    Pairs that turn more than `beta_fast` times within the original positions keep their frequency, those that turn less
    than `beta_slow` times are slowed down by `factor`, the others lie between. `attention_factor` multiplies rotated q
    and k. q at position p is further multiplied by 1 + query_beta * ln(1 + floor(p / original_positions)).
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    query_beta: float = 0.0

    def __post_init__(self) -> None:
        op = "YarnScaling"
        check(self.factor >= 1, op, "factor", "be at least 1", self.factor)
        check(self.original_positions >= 1, op, "original_positions", "be at least 1", self.original_positions)
        check(self.beta_fast >= self.beta_slow > 0, op, "beta_fast", f"be at least beta_slow ({self.beta_slow}) > 0",
              self.beta_fast)
        check(self.attention_factor > 0, op, "attention_factor", "be positive", self.attention_factor)
        check(self.query_beta >= 0, op, "query_beta", "not be negative", self.query_beta)


class Rotation(NamedTuple):
    """Cosine and signed sine of some positions, and the factor of their queries (None: 1).

    The sine of the first of each pair is negated, so that a rotation is ``x * cos + swap(x) * sin``. As a table the
    tensors have shape ``(positions, head_dim)``, the factor ``(positions, 1)``; `span` and `at` add the heads.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None

    def span(self, start: int, rows: int) -> Rotation:
        """The positions start .. start + rows - 1 as ``(rows, 1, head_dim)``."""
        return Rotation(*(None if table is None else table[start : start + rows, None] for table in self))

    def at(self, positions: torch.Tensor) -> Rotation:
        """These positions, of any shape, as ``(..., 1, head_dim)``."""
        return Rotation(*(None if table is None else F.embedding(positions, table).unsqueeze(-2) for table in self))


def rope_tables(
    limit: int,
    head_dim: int,
    *,
    theta: float,
    style: RopeStyle,
    yarn: YarnScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Rotation:
    """The rotation of every position below `limit`: angles in fp64, rounded once to `dtype`.

    Component c of a head pairs with c + head_dim/2 ("half") or with its neighbour ("interleaved").

    >>> table = rope_tables(4, 8, theta=10000.0, style="half")
    >>> table.cos.shape, bool((table.cos[0] == 1).all() and (table.sin[0] == 0).all())
    (torch.Size([4, 8]), True)
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    positions = torch.arange(limit, dtype=torch.float64, device=device)
    query_scale = None
    amplitude = 1.0
    if yarn is not None:
        frequencies = _stretched(frequencies, head_dim, theta, yarn)
        amplitude = yarn.attention_factor
        if yarn.query_beta > 0:
            query_scale = 1 + yarn.query_beta * (positions / yarn.original_positions).floor().log1p()
            query_scale = query_scale[:, None].to(dtype)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    if style == "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return Rotation(cos.to(dtype), sin.to(dtype), query_scale)


class RopeTables:
    """The table of every device and dtype a model has lived in. It grows by doubling and is shared by all forwards.

    No buffer: it follows neither `.to(dtype)` (bf16 models rotate in fp32) nor the state dict.

    >>> tables = RopeTables(8, 100, theta=10000.0, style="half")
    >>> len(tables.covering(3, torch.device("cpu"), torch.bfloat16).cos), len(tables.covering(101, torch.device("cpu"), torch.float32).cos)
    (100, 128)
    """

    def __init__(
        self, head_dim: int, max_positions: int, *, theta: float, style: RopeStyle, yarn: YarnScaling | None = None
    ) -> None:
        self._arguments = {"head_dim": head_dim, "theta": theta, "style": style, "yarn": yarn}
        self._start = min(max_positions, 4096)
        self._tables: dict[tuple[torch.device, torch.dtype], Rotation] = {}
        self._outgrown: list[Rotation] = []  # graphs may have captured them; together they are smaller than their successor

    def covering(self, limit: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        """A table of at least `limit` positions, in fp64 for fp64 and in fp32 for all other dtypes."""
        key = (device, torch.float64 if dtype == torch.float64 else torch.float32)
        table = self._tables.get(key)
        if table is None or len(table.cos) < limit:
            size = max(1 << max(limit - 1, 0).bit_length() if limit > self._start else 0, self._start)
            # Not an inference tensor, even if made during inference: training may use it later.
            with torch.inference_mode(False), torch.no_grad():
                table = rope_tables(size, **self._arguments, dtype=key[1], device=device)
            self._outgrown += filter(None, [self._tables.get(key)])
            self._tables[key] = table
        return table


def _stretched(frequencies: torch.Tensor, head_dim: int, theta: float, yarn: YarnScaling) -> torch.Tensor:
    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(yarn.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=frequencies.device)
    slowed = ((pairs - low) / (high - low if high != low else 1e-3)).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / yarn.factor)


def rotate(x: torch.Tensor, rotation: Rotation, style: RopeStyle) -> torch.Tensor:
    """Rotate ``(batch, rows, heads, head_dim)`` in the dtype of the rotation; the result has the dtype of `x`.

    >>> x = torch.randn(1, 3, 2, 4)
    >>> y = rotate(x, rope_tables(3, 4, theta=10000.0, style="interleaved").span(0, 3), "interleaved")
    >>> torch.allclose(x.norm(dim=-1), y.norm(dim=-1), atol=1e-5)
    True
    """
    wide = x.to(rotation.cos.dtype)
    if style == "half":
        swapped = wide.roll(x.shape[-1] // 2, -1)
    else:
        swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(wide * rotation.cos, swapped, rotation.sin).to(x.dtype)
