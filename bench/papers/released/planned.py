"""Planned diffusion as released: parser, schedule, threshold rule and cache.

Source: the decoder released with "Planned Diffusion". `plain_planned` is the plain form.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pdkernels.decoding import Method, find
from pdkernels.decoding.method import Option
from pdkernels.decoding.planned import planned
from pdkernels.decoding.planned._text import PlannedText, PlanOptions
from pdkernels.decoding.planned.outline import BadPlan, Item
from pdkernels.generation.session import Session, to_device_async
from pdkernels.models import PlanTokens

_LAST_TIME = 1e-3


class Parts(NamedTuple):
    """Which parts are the released ones."""

    rule: bool
    schedule: bool
    cache: bool
    parser: bool


def decode(
    session: Session,
    *,
    rule: Literal["released", "ours"] = "released",
    schedule: Literal["released", "ours"] = "released",
    keeping: Literal["released", "ours"] = "released",
    parser: Literal["released", "ours"] = "released",
    **options: Any,
) -> int:
    """Each part as released, or as in method "planned", whose options this takes too.

    Args:
        rule: with a threshold, a step considers only the schedule's share and as many positions as the previous step rejected.
        schedule: the times of a round's steps end at 0.001, so a step may fill one position too few, and the last one fills the rest.
        keeping: later rounds, and with dense chunks the other chunks, see a chunk as it was before its last tokens were filled in.
        parser: everything after the last sync token of the text is a plan, the prompt included; the number of an item is its first
            digit, with the next token if that is a digit too.
    """
    parts = Parts(*(way == "released" for way in (rule, schedule, keeping, parser)))
    return planned.decode(session, functools.partial(ReleasedText, parts), ReleasedRounds, **options)


class _Released(Method):
    @cached_property
    def options(self) -> dict[str, Option]:
        return find("planned").options | super().options


PLANNED = _Released("planned", decode, "planned", frozenset({"plan_tokens"}), title="planned diffusion as released")


class ReleasedText(PlannedText):
    """A sequence.

    Attributes:
        finished: rows of its last step that stay in the cache: dense chunks that are complete, as the step computed them.
    """

    def __init__(self, parts: Parts, session: Session, sequence: int, options: PlanOptions) -> None:
        super().__init__(session, sequence, replace(options, cache="drop_finished") if parts.cache else options)
        self.parts, self.finished = parts, list[int]()
        self.stores_steps = parts.cache and not options.sparse
        self._refused: list[int] = []
        self._stale: list[list[int]] = []
        self._frozen = 0  # cached rows of the round's chunks

    def _begin_chunks(self, stop: int) -> None:
        self._refused, self._stale, self._frozen = [], [], 0
        super()._begin_chunks(stop)

    def _parsed(self) -> list[Item]:
        if not self.parts.parser:
            return super()._parsed()
        text = self._session.prompts[self.sequence] + self._session.tokens[self.sequence]
        return items_as_released(text, self._options.tags)

    def _steps_of(self, longest: int) -> int:
        return steps_of(longest, self._options.steps_ratio) if self.parts.schedule else super()._steps_of(longest)

    @property
    def chunk_starts(self) -> list[int]:
        return [start - self._frozen for start in super().chunk_starts]

    def quotas(self, live: Sequence[int]) -> list[int]:
        self._quotas = super().quotas(live)
        counts = [self.chunks[chunk].count(self._options.mask_token) for chunk in live]
        if self._options.threshold is None and self.parts.schedule:
            self._quotas = [quota(masks, self._step, self._steps) for masks in counts]
        elif self._options.threshold is not None and self.parts.rule:
            self._refused = self._refused or [0] * len(self.chunks)
            self._quotas = [
                candidates(masks, self._step, self._steps, self._refused[chunk])
                for chunk, masks in zip(live, counts, strict=True)
            ]
        return self._quotas

    def filled(self, live: Sequence[int], contents: Sequence[list[int]]) -> None:
        mask = self._options.mask_token
        self._stale = self._stale or [list(chunk) for chunk in self.chunks]
        self.finished = []
        starts = accumulate((len(content) + 2 for content in contents), initial=0)
        for chunk, content, most, start in zip(live, contents, self._quotas, starts):
            new = self.chunks[chunk].count(mask) - content.count(mask)
            if new and self._refused:
                self._refused[chunk] = most - new
            if new:
                self._stale[chunk] = self.chunks[chunk]
            if self.stores_steps and mask not in content:
                self.finished += range(start, start + len(content) + 2)
        self._frozen += len(self.finished)
        self.cached += len(self.finished)
        super().filled(live, contents)

    def _entering(self) -> list[list[int]]:
        if self._frozen:  # all of them are in the cache
            return []
        return self._stale or self.chunks if self.parts.cache else self.chunks


class ReleasedRounds(planned.Rounds):
    """The forwards of a batch."""

    def _step(self, texts: Sequence[PlannedText]) -> None:
        filling = [text for text in texts if isinstance(text, ReleasedText) and text.phase == "fill"]
        super()._step(texts)
        rows = {text.sequence: text.finished for text in filling}
        if width := max(map(len, rows.values()), default=0):
            lines = [rows.get(sequence, []) for sequence in range(self._session.batch)]
            table = [[len(own), *own, *[0] * (width - len(own))] for own in lines]
            kept = to_device_async(table, self._device)
            self._cache.commit_(kept[:, 0], kept[:, 1:])
        for text in filling:
            text.finished = []

    def _fill(self, texts: Sequence[PlannedText], *arguments: Any) -> Tensor:
        self._by_rule = all(isinstance(text, ReleasedText) and text.parts.rule for text in texts)
        return super()._fill(texts, *arguments)

    def _limits(self, scores: Tensor, positions: Tensor, windows: Tensor, quota: Tensor) -> dict[str, Any]:
        threshold = self._options.threshold
        if threshold is None or not self._by_rule:
            return super()._limits(scores, positions, windows, quota)
        inside = (positions[:, None] >= windows[..., :1]) & (positions[:, None] < windows[..., 1:])
        reached = (inside & (scores.double() >= threshold)[:, None]).sum(-1)
        return {"quota": torch.minimum(quota, reached).clamp_(min=1)}


def items_as_released(text: Sequence[int], tags: PlanTokens) -> list[Item]:
    """The items of a text that ends with a plan.

    Raises `BadPlan`.

    >>> tags = PlanTokens(10, 11, 12, 13, 14, 15, digits=range(10))
    >>> items_as_released([12, 20, 1, 21, 4, 13, 12, 22, 1, 0, 0, 13], tags)
    [Item(topic=[20], number=1), Item(topic=[22], number=10)]
    """
    first = max((index + 1 for index, token in enumerate(text) if token == tags.sync), default=0)
    items = []
    opened: int | None = None
    for index in range(first, len(text)):
        if text[index] == tags.topic_open and opened is None:
            opened = index + 1
        elif text[index] == tags.topic_close and opened is not None:
            items.append(_first_digits(text[opened:index], tags))
            opened = None
    return items


def _first_digits(inside: Sequence[int], tags: PlanTokens) -> Item:
    for index, token in enumerate(inside):
        if token in tags.digits:
            number = tags.digits.index(token)
            if index + 1 < len(inside) and inside[index + 1] in tags.digits:
                number = 10 * number + tags.digits.index(inside[index + 1])
            return Item(list(inside[:index]), number)
    raise BadPlan("no number")


def steps_of(longest: int, ratio: float) -> int:
    """Steps for a round whose longest chunk has this many masks; at least one, if it has any.

    >>> steps_of(10, 0.25), steps_of(2, 0.25), steps_of(0, 1.0)
    (2, 1, 0)
    """
    return max(1, int(longest * ratio)) if longest else 0


def quota(masks: int, step: int, steps: int) -> int:
    """How many of the masks left in a chunk step number `step` of `steps` commits.

    >>> def commits(masks, steps, found=()):
    ...     count = quota(masks, len(found), steps)
    ...     return [*found, count] if count == masks else commits(masks - count, steps, [*found, count])
    >>> commits(40, 10)
    [3, 4, 4, 4, 4, 4, 4, 4, 4, 5]
    """
    if step >= steps - 1:
        return masks
    share = 1 - _time(step + 1, steps) / _time(step, steps)
    return min(masks, max(1, int(masks * share)))


def _time(step: int, steps: int) -> float:
    """Falls from 1 in equal steps."""
    return 1 + (_LAST_TIME - 1) * step / steps


def candidates(masks: int, step: int, steps: int, refused: int) -> int:
    """How many of a chunk's masks the threshold rule looks at: the step's share plus what the previous step rejected.

    The released code may request more than there are.

    >>> candidates(40, 0, 20, 0), candidates(9, 25, 20, 3), candidates(9, 25, 20, 30)
    (2, 4, 9)
    """
    share = max(1, masks // (steps - step)) if step < steps else 1
    return min(masks, share + refused)
