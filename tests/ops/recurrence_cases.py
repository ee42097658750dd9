"""Calls of the recurrence ops: waves that froze some rows a step ago, with all their tensors."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 7, 33, 64, 5280]


def spread_out(x: Tensor, style: str) -> Tensor:
    """The same numbers with other strides: rows with gaps, rows not aligned to 16 bytes, or a batch that is not the slowest dimension."""
    if style == "contiguous":
        return x.contiguous()
    if style == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    odd = style == "odd"
    room = torch.full(
        (x.shape[0], x.shape[1] + 1, x.shape[2] + (3 if odd else 32)), torch.nan, dtype=x.dtype, device=x.device
    )
    inner = room[:, 1:, 1 : x.shape[2] + 1] if odd else room[:, 1:, 16 : x.shape[2] + 16]
    inner.copy_(x)
    return inner


STYLES = ["contiguous", "transposed", "odd", "apart"]


class Rows(NamedTuple):
    """Vectors of the rows of a step and of two steps before, and the integers that go with them."""

    state: Tensor | None
    embedding: Tensor
    previous_embedding: Tensor | None
    older: Tensor
    recurrences: Tensor
    cursor: Tensor
    width: Tensor
    advance: Tensor
    older_advance: Tensor
    steps: Tensor

    def to(self, target: torch.device | torch.dtype) -> Rows:
        """Moved, or with the vectors in another dtype."""
        floats = not isinstance(target, torch.dtype)
        return Rows(*(x.to(target) if x is not None and (floats or x.is_floating_point()) else x for x in self))

    def inject_arguments(self) -> tuple[Tensor | None, ...]:
        vectors = (self.state, self.embedding, self.previous_embedding)
        return (*vectors, self.recurrences, self.cursor, self.width, self.advance, self.steps)

    def exit_arguments(self) -> tuple[Tensor | None, ...]:
        residual, weight = self.embedding.flip(1), self.embedding.flatten()[: self.embedding.shape[2]].clone()
        if weight.numel() < self.embedding.shape[2]:
            weight = self.embedding.new_ones(self.embedding.shape[2])
        return (self.embedding, residual, weight, self.state, self.recurrences, self.width, self.advance)

    def sequence(self, b: int) -> Rows:
        return Rows(*(x if x is None else x[b : b + 1] for x in self))


def make_rows(
    seed: int,
    *,
    batch: int = 2,
    rows: int = 5,
    size: int = 33,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    style: str = "contiguous",
    first_step: bool = False,
) -> Rows:
    """Old rows first, then new ones, in waves of any width; some sequences have finished."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    before, then = rows + rng.randint(0, 3), rows + rng.randint(0, 4)
    width = [rng.choice([0, rows, rng.randint(0, rows)]) for _ in range(batch)]
    advance = [rng.randint(0, before) for _ in range(batch)]
    recurrences = torch.zeros(batch, rows + rng.randint(0, 2), dtype=index_dtype)
    for b in range(batch):
        old = min(width[b], max(before - advance[b], 0))
        for i in range(rng.randint(0, old) if not first_step else 0):
            recurrences[b, i] = rng.randint(1, 40)
    recurrences = recurrences.flip(1).contiguous().flip(1) if rows % 2 else recurrences.t().contiguous().t()

    def vectors(count: int) -> Tensor:
        return spread_out(torch.randn(batch, count, size, generator=generator).to(dtype), style)

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=index_dtype)

    return Rows(
        state=None if first_step else vectors(before),
        embedding=vectors(rows),
        previous_embedding=None if first_step else vectors(before),
        older=vectors(then),
        recurrences=recurrences,
        cursor=numbers([rng.choice([0, 5, 2**31 - 9]) for _ in range(batch)]),
        width=numbers(width),
        advance=numbers(advance),
        older_advance=numbers([rng.randint(0, 3) for _ in range(batch)]),
        steps=numbers([rng.randint(0, 1000) for _ in range(batch)]),
    )


INJECT_OPTIONS = {
    "noise": [0.0, 0.37, 1.0],
    "schedule": ["linear", "constant", "harmonic", "root"],
    "horizon": [32, 1, 7],
    "mixer": ["linear", "sqrt"],
    "momentum": [0.0, 0.1, 1.0],
    "init_std": [0.4**0.5, 0.0, 3.0],
    "new_state": ["fresh", "copied"],
    "damp_new": [False, True],
    "seed": [0, -5, 2**63 - 1],
}


def inject_options(seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    return {name: rng.choice(choices) for name, choices in INJECT_OPTIONS.items()}


def bits(x: Tensor) -> Tensor:
    """Floats as integers, all NaN alike: 0 and -0 are different."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), torch.nan, x).view(kind)


# --- recurrence_advance_ -----------------------------------------------------------------------------------------------------


class Wave(NamedTuple):
    """What recurrence_advance_ writes, in its order, plus the predictions, which it reads."""

    tokens: Tensor
    predictions: Tensor
    recurrences: Tensor
    unchanged_steps: Tensor
    width: Tensor
    cursor: Tensor
    advance: Tensor
    steps: Tensor
    remaining: Tensor

    def clone(self) -> Wave:
        return Wave(*(x.clone() for x in self))

    def to(self, device: torch.device) -> Wave:
        return Wave(*(x.to(device, copy=True) for x in self))


class AdvanceCase(NamedTuple):
    wave: Wave
    options: dict[str, object]

    def moved(self, device: torch.device) -> AdvanceCase:
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return AdvanceCase(self.wave.to(device), options)


def make_advance(seed: int, *, batch: int = 3, capacity: int = 6, dtype: torch.dtype = torch.int64) -> AdvanceCase:
    """Few different tokens and mostly converged rows, so that every case occurs."""
    rng = random.Random(seed)
    rows = rng.choice([capacity, rng.randint(0, capacity)])
    cap = rng.choice([None, rng.randint(max(rows, 1), capacity)]) if capacity else None
    headway = rng.choice([1, 1, 2, 3, capacity + 2])
    vocabulary = rng.choice([2, 4, 50])

    def table(columns: int, most: int) -> Tensor:
        return torch.tensor(
            [[rng.randint(0, most) for _ in range(columns)] for _ in range(batch)], dtype=dtype
        ).reshape(batch, columns)

    def vector(*choices: int) -> Tensor:
        return torch.tensor([rng.choice(choices) for _ in range(batch)], dtype=dtype)

    tokens, predictions = table(capacity + 1, vocabulary - 1), table(rows, vocabulary - 1)
    agree = rng.choice([0.3, 0.9, 1.0])
    for b in range(batch):
        for i in range(rows):
            if rng.random() < agree:
                tokens[b, i + 1] = predictions[b, i]
    wave = Wave(
        tokens,
        predictions,
        table(capacity, 9),
        table(capacity, 4),
        vector(rows, rows, *range(rows + 1)),
        vector(0, 7, 2**31 - 99),
        vector(0, 3),
        vector(0, 11),
        vector(0, 1, 2, capacity, 1000),
    )
    share = rng.choice([0.0, 0.5, 0.9, 1.0])
    options: dict[str, object] = {
        "converged": rng.choice(
            [
                None,
                torch.tensor([[rng.random() < share for _ in range(rows)] for _ in range(batch)])
                .reshape(batch, rows)
                .bool(),
            ]
        ),
        "inner_recurrence": rng.randint(1, 4),
        "max_wavefront": cap,
        "max_recurrences": rng.choice([0, 0, 8]),
        "stability": rng.choice([0, 0, 1, 3]),
        "rule": rng.choice(["prefix", "last"]),
        "headway": headway,
        "filler": rng.choice([None, table(headway - 1, vocabulary - 1)]),
        "end_tokens": rng.choice([None, torch.tensor([vocabulary - 1, 77], dtype=dtype)]),
        "keep_changed": rng.random() < 0.6,
        "keep_last": rng.random() < 0.3,
    }
    return AdvanceCase(wave, options)
