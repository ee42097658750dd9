"""A decoding method in two halves: what a step does on the device, and what the host does with it.

The device half has static shapes, keeps its state in tensors that are allocated once and change in place, and reads nothing
back: it can be captured in a graph, and whole generations can run without the host (`pdkernels.integrations.device_loop`). The
host half turns entries, one per step, into the session's record. Here the two alternate.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import update_wrapper
from inspect import signature
from itertools import pairwise
from typing import Any

import torch

from pdkernels.decoding._session import Session

Rows = list[list[int]]


class Steps(ABC):
    """Built for the sizes of a session; `start` takes any session with the same batch and limits and no longer prompts.

    `entry` ``(batch, columns)`` int64 is rewritten by `start` and by every step. Its first column is the length of a sequence's
    next draft, 0 when it is done; the second how many tokens of the last one were accepted, -1 if its logits gave no choice, which
    also ends the sequence; the others are specific to the method.
    """

    entry: torch.Tensor
    limit: int
    """Tokens of a generation."""
    remaining: torch.Tensor
    """``(batch,)``: tokens still to come; 0 once a sequence is done."""
    needs_host: str = ""
    """The option that makes a step read its device, or choose shapes; empty if none does."""
    forms: tuple[str, ...] = ("step",)
    """Names of the methods that are rounds, with the arguments of `step`. Of two, the entry's third column says which is next, for
    all sequences: 0 or 1."""

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

    @property
    def most_entries(self) -> int:
        """Entries of a generation at most: one of the prompts and one per round, of which each gives a sequence a token."""
        return self.limit

    @abstractmethod
    def opened(self, session: Session, rows: Rows) -> int:
        """Records the first entry. Returns the forwards of the prompts its sequences took part in."""

    @abstractmethod
    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        """Records an entry, given the one before it. Returns the forwards of the step its sequences took part in."""

    def halt(self, session: Session, rows: Rows) -> Rows:
        """Ends the sequences that a stop string has ended, on the device; returns the entry after that."""
        if not any(session.stopped):
            return rows
        left = [row[0] for row in rows]
        session.stop_(left, self.remaining, self.entry[:, 0])
        return [[length, *row[1:]] for row, length in zip(rows, left, strict=True)]

    def recorded(self, session: Session, entries: list[Rows]) -> int:
        """Records a whole generation, and returns the forwards its sequences took part in."""
        refuse_broken(session, entries)
        opened = self.opened(session, entries[0])
        return opened + sum(self.stepped(session, before, rows) for before, rows in pairwise(entries))


class DraftSteps(Steps):
    """Steps with one verified draft each: after the first two columns an entry has the next draft, then the predictions for the
    last one, `slots` each."""

    slots: int

    def opened(self, session: Session, rows: Rows) -> int:
        return record_first(session, rows, 2)

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        session.forwards += 1
        judged = 2 + self.slots
        for sequence, ((length, _, *draft), row) in enumerate(zip(before, rows)):
            if length:
                said = row[judged : judged + length]
                session.log_step(sequence, draft[:length], said, accepted=row[1], next_token=row[2])
        return sum(row[0] > 0 for row in before)


def number_of(bits: int) -> float:
    """The fp64 number of an int64, whose bits it has in an entry.

    >>> number_of(torch.tensor(0.75, dtype=torch.float64).view(torch.int64).item())
    0.75
    """
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def record_first(session: Session, rows: Rows, column: int) -> int:
    """`Steps.opened` where the prompts have one forward, which gives a token each."""
    session.forwards += 1
    for sequence, row in enumerate(rows):
        session.record_first(sequence, row[column])
    return session.batch


def with_defaults(decode: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """All options of a decoder, of which some are given."""
    bound = signature(decode).bind(None, **options)
    bound.apply_defaults()
    return dict(bound.kwargs)


def decoder(steps: type[Steps]) -> Callable[..., int]:
    """The method made of such steps: fills a session, takes their options, returns what `run` returns."""

    def decode(session: Session, **options: Any) -> int:
        return run(steps(session, **options), session)

    return update_wrapper(decode, steps, assigned=("__doc__", "__module__"), updated=())


def refuse_broken(session: Session, entries: list[Rows]) -> None:
    """ValueError for an entry that reports logits without a choice."""
    for rows in entries:
        for sequence, row in enumerate(rows):
            if row[1] < 0:
                session.fail_without_choice(sequence)


def run(steps: Steps, session: Session, replays: Sequence[Callable[[], None]] = ()) -> int:
    """A whole generation, with one read of the device per round. Returns the forwards its sequences took part in.

    `replays` replace the forms of a step, of unknown width.
    """
    if session.max_new_tokens == 0:
        return 0
    steps.start(session)
    rows = steps.entry.tolist()
    refuse_broken(session, [rows])
    taken_part = steps.opened(session, rows)
    rows = steps.halt(session, rows)
    forms = [getattr(steps, name) for name in steps.forms]
    while (width := max(row[0] for row in rows)) > 0:
        form = rows[0][2] if len(forms) > 1 else 0
        if replays:
            replays[form]()
        else:
            forms[form](width, ragged=min(row[0] for row in rows) < width)
        before, rows = rows, steps.entry.tolist()
        refuse_broken(session, [rows])
        taken_part += steps.stepped(session, before, rows)
        rows = steps.halt(session, rows)
    return taken_part
