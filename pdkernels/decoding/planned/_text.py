"""One sequence of planned diffusion on the host: what it has written, and its next forward.

The host reads every token anyway, one poll per step, so the rounds, the chunks and their schedules are plain lists
here. The device holds only the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from pdkernels._validation import message
from pdkernels.decoding.planned._chunks import quota, steps_of
from pdkernels.decoding.planned.outline import BadPlan, Item, fitted, items_by_last_number
from pdkernels.generation.result import ChunkTokens, PlanReport, PlanRound
from pdkernels.generation.session import Session
from pdkernels.generation.traces import ChunkStep
from pdkernels.models.plan_tokens import PlanTokens

Keeping = Literal["exact", "drop_finished"]
Chunks = Literal["diffusion", "autoregressive"]
OnBadPlan = Literal["stop", "raise"]
CACHES, BAD_PLAN_WAYS = get_args(Keeping), get_args(OnBadPlan)


@dataclass(frozen=True)
class PlanOptions:
    """The caller's options, checked."""

    tags: PlanTokens
    mask_token: int
    ends: tuple[int, ...]
    sparse: bool
    steps_ratio: float
    threshold: float | None
    chunks: Chunks
    unit: float
    """Masks per unit of a number, the scale included."""
    cache: Keeping
    on_bad_plan: OnBadPlan
    max_rounds: int | None


class PlannedText:
    """A sequence. It feeds `rows` while it plans (the last drawn token; initially the prompt; after a round its chunks
    and the sync token), and its chunks while it fills them.

    Attributes:
        phase: the kind of its next forward.
        rows: what a plan forward feeds.
        round_lengths: of the chunks among `rows`, tags included; empty for plain text.
        chunks: contents of the round's chunks.
        cached: tokens in the cache, as scheduled by the host.
        number: forwards that it took part in.
    """

    def __init__(self, session: Session, sequence: int, options: PlanOptions) -> None:
        self._session, self.sequence, self._options = session, sequence, options
        self._limit = session.limits[sequence]
        self.phase: Literal["plan", "fill", "done"] = "plan" if self._limit else "done"
        self.rows = list(session.prompts[sequence])
        self.round_lengths: tuple[int, ...] = ()
        self.chunks: list[list[int]] = []
        self.cached = self.number = 0
        self._plan: list[int] = []
        self._items: list[Item] = []
        self._numbered = 0  # chunks of earlier rounds
        self._step = self._steps = 0
        self.report = PlanReport([], "length", dict.fromkeys(("plan", "chunks", "refresh"), 0), {})
        self.report.rows.update(self.report.forwards)

    # Planning

    def planned(self, token: int) -> None:
        """Takes the `token` of a plan forward."""
        self._count("refresh" if self.round_lengths else "plan", len(self.rows))
        self.cached += len(self.rows)
        self.rows, self.round_lengths = [token], ()
        if token < 0:
            self._session.fail_without_choice(self.sequence)
        if token == self._options.tags.sync or token in self._options.ends:
            self._begin_chunks(token)
            return
        self._plan.append(token)
        self._session.emit(self.sequence, [token], 0)
        if self._session.stopped[self.sequence]:
            self._end("stop", "stop")
        elif self._left == 0:
            self._end("length", "length")

    @property
    def _left(self) -> int:
        return self._limit - len(self._session.tokens[self.sequence])

    def _begin_chunks(self, stop: int) -> None:
        """Lays out the chunks of a complete plan."""
        self._stop, options = stop, self._options
        try:
            self._items = self._parsed()
        except BadPlan as bad:
            if options.on_bad_plan == "raise":
                actual = f"{bad.reason!r} in round {len(self.report.rounds)} of sequence {self.sequence}"
                fault = message("decoding.planned", "plan", "say what to write", actual, "Pass on_bad_plan='stop'.")
                raise BadPlan(bad.reason, fault) from None
            self._session.emit(self.sequence, [stop], 0)
            self._end(bad.reason, self._stop_name)
            return
        requested = [int(item.number * options.unit) for item in self._items]
        lengths = fitted(requested, self._left - 1)
        if lengths is None:
            self._session.emit(self.sequence, [stop], 0)
            self._end("length", self._stop_name)
            return
        self._cut = lengths != requested
        self.chunks = [[options.mask_token] * length for length in lengths]
        self._step, self._steps = 0, steps_of(max(lengths, default=0), options.steps_ratio)
        self.phase = "fill"
        for chunk, length in enumerate(lengths):
            if length == 0:
                self._tell(chunk)
        if self._steps == 0:
            self._end_round()

    def _parsed(self) -> list[Item]:
        items = items_by_last_number(self._plan, self._options.tags)
        if not self._plan and self._stop_name == "sync" and self.report.rounds:
            last = self.report.rounds[-1]
            if not last.plan and not last.lengths:
                raise BadPlan("no items")
        return items

    @property
    def _stop_name(self) -> str:
        return "sync" if self._stop == self._options.tags.sync else "end"

    # Filling

    @property
    def live(self) -> list[int]:
        """The chunks whose rows a step computes."""
        chunks = range(len(self.chunks))
        if self._options.chunks == "diffusion" and (self._options.cache == "exact" or self._step == 0):
            return list(chunks)
        return [chunk for chunk in chunks if self._is_open(chunk)]

    def _is_open(self, chunk: int) -> bool:
        return self._options.mask_token in self.chunks[chunk]

    @property
    def chunk_starts(self) -> list[int]:
        """Where the round's chunks begin, counted from the cached tokens on."""
        return list(accumulate((len(content) + 2 for content in self.chunks), initial=0))

    def quotas(self, live: Sequence[int]) -> list[int]:
        """How many masks of each of these chunks the next step commits; with a threshold, at least."""
        if self._options.threshold is not None:
            return [1] * len(live)
        counts = [self.chunks[chunk].count(self._options.mask_token) for chunk in live]
        return [quota(masks, self._step, self._steps) for masks in counts]

    def continued(self, live: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes the next token of each of the chunks `live`. Filler and closing tags end a chunk."""
        tags, mask, contents = self._options.tags, self._options.mask_token, []
        for chunk, token in zip(live, tokens, strict=True):
            written = self.chunks[chunk].index(mask)
            left = len(self.chunks[chunk]) - written
            new = [tags.pad] * left if token in (tags.pad, tags.chunk_close) else [token] + [mask] * (left - 1)
            contents.append(self.chunks[chunk][:written] + new)
        self.filled(live, contents, len(live))

    def filled(self, live: Sequence[int], contents: Sequence[list[int]], rows: int | None = None) -> None:
        """Takes the `contents` that a step over so many `rows` left in the chunks `live`; None: over all of theirs."""
        mask, committed = self._options.mask_token, dict[tuple[int, int], int]()
        self._count("chunks", sum(len(content) + 2 for content in contents) if rows is None else rows)
        before, done = self.chunks, []
        self.chunks = [list(chunk) for chunk in before]
        for chunk, content in zip(live, contents, strict=True):
            new = {index: token for index, token in enumerate(content) if before[chunk][index] == mask != token}
            committed |= {(chunk, index): token for index, token in new.items()}
            if not new:
                continue
            self.chunks[chunk] = content
            if mask not in content:
                done.append(chunk)
        self._session.accepted[self.sequence].append(len(committed))
        if self._session.trace is not None:
            step = ChunkStep(len(self.report.rounds), before, committed)
            self._session.trace[self.sequence].append(step)
        self._step += 1
        for chunk in done:
            self._tell(chunk)
        if not any(map(self._is_open, range(len(self.chunks)))):
            self._end_round()

    def _tell(self, chunk: int) -> None:
        """Reports a complete chunk."""
        reported = ChunkTokens(self._scaffold([self.chunks[chunk]]), self._numbered + chunk)
        self._session.report(self.sequence, reported, len(self.chunks[chunk]))

    def _scaffold(self, contents: Sequence[Sequence[int]]) -> list[int]:
        tags = self._options.tags
        return [token for content in contents for token in (tags.chunk_open, *content, tags.chunk_close)]

    def _end_round(self) -> None:
        """Ends a round. The final rows of its chunks enter the cache with the sync token, in the forward that it needs
        anyway."""
        self._session.extend(self.sequence, self._scaffold(self.chunks))
        self._session.emit(self.sequence, [self._stop], 0)
        self.rows = [*self._scaffold(self.chunks), self._stop]
        self.round_lengths = tuple(len(chunk) + 2 for chunk in self.chunks)
        lengths = [len(chunk) for chunk in self.chunks]
        self._numbered += len(self.chunks)
        last = len(self.report.rounds) + 1 == self._options.max_rounds
        stopped = self._session.stopped[self.sequence]
        if stopped or self._stop_name == "end" or self._cut or last or self._left == 0:
            reason = "end" if self._stop_name == "end" else "rounds" if last and not self._cut else "length"
            self._end("stop" if stopped else reason, "", lengths)
            return
        self._record(lengths, self._stop_name)
        self.phase = "plan"

    # The record

    def _count(self, phase: str, rows: int) -> None:
        self.number += 1
        self.report.forwards[phase] += 1
        self.report.rows[phase] += rows

    def _record(self, lengths: list[int], stop: str) -> None:
        topics = [item.topic for item in self._items]
        self.report.rounds.append(PlanRound(self._plan, topics, lengths, self._step if lengths else 0, stop))
        self._plan, self._items, self.chunks = [], [], []

    def _end(self, reason: str, stop: str, lengths: list[int] | None = None) -> None:
        self._record(lengths or [], stop or self._stop_name)
        self.report = self.report._replace(reason=reason)
        self.phase = "done"
