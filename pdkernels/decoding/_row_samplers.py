"""Temperature and filters of each row of a running batch: rows with equal ones are drawn together, by one call of the ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pdkernels.decoding._sampling import checked_sampling
from pdkernels.decoding._token_sampler import TokenSampler, checked_sampler

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Options that rows may have of their own."""


def own_sampler(op: str, options: Mapping[str, Any]) -> TokenSampler:
    """The sampler of a request's options.

    Raises ValueError or TypeError, in the name of `op`, for one out of range.
    """
    temperature, *filters = (options.get(name) for name in SAMPLING)
    temperature = 0.0 if temperature is None else temperature
    checked_sampling(op, temperature, 0, 1)
    return checked_sampler(op, temperature, *filters)


class RowSamplers:
    """Takes the place of a `TokenSampler` in the steps of a batch, and draws row b with a sampler of its own.

    A draw depends on its row alone, so each row gets the token that its sampler draws in any batch. Rows without a request are drawn
    with others, as cheaply as possible.

    >>> logits, places, seeds = torch.zeros(2, 1, 50), torch.zeros(2, 1, dtype=torch.int64), torch.tensor([7, 7])
    >>> rows = RowSamplers(2)
    >>> rows[0], rows[1] = TokenSampler(0.0), TokenSampler(1.0)
    >>> drawn = rows.sample(logits, places, seeds, 0)
    >>> drawn[0].item(), drawn[1].item() == TokenSampler(1.0).sample(logits, places, seeds, 0)[1].item()
    (0, True)
    """

    def __init__(self, rows: int) -> None:
        self._rows: list[TokenSampler | None] = [None] * rows
        self._groups: list[tuple[TokenSampler, Tensor | None]] | None = None

    def __getitem__(self, row: int) -> TokenSampler | None:
        return self._rows[row]

    def __setitem__(self, row: int, sampler: TokenSampler | None) -> None:
        """None: the row has no request."""
        self._rows[row], self._groups = sampler, None

    def sample(
        self, logits: Tensor, positions: Tensor, seeds: Tensor, step: Tensor | int, suppress: tuple[int, ...] = ()
    ) -> Tensor:
        """As `TokenSampler.sample`."""
        return self._drawn(lambda one, *rows: (one.sample(*rows, suppress),), logits, positions, seeds, step)[0]

    def draw(
        self,
        model: Any,
        hidden: Tensor,
        positions: Tensor,
        seeds: Tensor,
        step: Tensor | int,
        suppress: tuple[int, ...] = (),
    ) -> Tensor:
        """As `TokenSampler.draw`."""
        return self._drawn(lambda one, *rows: (one.draw(model, *rows, suppress),), hidden, positions, seeds, step)[0]

    def guess(
        self,
        model: Any,
        hidden: Tensor,
        positions: Tensor,
        seeds: Tensor,
        step: Tensor | int,
        suppress: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """As `TokenSampler.guess`."""
        ids, probs = self._drawn(lambda one, *rows: one.guess(model, *rows, suppress), hidden, positions, seeds, step)
        return ids, probs

    def _drawn(self, draw: Callable[..., tuple[Tensor, ...]], *arguments: Tensor | int) -> tuple[Tensor, ...]:
        """The results of `draw` for all rows; tensors among the arguments have one entry for each row."""
        first = arguments[0]
        assert isinstance(first, Tensor)
        groups = self._grouped(first.device)
        if len(groups) == 1:
            return draw(groups[0][0], *arguments)
        whole: tuple[Tensor, ...] = ()
        for sampler, rows in groups:
            assert rows is not None
            mine = (one.index_select(0, rows) if isinstance(one, Tensor) else one for one in arguments)
            parts = draw(sampler, *mine)
            whole = whole or tuple(part.new_empty(len(self._rows), *part.shape[1:]) for part in parts)
            for result, part in zip(whole, parts, strict=True):
                result.index_copy_(0, rows, part)
        return whole

    def _grouped(self, device: torch.device) -> list[tuple[TokenSampler, Tensor | None]]:
        """Samplers with the rows that they draw, made again when a row has changed; a single one draws all."""
        if self._groups is None:
            found: dict[TokenSampler, list[int]] = {}
            for row, sampler in enumerate(self._rows):
                if sampler is not None:
                    found.setdefault(sampler, []).append(row)
            cheapest = min(found, key=lambda sampler: sampler.temperature > 0, default=TokenSampler(0.0))
            found.setdefault(cheapest, []).extend(row for row, sampler in enumerate(self._rows) if sampler is None)
            several = len(found) > 1
            self._groups = [
                (sampler, torch.tensor(rows).to(device, non_blocking=True) if several else None)
                for sampler, rows in found.items()
            ]
        return self._groups
