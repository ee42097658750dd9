"""The logits that planned diffusion uses: of a whole text, or of rows as held by the published cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autoregressive import Model
from .masks import planned as planned_mask

Stage = tuple[int, tuple[int, ...], bool]


def scaffold(chunks: Sequence[Sequence[int]], tags: Any) -> list[int]:
    return list(itertools.chain.from_iterable([tags.chunk_open, *chunk, tags.chunk_close] for chunk in chunks))


class Whole:
    """Every forward runs over the whole text."""

    def __init__(self, model: Model, tags: Any, sparse: bool) -> None:
        self._model, self._tags, self._sparse = model, tags, sparse
        self._stages = list[Stage]()
        self._start = 0  # of the round, after the last sync

    def plan(self, text: list[int]) -> Tensor:
        """``(1, V)``, for the last token."""
        return self._forward(text, (len(text) - self._start, (), False))[-1:]

    def fill(self, text: list[int], chunks: list[list[int]]) -> list[Tensor]:
        """``(n + 2, V)`` for each chunk that has masks, tags included; the others are ignored."""
        lengths = tuple(len(chunk) + 2 for chunk in chunks)
        rows = self._forward(text + scaffold(chunks, self._tags), (len(text) - self._start, lengths, False))
        return list(rows[len(text) :].split(lengths))

    def filled(self, chunks: list[list[int]]) -> None:
        """The chunks after a step."""

    def end(self, text: list[int], chunks: list[list[int]]) -> None:
        """The text now ends with these chunks and a sync token."""
        lengths = tuple(len(chunk) + 2 for chunk in chunks)
        self._stages.append((len(text) - self._start - sum(lengths) - 1, lengths, True))
        self._start = len(text)

    def _forward(self, tokens: list[int], stage: Stage) -> Tensor:
        mask, positions = planned_mask([*self._stages, stage], self._sparse)
        return self._model(torch.tensor([tokens], dtype=torch.int64), positions[None], mask)[0]


class Published:
    """What the published cache holds: rows as last computed, whatever comes later. Those of a chunk are from
    the forward that filled its last token, where that was still a mask.

    A model without a cache recomputes them in each forward, with all rows that they saw at the time. Later rows see those that
    were kept.
    """

    def __init__(self, model: Model, tags: Any, mask_token: int, sparse: bool) -> None:
        self._model, self._tags, self._mask_token, self._sparse = model, tags, mask_token, sparse
        self._tokens, self._positions = list[int](), list[int]()
        self._seen = list[Tensor]()  # for each row, the numbers of the rows that it saw
        self._kept = list[int]()
        self._before = list[int]()  # rows kept before the round's chunks
        self._fed = 0  # tokens of the text
        self._open: list[int] | None = None

    def plan(self, text: list[int]) -> Tensor:
        new = text[self._fed :]
        rows = self._forward(
            new, list(range(self._fed, len(text))), torch.ones(len(new), len(new)).tril() > 0, self._kept
        )
        self._keep(range(len(new)))
        self._fed, self._before, self._open = len(text), list(self._kept), None
        return rows[-1:]

    def fill(self, text: list[int], chunks: list[list[int]]) -> list[Tensor]:
        first = self._open is None
        self._open = [n for n, chunk in enumerate(chunks) if first or self._mask_token in chunk]
        lengths = [len(chunk) + 2 for chunk in chunks]
        starts = [sum(lengths[:n]) for n in range(len(chunks))]
        open_rows = [starts[n] + row for n in self._open for row in range(lengths[n])]
        among = planned_mask([(0, tuple(lengths), False)], self._sparse)[0][open_rows][:, open_rows]
        tokens = scaffold([chunks[n] for n in self._open], self._tags)
        context = self._before if self._sparse else self._kept
        rows = self._forward(tokens, [len(text) + row for row in open_rows], among, context)
        found = [rows[:0]] * len(chunks)
        for n, own in zip(self._open, rows.split([lengths[n] for n in self._open])):
            found[n] = own
        return found

    def filled(self, chunks: list[list[int]]) -> None:
        first, done = 0, list[int]()
        for n in self._open or []:
            stop = first + len(chunks[n]) + 2
            done += range(first, stop) if self._mask_token not in chunks[n] else []
            first = stop
        self._keep(done)

    def end(self, text: list[int], chunks: list[list[int]]) -> None:
        if self._open is None and chunks:  # all are empty, and no step has run
            self.fill(text[: len(text) - 2 * len(chunks) - 1], chunks)
            self.filled(chunks)
        self._fed = len(text) - 1

    def _forward(self, tokens: list[int], positions: list[int], among: Tensor, context: list[int]) -> Tensor:
        held, count = len(self._tokens), len(self._tokens) + len(tokens)
        mask = torch.zeros(count, count, dtype=torch.bool)
        for row, seen in enumerate(self._seen):
            mask[row, seen] = True
        mask[held:, context] = True
        mask[held:, held:] = among
        self._new = tokens, positions, [row.nonzero()[:, 0] for row in mask[held:]]
        every = torch.tensor([self._tokens + tokens], dtype=torch.int64)
        return self._model(every, torch.tensor([self._positions + positions]), mask)[0][held:]

    def _keep(self, rows: Sequence[int]) -> None:
        """Rows of the last forward."""
        if rows:
            tokens, positions, seen = self._new
            self._kept += [len(self._tokens) + row for row in rows]
            self._tokens, self._positions = self._tokens + tokens, self._positions + positions
            self._seen += seen
