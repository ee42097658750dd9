"""A decoding method in two halves: the step on the device, and the host code that records its result.

The device half has static shapes, keeps its state in tensors that are allocated once and change in place, and reads
nothing back: it can be captured in a graph, and whole generations can run without the host
(`pdkernels.integrations.device_loop`). The host half turns entries, one per step, into the session's record. Here the
two alternate.

Everything that a step reads of a sequence is in its row of `state` and of the cache. So another sequence can take the
row between two steps: `admit` copies these rows from steps that have run its prompt alone (`RunningBatch`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from inspect import signature
from itertools import pairwise
from typing import Any

import torch

from pdkernels.decoding.steps.entry import Entry, Row, Rows
from pdkernels.generation.batch_sampler import BatchSampler
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import Session


class Steps(ABC):
    """Built for the sizes of a session; `start` takes any session with the same batch and limits and no longer prompts,
    and with `any_limit` also lower limits, equal for all sequences."""

    entry: Entry
    """Rewritten by `start` and by every step. With two `forms` it has a column `form`: which is next, for all
    sequences, 0 or 1."""
    limit: int
    """Maximum new tokens of a generation."""
    cache: Any
    """The model's cache, with the committed tokens of every sequence or canvas."""
    seeds: torch.Tensor
    """``(batch,)`` int64, the keys of each sequence's random numbers."""
    needs_host: str = ""
    """The option that makes a step read its device, or choose shapes; empty if none does."""
    lacks: str = ""
    """The option of the method that these steps do not follow; empty if they follow all."""
    any_limit: bool = True
    """Whether a generation may have fewer tokens than `limit`."""
    keeps_pages: bool = False
    """Whether a step writes to the cache of a sequence that is done as if it continued; else one row at its end at most."""
    follows_grammars: bool = False
    """Whether what is filled at once fits the grammar of `session` in a running batch, too."""
    resumes: bool = False
    """Whether a sequence can leave between two steps and go on later: from its rows of `state`, and the K and V of its
    text, as causal rows of the model give them."""
    continues: bool = True
    """Whether `start` can go on after rows of the prompt that are in the cache already."""
    slots: int = 1
    """Slots after the committed tokens that a step writes."""
    spare: int = 0
    """Slots of a cache past the longest text."""
    shows_provisional: bool = False
    """Whether it fills positions in any order, so that there is provisional text after the text on record."""
    sampler: Sampler | BatchSampler
    """What draws tokens (`Sampler`); where `draws_by_row`, it may be a `BatchSampler`."""
    forms: tuple[str, ...] = ("step",)
    """Names of the methods that run a round; they have the arguments of `step`."""

    @abstractmethod
    def __init__(self, session: Session, **options: Any) -> None:
        """For sessions of these sizes; the keyword-only parameters are the method's options."""

    @abstractmethod
    def start(self, session: Session) -> None:
        """Runs the prompts' forward, and writes the first entry."""

    @abstractmethod
    def step(self, width: int | None = None, ragged: bool = True) -> None:
        """Runs one round for all sequences. Nothing pending is larger than `width` (None: unknown); all have that size
        if not `ragged`."""

    @classmethod
    def draws_by_row(cls, options: Mapping[str, Any]) -> bool:
        """Whether rows may have temperatures and filters of their own, with these options of the method."""
        return False

    @property
    def live(self) -> tuple[torch.Tensor, ...]:
        """Tensors ``(batch,)`` that are 0 for a sequence that is done: the host ends one by writing 0 into all of
        them."""
        return (self.entry.pending,)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """Tensors ``(batch, ..)`` with all that a step reads of a sequence, besides its part of the cache: a sequence
        joins with its rows of these."""
        return self.entry.table, self.seeds

    def reseed(self, seeds: torch.Tensor) -> None:
        """Replaces the seeds, for the next `start`."""
        self.seeds.copy_(seeds)

    def ready(self, rows: Rows) -> bool:
        """Whether a sequence can join before the next step; `rows` is the last entry. If not, it can after some more
        steps."""
        return True

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        """Replaces sequence `row` by one that `other` has started; no other sequence changes, except that it may wait.

        `other` was built with the same options for the same sizes, but for another number of sequences. Its cache has
        `length` tokens of that sequence; here there will be room for `capacity`. Nothing here waits for the device, but
        pages change. MemoryError, before any change: there are too few. From a cache on the same pool the pages move,
        as many as there are.
        """
        batch, other_batch = len(self.entry.table), len(other.entry.table)
        for copy in range(row, self.cache.batch, batch):
            source_row = other_row + copy // batch * other_batch
            if getattr(self.cache, "shared_pool", None) is not None:
                self.cache.move_row_(copy, other.cache, source_row, length)
                continue
            if self.cache.block_table is not None:
                self.cache.resize_row_(copy, capacity)
            self.cache.copy_row_(copy, other.cache, source_row, length)
        for tensor, rows in zip(self.state, other.state, strict=True):
            tensor[row].copy_(rows[other_row])
        self.joined()

    def joined(self) -> None:  # noqa: B027, most have nothing to adapt
        """After a sequence has joined: adapts what the entry says of all sequences."""

    def end(self, sequences: Sequence[int]) -> None:
        """Ends these sequences on the device, whatever their state."""
        for tensor in self.live:
            for sequence in sequences:
                tensor[sequence] = 0

    @property
    def max_entries(self) -> int:
        """The maximum number of entries of a generation: one for the prompts and one per round, which gives a sequence
        at least a token."""
        return self.limit

    @abstractmethod
    def opened(self, session: Session, rows: Rows) -> int:
        """Records the first entry. Returns the forwards of the prompts its sequences took part in."""

    @abstractmethod
    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        """Records an entry, given the one before it. Returns the forwards of the step its sequences took part in."""

    def provisional(self, session: Session, before: Row | None, row: Row) -> list[int | None]:
        """The tokens after those on record of a session of one prompt, None where nothing is written: they may still
        change.

        `row` is its part of the last entry, which has been recorded; `before` that of the entry before, None after the
        prompt.
        """
        return []

    def halt(self, session: Session, rows: Rows) -> Rows:
        """Ends the sequences that a stop string has ended, on the device; returns the entry after that."""
        stopped = [n for n, row in enumerate(rows) if session.stopped[n] and row.pending > 0]
        if not stopped:
            return rows
        self.end(stopped)
        return self.entry.rows()

    def forced(self, session: Session, rows: Rows) -> Rows:
        """Drafts what the grammars of a session leave no choice about; returns the entry after that."""
        return rows

    def rounds(self, session: Session, rows: Rows, replays: Sequence[Callable[[], None]] = ()) -> list[Rows]:
        """Runs one round, or several, and returns the entry after each. `rows` is the last one, in which something is
        pending; `replays`: see `run`."""
        return [next_entry(self, rows, replays)]

    def recorded(self, session: Session, log: list[list[list[int]]]) -> int:
        """Records a whole generation from the log of its entries, and returns the forwards its sequences took part
        in."""
        entries = [self.entry.rows(values) for values in log]
        refuse_no_choice(session, entries)
        opened = self.opened(session, entries[0])
        return opened + sum(self.stepped(session, before, rows) for before, rows in pairwise(entries))


def most_forwards(limit: int) -> int:
    """Forwards of a request in a running batch that fills `limit` positions, at most: more than settings take that fill
    something in each."""
    return 1024 + 4 * limit


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
    """Raises ValueError for an entry that reports logits without a choice."""
    for rows in entries:
        for sequence, row in enumerate(rows):
            if row.accepted < 0:
                session.fail_without_choice(sequence)


def next_entry(steps: Steps, rows: Rows, replays: Sequence[Callable[[], None]] = ()) -> Rows:
    """Runs a round, given the last entry, in which something is pending."""
    form = rows[0].form if len(steps.forms) > 1 else 0
    if replays:
        replays[form]()
    else:
        width = max(row.pending for row in rows)
        getattr(steps, steps.forms[form])(width, ragged=min(row.pending for row in rows) < width)
    return steps.entry.rows()


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
    while any(row.pending for row in rows):
        rows = steps.forced(session, rows)
        for after in steps.rounds(session, rows, replays):
            before, rows = rows, after
            refuse_no_choice(session, [rows])
            taken_part += steps.stepped(session, before, rows)
        rows = steps.halt(session, rows)
    return taken_part
