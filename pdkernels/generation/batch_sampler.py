"""Samplers of the rows of a running batch: rows with equal ones are drawn together, by one call of the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels.generation.sampler import Sampler


class BatchSampler:
    """Takes the place of a `Sampler` in the steps of a batch, and draws row b with a sampler of its own.

    A draw depends on its row alone, so each row gets the token that its sampler draws in any batch. Rows without a
    request are drawn with others, as cheaply as possible.

    >>> logits, places, seeds = torch.zeros(2, 1, 50), torch.zeros(2, 1, dtype=torch.int64), torch.tensor([7, 7])
    >>> rows = BatchSampler(2)
    >>> rows[0], rows[1] = Sampler(0.0), Sampler(1.0)
    >>> drawn = rows.sample(logits, places, seeds, 0)
    >>> drawn[0].item(), drawn[1].item() == Sampler(1.0).sample(logits, places, seeds, 0)[1].item()
    (0, True)
    """

    def __init__(self, rows: int) -> None:
        self._rows: list[Sampler | None] = [None] * rows
        self._groups: list[tuple[Sampler, Tensor | None]] | None = None

    def __getitem__(self, row: int) -> Sampler | None:
        return self._rows[row]

    def __setitem__(self, row: int, sampler: Sampler | None) -> None:
        """None: the row has no request."""
        self._rows[row], self._groups = sampler, None

    @property
    def greedy(self) -> bool:
        """Whether it takes the most probable token of every row."""
        return all(sampler is None or sampler.greedy for sampler in self._rows)

    def of(self, rows: Sequence[int]) -> Sampler | BatchSampler:
        """What draws other rows, each as the row of this number is drawn here."""
        if len(set(self._rows) - {None}) < 2:
            return next((sampler for sampler in self._rows if sampler is not None), Sampler())
        others = BatchSampler(len(rows))
        for row, number in enumerate(rows):
            others[row] = self._rows[number]
        return others

    def sample(
        self, logits: Tensor, positions: Tensor, seeds: Tensor, step: Tensor | int, suppress: tuple[int, ...] = ()
    ) -> Tensor:
        """`Sampler.sample`, row by row."""
        return self._drawn(lambda sampler, *rows: (sampler.sample(*rows, suppress),), logits, positions, seeds, step)[0]

    def draw(
        self,
        model: Any,
        hidden: Tensor,
        positions: Tensor,
        seeds: Tensor,
        step: Tensor | int,
        suppress: tuple[int, ...] = (),
    ) -> Tensor:
        """`Sampler.draw`, row by row."""
        return self._drawn(
            lambda sampler, *rows: (sampler.draw(model, *rows, suppress),), hidden, positions, seeds, step
        )[0]

    def guess(
        self,
        model: Any,
        hidden: Tensor,
        positions: Tensor,
        seeds: Tensor,
        step: Tensor | int,
        suppress: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """`Sampler.guess`, row by row."""
        ids, probs = self._drawn(
            lambda sampler, *rows: sampler.guess(model, *rows, suppress), hidden, positions, seeds, step
        )
        return ids, probs

    def _drawn(self, draw: Callable[..., tuple[Tensor, ...]], *arguments: Tensor | int) -> tuple[Tensor, ...]:
        """The results of `draw` for all rows; tensors among the arguments have one entry for each row."""
        first = arguments[0]
        assert isinstance(first, Tensor)
        groups = self._grouped(first.device)
        if len(groups) == 1:
            return draw(groups[0][0], *arguments)
        results: tuple[Tensor, ...] = ()
        for sampler, rows in groups:
            assert rows is not None
            selected = (value.index_select(0, rows) if isinstance(value, Tensor) else value for value in arguments)
            drawn = draw(sampler, *selected)
            results = results or tuple(column.new_empty(len(self._rows), *column.shape[1:]) for column in drawn)
            for result, column in zip(results, drawn, strict=True):
                result.index_copy_(0, rows, column)
        return results

    def _grouped(self, device: torch.device) -> list[tuple[Sampler, Tensor | None]]:
        """Samplers with the rows that they draw, made again when a row has changed; a single one draws all."""
        if self._groups is None:
            rows_of: dict[Sampler, list[int]] = {}
            for row, sampler in enumerate(self._rows):
                if sampler is not None:
                    rows_of.setdefault(sampler, []).append(row)
            cheapest = min(rows_of, key=lambda sampler: sampler.temperature > 0, default=Sampler())
            rows_of.setdefault(cheapest, []).extend(row for row, sampler in enumerate(self._rows) if sampler is None)
            split = len(rows_of) > 1
            self._groups = [
                (sampler, torch.tensor(rows, device="cpu").to(device, non_blocking=True) if split else None)
                for sampler, rows in rows_of.items()
            ]
        return self._groups
