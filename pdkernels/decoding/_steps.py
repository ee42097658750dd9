"""A decoding method in two halves: what a step does on the device, and what the host does with it.

The device half has static shapes, keeps its state in tensors that are allocated once and change in place, and reads nothing
back: it can be captured in a graph, and whole generations can run without the host (`pdkernels.integrations.device_loop`). The
host half turns entries, one per step, into the session's record. Here the two alternate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import update_wrapper
from itertools import pairwise
from typing import Any

import torch

from pdkernels.decoding._session import Session

Rows = list[list[int]]


class Steps(ABC):
    """Built for the sizes of a session; `start` takes any session with the same batch and limits and no longer prompts.

    `entry` ``(batch, columns)`` int64 is rewritten by `start` and by every step. Its first column is the length of a sequence's
    next draft, 0 when it is done; the second how many tokens of the last one were accepted, -1 if its logits were NaN, which
    also ends the sequence; the others are specific to the method.
    """

    entry: torch.Tensor
    remaining: torch.Tensor
    """``(batch,)``: tokens still to come; 0 once a sequence is done."""
    needs_host: str = ""
    """The option that makes a step read its device; empty if none does."""

    @abstractmethod
    def __init__(self, sizes: Session, **options: Any) -> None:
        """For sessions of these sizes; the keyword-only parameters are the method's options."""

    @abstractmethod
    def start(self, session: Session) -> None:
        """Runs the prompts' forward, and writes the first entry."""

    @abstractmethod
    def step(self, width: int | None = None, ragged: bool = True) -> None:
        """Runs one round for all sequences. No draft is longer than `width` (None: unknown); all have that length if not
        `ragged`."""

    @abstractmethod
    def opened(self, session: Session, rows: Rows) -> None:
        """Records the first entry."""

    @abstractmethod
    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        """Records an entry, given the one before it. Returns the forwards of the step its sequences took part in."""

    def halt(self, session: Session, rows: Rows) -> None:
        """Ends the sequences that a stop string has ended: on the device, and in what the host has read."""
        if any(session.stopped):
            left = [row[0] for row in rows]
            session.stop_(left, self.remaining, self.entry[:, 0])
            for row, length in zip(rows, left, strict=True):
                row[0] = length

    def recorded(self, session: Session, entries: list[Rows]) -> int:
        """Records a whole generation, and returns the forwards its sequences took part in."""
        refuse_nan(session, entries)
        self.opened(session, entries[0])
        return session.batch + sum(self.stepped(session, before, rows) for before, rows in pairwise(entries))


class DraftSteps(Steps):
    """Steps with one verified draft each: after the first two columns an entry has the next draft, then the predictions for the
    last one, `slots` each."""

    slots: int

    def opened(self, session: Session, rows: Rows) -> None:
        session.forwards += 1
        for sequence, row in enumerate(rows):
            session.record_first(sequence, row[2])

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        session.forwards += 1
        judged = 2 + self.slots
        for sequence, ((length, _, *draft), row) in enumerate(zip(before, rows)):
            if length:
                said = row[judged : judged + length]
                session.log_step(sequence, draft[:length], said, accepted=row[1], next_token=row[2])
        return sum(row[0] > 0 for row in before)


def decoder(steps: type[Steps]) -> Callable[..., int]:
    """The method made of such steps: fills a session, takes their options, returns what `run` returns."""

    def decode(session: Session, **options: Any) -> int:
        return run(steps(session, **options), session)

    return update_wrapper(decode, steps, assigned=("__doc__", "__module__"), updated=())


def refuse_nan(session: Session, entries: list[Rows]) -> None:
    """ValueError for an entry that reports NaN."""
    for rows in entries:
        for sequence, row in enumerate(rows):
            if row[1] < 0:
                session.fail_not_numbers(sequence)


def run(steps: Steps, session: Session, replay: Callable[[], None] | None = None) -> int:
    """A whole generation, with one read of the device per step. Returns the forwards its sequences took part in.

    `replay` replaces a step of unknown width.
    """
    if session.max_new_tokens == 0:
        return 0
    steps.start(session)
    rows = steps.entry.tolist()
    refuse_nan(session, [rows])
    steps.opened(session, rows)
    steps.halt(session, rows)
    taken_part = session.batch
    while (width := max(row[0] for row in rows)) > 0:
        if replay is None:
            steps.step(width, ragged=min(row[0] for row in rows) < width)
        else:
            replay()
        before, rows = rows, steps.entry.tolist()
        refuse_nan(session, [rows])
        taken_part += steps.stepped(session, before, rows)
        steps.halt(session, rows)
    return taken_part
