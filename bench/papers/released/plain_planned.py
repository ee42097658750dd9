"""Planned diffusion as released, as plainly as it can be written: the parser, schedule, threshold rule and cache of that code.

Source: the decoder released with "Planned Diffusion". What else differs is in `pdkernels.reference.planned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pdkernels.reference.autoregressive import Model
from pdkernels.reference.masked_sampling import timesteps
from pdkernels.reference.masks import planned as planned_mask
from pdkernels.reference.planned import BadPlan, Choices, Item, PlannedResult, Whole, planned, scaffold

Way = Literal["released", "ours"]


def released_planned(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    tags: Any,
    *,
    rule: Way = "released",
    schedule: Way = "released",
    keeping: Way = "released",
    parser: Way = "released",
    **options: Any,
) -> PlannedResult:
    """:func:`pdkernels.reference.planned.planned` with these of its parts as released."""

    class Chosen(Choices):
        carry: dict[int, int]  # of each chunk, the candidates that the previous step rejected

        def rows(self, model: Model, sparse: bool) -> Whole:
            if keeping == "released":
                return ReleasedRows(model, self.tags, self.mask_token, sparse)
            return super().rows(model, sparse)

        def items(self, text: list[int], plan: list[int]) -> list[Item]:
            return released_items(text, self.tags) if parser == "released" else super().items(text, plan)

        def steps_of(self, longest: int) -> int:
            self.carry = {}
            return steps_of(longest, self.steps_ratio) if schedule == "released" else super().steps_of(longest)

        def count(self, chunk: int, scores: list[float], step: int, steps: int) -> int:
            count = super().count(chunk, scores, step, steps)
            if self.threshold is None:
                return quota(len(scores), step, steps) if schedule == "released" else count
            if rule == "released":
                maximum = threshold_quota(len(scores), step, steps, self.carry.get(chunk, 0))
                count = min(count, maximum)
                self.carry[chunk] = maximum - count
            return count

    return planned(model, prompt, max_new_tokens, tags, choices=Chosen, **options)


def released_items(text: Sequence[int], tags: Any) -> list[Item]:
    """In everything after the last sync token, wherever that is, each opening and the next closing token make an
    item; its number is its first digit, and the next token if that is a digit too.

    >>> from pdkernels.reference.planned import Tags
    >>> tags = Tags(10, 11, 12, 13, 14, 15, range(10))
    >>> [item.number for item in released_items([12, 20, 1, 21, 4, 13, 12, 22, 1, 0, 0, 13], tags)]
    [1, 10]
    """
    text, digits = list(text), list(tags.digits)
    if tags.sync in text:
        text = text[len(text) - text[::-1].index(tags.sync) :]
    items: list[Item] = []
    while tags.topic_open in text:
        text = text[text.index(tags.topic_open) + 1 :]
        if tags.topic_close not in text:
            break
        inside, text = text[: text.index(tags.topic_close)], text[text.index(tags.topic_close) + 1 :]
        offsets = [offset for offset, token in enumerate(inside) if token in digits]
        if not offsets:
            raise BadPlan("no number")
        first = offsets[0]
        two = [token for token in inside[first : first + 2] if token in digits]
        items.append(Item(inside[:first], int("".join(str(digits.index(token)) for token in two))))
    return items


def steps_of(longest: int, ratio: float) -> int:
    """Forwards of a round whose longest chunk has this many masks. r l, rounded down, which may be 0 there; here at least 1.

    >>> steps_of(10, 0.25), steps_of(2, 0.25)
    (2, 1)
    """
    return max(1, int(longest * ratio)) if longest else 0


def quota(masks: int, step: int, steps: int) -> int:
    """How many of a chunk's masks a step commits.

    >>> masks, commits = 40, []
    >>> for step in range(10):
    ...     commits.append(quota(masks, step, 10))
    ...     masks -= commits[-1]
    >>> commits
    [3, 4, 4, 4, 4, 4, 4, 4, 4, 5]
    """
    if step >= steps - 1:
        return masks
    times = timesteps(steps)
    return min(masks, max(1, int(masks * (1 - times[step + 1] / times[step]))))


def threshold_quota(masks: int, step: int, steps: int, carry: int) -> int:
    """The candidates of a step of the threshold rule; `carry`: those that the previous step rejected. Unlike there, no
    more than exist.

    >>> threshold_quota(40, 0, 20, 0), threshold_quota(9, 25, 20, 30), threshold_quota(9, 25, 20, 3)
    (2, 9, 4)
    """
    share = masks // (steps - step) if step < steps else 1
    return min(masks, max(1, share) + carry)


class ReleasedRows(Whole):
    """What the released cache holds: rows as last computed, whatever comes later. Those of a chunk are from
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
        rows = self._rows(new, list(range(self._fed, len(text))), torch.ones(len(new), len(new)).tril() > 0, self._kept)
        self._keep(range(len(new)))
        self._fed, self._before, self._open = len(text), list(self._kept), None
        return rows[-1:]

    def fill(self, text: list[int], chunks: list[list[int]]) -> list[Tensor]:
        first = self._open is None
        self._settle(chunks)
        self._open = [n for n, chunk in enumerate(chunks) if first or self._mask_token in chunk]
        lengths = [len(chunk) + 2 for chunk in chunks]
        starts = [sum(lengths[:n]) for n in range(len(chunks))]
        open_rows = [starts[n] + row for n in self._open for row in range(lengths[n])]
        among = planned_mask([(0, tuple(lengths), False)], self._sparse)[0][open_rows][:, open_rows]
        tokens = scaffold([chunks[n] for n in self._open], self._tags)
        context = self._before if self._sparse else self._kept
        rows = self._rows(tokens, [len(text) + row for row in open_rows], among, context)
        found = [rows[:0]] * len(chunks)
        for n, own in zip(self._open, rows.split([lengths[n] for n in self._open])):
            found[n] = own
        return found

    def _settle(self, chunks: list[list[int]]) -> None:
        """Keeps the last step's rows of chunks that it completed."""
        first, done = 0, list[int]()
        for n in self._open or []:
            stop = first + len(chunks[n]) + 2
            done += range(first, stop) if self._mask_token not in chunks[n] else []
            first = stop
        self._keep(done)

    def end(self, text: list[int], chunks: list[list[int]]) -> None:
        if self._open is None and chunks:  # all are empty, and no step has run
            self.fill(text[: len(text) - 2 * len(chunks) - 1], chunks)
        self._settle(chunks)
        self._fed = len(text) - 1

    def _rows(self, tokens: list[int], positions: list[int], among: Tensor, context: list[int]) -> Tensor:
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
