"""Calls of unmask_: canvases with masks in them, guesses, and every rule."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels.reference import unmask as reference

MASK = 7
STYLES = ["contiguous", "transposed", "apart"]
RULES = ["quota", "threshold", "factor"]


class Case(NamedTuple):
    """Tensors of a call, and its other arguments."""

    tokens: Tensor
    ids: Tensor
    confidence: Tensor | None
    options: dict[str, Any]

    def sequence(self, b: int) -> Case:
        def alone(x: Any) -> Any:
            return x[b : b + 1] if isinstance(x, Tensor) else x

        return Case(*(alone(x) for x in self[:3]), {name: alone(x) for name, x in self.options.items()})

    def with_(self, **options: Any) -> Case:
        return self._replace(options={**self.options, **options})

    def windows(self, b: int) -> list[tuple[int, int]]:
        windows = self.options.get("windows")
        return (
            [(0, self.tokens.shape[1])]
            if windows is None
            else [(start, end) for start, end in windows[b].view(-1, 2).tolist()]
        )

    def positions(self, b: int) -> list[int]:
        positions = self.options.get("positions")
        return list(range(self.tokens.shape[1])) if positions is None else positions[b].tolist()


def make_case(
    seed: int,
    *,
    batch: int = 2,
    length: int = 12,
    rule: str = "quota",
    segments: int | None = None,
    dtype: torch.dtype = torch.int64,
) -> Case:
    """Some tokens are masks, some guesses are the mask token, some confidences tie, and `segments` (0: one window) are anywhere."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    share = rng.choice([0.0, 0.4, 0.9, 1.0])
    tokens = integers(0, 5, batch, length)
    tokens[torch.rand(batch, length, generator=generator) < share] = MASK
    placed = rng.random() < 0.6
    candidates = rng.randint(0, length + 2) if placed else length
    ids = integers(10, 99, batch, candidates)
    wrong = torch.rand(batch, candidates, generator=generator) < rng.choice([0.0, 0.2])
    ids[wrong] = torch.where(integers(0, 2, batch, candidates) > 0, MASK, -1)[wrong]
    confidence = None
    if rng.random() < 0.8:
        confidence = torch.rand(batch, candidates, generator=generator)
        if rng.random() < 0.5:
            confidence = (confidence * 4).round() / 4
        if rng.random() < 0.2:
            odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, -1.5, 1e-42])
            confidence = odd[integers(0, len(odd), batch, candidates)]
    index = rng.choice([torch.int32, torch.int64])
    options: dict[str, Any] = dict(
        mask_token=MASK, seed=rng.randint(-(2**63), 2**63 - 1), step=rng.randint(0, 2**32 - 1)
    )
    if rng.random() < 0.5:
        options["step"] = integers(0, 1000, batch).to(index)
    if placed:
        order = [torch.randperm(length, generator=generator)[:candidates] for _ in range(batch)]
        positions = torch.full((batch, candidates), -1)
        for b, row in enumerate(order):
            positions[b, : len(row)] = row
        positions[torch.rand(batch, candidates, generator=generator) < 0.2] = -1
        options["positions"] = positions.to(index)
    shape: tuple[int, ...] = (batch,)
    if segments is not None:
        cuts = integers(0, length + 1, batch, 2 * max(segments, 1)).sort(1).values.unflatten(1, (-1, 2))
        options["windows"] = (cuts.flip(1) if segments else cuts[:, 0]).to(index)
        shape = options["windows"].shape[:-1]
    for name in ("quota", "min_count"):
        most = rng.choice([2, length + 3])
        options[name] = integers(0, most, *shape).to(index) if rng.random() < 0.5 else rng.randint(0, most)
    if rule == "threshold":
        options |= {"threshold": rng.choice([0.5, 0.75, 0.9, 0.0, -math.inf]), "strict": rng.random() < 0.5}
    elif rule == "factor":
        options["factor"] = rng.choice([0.0, 0.5, 1.0, 2.5, 30.0])
    return Case(tokens.to(dtype), ids.to(dtype), confidence, options)


class Outcome(NamedTuple):
    tokens: Tensor
    committed: Tensor
    remaining: Tensor
    done: Tensor


def expected(case: Case) -> Outcome:
    """With the reference, where integers that may be tensors are two arguments."""
    options, tokens = dict(case.options), case.tokens.clone()
    for name, plural in (("quota", "quotas"), ("min_count", "min_counts"), ("step", "steps")):
        if isinstance(options.get(name), Tensor):
            options[plural] = options.pop(name)
    return Outcome(tokens, *reference.unmask_(tokens, case.ids, case.confidence, **options))


def run(impl: Any, case: Case, style: str = "contiguous") -> Outcome:
    """With an implementation, on tensors laid out in a style; bytes that are not tokens must not change."""
    poison = -77

    def spread(x: Tensor | None) -> Tensor | None:
        if x is None or style == "contiguous":
            return x if x is None else x.clone()
        if style == "transposed":
            return x.mT.clone(memory_format=torch.contiguous_format).mT
        room = torch.full((x.shape[0] + 2, 3 * x.shape[1] + 4), poison, dtype=x.dtype, device=x.device)
        inner = room[1:-1, 2 : 2 + 3 * x.shape[1] : 3]
        inner.copy_(x)
        return inner

    def moved(x: Any) -> Any:
        return x.to(impl.device) if isinstance(x, Tensor) else x

    tokens = spread(moved(case.tokens))
    options = {
        name: spread(moved(x)) if isinstance(x, Tensor) and x.dim() == 2 else moved(x)
        for name, x in case.options.items()
    }
    result = impl.unmask_(tokens, spread(moved(case.ids)), spread(moved(case.confidence)), **options)
    if style == "apart":
        room = tokens._base
        tokens = tokens.clone()
        room[1:-1, 2 : 2 + 3 * tokens.shape[1] : 3] = poison
        assert bool((room == poison).all())
    return Outcome(*(x.cpu() for x in (tokens, *result)))


def differs(a: Outcome, b: Outcome) -> str:
    """A description of the differences; empty if there are none."""
    pairs = [(name, x, y) for name, x, y in zip(Outcome._fields, a, b) if x.dtype != y.dtype or not torch.equal(x, y)]
    return "; ".join(f"{name}: {x} instead of {y}" for name, x, y in pairs)
