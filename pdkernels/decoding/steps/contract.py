"""A decoding method in two halves: what a step does on the device, and what the host does with it.

The device half has static shapes, keeps its state in tensors that are allocated once and change in place, and reads nothing
back: it can be captured in a graph, and whole generations can run without the host (`pdkernels.integrations.device_loop`). The
host half turns entries, one per step, into the session's record. Here the two alternate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import update_wrapper
from inspect import signature
from itertools import pairwise
from typing import Any

import torch

from pdkernels.decoding._session import Session
from pdkernels.decoding.steps.entry import Entry, Rows


class Steps(ABC):
    """Built for the sizes of a session; `start` takes any session with the same batch and limits and no longer prompts."""

    entry: Entry
    """Rewritten by `start` and by every step. With two `forms` it has a column `form`: which is next, for all sequences, 0 or 1."""
    limit: int
    """Tokens of a generation."""
    needs_host: str = ""
    """The option that makes a step read its device, or choose shapes; empty if none does."""
    forms: tuple[str, ...] = ("step",)
    """Names of the methods that are rounds, with the arguments of `step`."""

    @abstractmethod
    def __init__(self, session: Session, **options: Any) -> None:
        """For sessions of these sizes; the keyword-only parameters are the method's options."""

    @abstractmethod
    def start(self, session: Session) -> None:
        """Runs the prompts' forward, and writes the first entry."""

    @abstractmethod
    def step(self, width: int | None = None, ragged: bool = True) -> None:
        """Runs one round for all sequences. Nothing pending is larger than `width` (None: unknown); all have that size if not
        `ragged`."""

    @property
    def live(self) -> tuple[torch.Tensor, ...]:
        """Tensors ``(batch,)`` that are 0 for a sequence that is done: the host ends one by writing 0 into all of them."""
        return (self.entry.pending,)

    @property
    def max_entries(self) -> int:
        """The most entries of a generation: one for the prompts and one per round, each of which gives a sequence a token."""
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
        session.stop_([row.pending for row in rows], *self.live)
        return [row.finished() if stopped else row for row, stopped in zip(rows, session.stopped, strict=True)]

    def recorded(self, session: Session, log: list[list[list[int]]]) -> int:
        """Records a whole generation from the log of its entries, and returns the forwards its sequences took part in."""
        entries = [self.entry.rows(values) for values in log]
        refuse_no_choice(session, entries)
        opened = self.opened(session, entries[0])
        return opened + sum(self.stepped(session, before, rows) for before, rows in pairwise(entries))


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


def refuse_no_choice(session: Session, entries: list[Rows]) -> None:
    """ValueError for an entry that reports logits without a choice."""
    for rows in entries:
        for sequence, row in enumerate(rows):
            if row.accepted < 0:
                session.fail_without_choice(sequence)


def run(steps: Steps, session: Session, replays: Sequence[Callable[[], None]] = ()) -> int:
    """A whole generation, with one read of the device per round. Returns the forwards its sequences took part in.

    `replays` replace the forms of a step, of unknown width.
    """
    if session.max_new_tokens == 0:
        return 0
    steps.start(session)
    rows = steps.entry.rows()
    refuse_no_choice(session, [rows])
    taken_part = steps.opened(session, rows)
    rows = steps.halt(session, rows)
    forms = [getattr(steps, name) for name in steps.forms]
    while (width := max(row.pending for row in rows)) > 0:
        form = rows[0].form if len(forms) > 1 else 0
        if replays:
            replays[form]()
        else:
            forms[form](width, ragged=min(row.pending for row in rows) < width)
        before, rows = rows, steps.entry.rows()
        refuse_no_choice(session, [rows])
        taken_part += steps.stepped(session, before, rows)
        rows = steps.halt(session, rows)
    return taken_part
