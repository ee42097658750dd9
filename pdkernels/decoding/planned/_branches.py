"""Chunks that are written token by token: each continues a copy of the cached text of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pdkernels.decoding.planned._text import PlannedText
from pdkernels.generation.cache_rows import rows_of
from pdkernels.generation.session import to_device_async


class Order(NamedTuple):
    """The rows of a forward, which are ascending, and how the chunks that were asked for lie in them."""

    rows: list[int]
    ranked: list[int]
    """The chunk of each row."""
    back: list[int]
    """The row of each chunk."""


class Branches:
    """A cache with a row for each open chunk of the batch. The cache of the texts is read when a round begins."""

    def __init__(self, model: Any, trunk: Any) -> None:
        self._model, self._trunk = model, trunk
        self._cache: Any = None
        self._lengths: dict[int, int] = {}
        """Of the rows in use."""
        self._row_of: dict[int, dict[int, int]] = {}
        """By sequence and chunk."""

    def grow_(self, texts: Sequence[PlannedText]) -> None:
        """Gives rows to the chunks of the texts whose round begins."""
        new = [text for text in texts if text.sequence not in self._row_of]
        count = sum(len(text.live) for text in new)
        rows = 0 if self._cache is None else self._cache.batch
        if len(self._lengths) + count > rows:
            before, self._cache = self._cache, self._model.new_cache(len(self._lengths) + count, self._trunk.capacity)
            for row, length in self._lengths.items():
                self._cache.copy_row_(row, before, row, length)
        free = [row for row in range(self._cache.batch) if row not in self._lengths]
        for text in new:
            row_of = self._row_of[text.sequence] = dict[int, int]()
            for chunk in text.live:
                row = row_of[chunk] = free.pop()
                self._cache.copy_row_(row, self._trunk, text.sequence, text.cached)
                self._lengths[row] = text.cached

    def rows(self, texts: Sequence[PlannedText], live: Sequence[list[int]]) -> Order:
        """Of these chunks."""
        rows = [self._row_of[text.sequence][chunk] for text, chunks in zip(texts, live) for chunk in chunks]
        ranked = sorted(range(len(rows)), key=rows.__getitem__)
        back = sorted(range(len(rows)), key=ranked.__getitem__)
        return Order([rows[chunk] for chunk in ranked], ranked, back)

    def forward_(self, tokens: torch.Tensor, offsets: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Hidden states ``(len(rows), 1, hidden_size)`` of a token in each of the rows, `offsets` behind its place in the
        cache, where it stays."""
        hidden: torch.Tensor = self._model.hidden(tokens, cache=rows_of(self._cache, rows), positions=offsets)
        counts = [[int(row in set(rows))] for row in range(self._cache.batch)]
        self._cache.commit_(to_device_async(counts, self._cache.lengths.device)[:, 0])
        for row in rows:
            self._lengths[row] += 1
        return hidden

    def keep_(self, text: PlannedText) -> None:
        """Frees the rows of chunks that are complete."""
        row_of = self._row_of[text.sequence]
        unfinished = set(text.live) if text.phase == "fill" else set()
        for chunk in [chunk for chunk in row_of if chunk not in unfinished]:
            del self._lengths[row_of.pop(chunk)]
        if not row_of:
            del self._row_of[text.sequence]
