"""A running batch: its rows are requests that join and leave between two steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pdkernels._validation import check, message, refuse
from pdkernels.decoding.steps.contract import Steps, most_forwards, next_entry, refuse_no_choice
from pdkernels.decoding.steps.staging import Staging
from pdkernels.generation.batch_sampler import BatchSampler
from pdkernels.generation.noise import checked_seeds
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import Session, inference

_OP = "decoding.steps.RunningBatch"

# What a row without a request keeps in the cache: one token, and a slot for the one that a step writes after it.
_IDLE = 2


class Preempted(NamedTuple):
    """A preempted sequence: what it takes to go on later."""

    session: Session
    state: list[torch.Tensor]
    """Its rows of `Steps.state`."""
    length: int
    """Tokens whose K and V it had."""
    taken_part: int
    sampler: Sampler | None

    @property
    def text(self) -> list[int]:
        """The tokens whose K and V it needs."""
        return (self.session.prompts[0] + self.session.tokens[0])[: self.length]


class RunningBatch:
    """A batch of a method's steps, each row of which serves one request after another.

    A request is a `Session` of one prompt, with a limit, stop strings, a callback and a trace of its own. It gets the
    tokens, the accepted counts and the trace that it has alone, whatever else is in the batch (but for lengths of drafts
    that are chosen by the load of the batch, ``block_size="auto"``: there the tokens alone): its first token and
    state come from steps of batch 1 (`Steps.admit`), and its random numbers from its seed and positions.

    Args:
        kind: the steps of a method.
        largest: a session with the sizes of the batch: as many prompts as there are rows, all as long as the longest
            that may come, and the largest limit. Its model, end tokens and filters are those of all requests.
        staging: where prompts run, if that is shared with another batch of the same method, options and sizes; None: an
            own one.
        **options: of the method.

    Raises:
        NotImplementedError: an option that the method's steps do not follow, or a model whose cache cannot take over a
            sequence.
        ValueError: a session that fills masks in prompts, or an option out of range.

    The state is allocated here, once. The prompt ``[0]`` runs in every row, so that rows without a request hold
    something valid.

    Example:
        >>> import torch
        >>> from pdkernels.decoding import find, generate
        >>> from pdkernels.decoding.steps import RunningBatch
        >>> from pdkernels.models import Transformer, TransformerConfig
        >>> model = Transformer(TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=4, kv_heads=2,
        ...                                       head_dim=8, intermediate_size=24))
        >>> def request(prompt, limit):
        ...     return Session(model, [prompt], limit, (), None, False)
        >>> batch = RunningBatch(find("jacobi").steps, Session(model, [[0] * 4] * 2, 9, (), None, False), block_size=3)
        >>> first, second = request([3, 1, 4], 9), request([1, 5], 5)
        >>> batch.admit(0, first); done = batch.step()  # the second one joins while the first one runs
        >>> batch.admit(1, second)
        >>> while batch.busy:
        ...     for row in batch.step():
        ...         forwards = batch.retire(row)
        >>> second.tokens == [generate(model, [1, 5], "jacobi", max_new_tokens=5, block_size=3).tokens.tolist()]
        True
    """

    @inference()
    def __init__(self, kind: type[Steps], largest: Session, staging: Staging | None = None, **options: Any) -> None:
        check(largest.tails is None, _OP, "largest", "have no masks in prompts", "some")
        self._largest, batch = largest, largest.batch
        self.steps = kind(largest, **options)
        self.staging = staging or Staging(kind, self._sized([[0] * largest.longest]), **options)
        """Where prompts run; a prompt may have begun to before `admit`."""
        for unsupported, argument in ((self.steps.lacks, "options"), (self._other_cache(), "model")):
            if unsupported:
                raise NotImplementedError(message(_OP, argument, "let sequences join and leave", unsupported))
        self._samplers: BatchSampler | None = None
        if kind.draws_by_row(options):
            assert isinstance(self.steps.sampler, Sampler)
            self._sampler = self.steps.sampler
            self.steps.sampler = self._samplers = BatchSampler(batch)
        self.sessions: list[Session | None] = [None] * batch
        """The request of each row."""
        self._taken_part = [0] * batch
        self._errors: dict[int, BaseException] = {}
        self.steps.start(self._sized([[0]] * batch))
        self.steps.end(range(batch))
        for row in range(batch):
            self._give_back(row)
        self._rows = self.steps.entry.rows()

    @property
    def free(self) -> list[int]:
        """Rows without a request."""
        return [row for row, session in enumerate(self.sessions) if session is None]

    @property
    def busy(self) -> bool:
        """Whether there are requests, done or not."""
        return any(self.sessions)

    @property
    def ready(self) -> bool:
        """Whether a request can join before the next step. If not, it can after some more steps."""
        return self.steps.ready(self._rows)

    @inference()
    def admit(self, row: int, session: Session, seed: int = 0, sampler: Sampler | None = None) -> None:
        """Runs a request's prompt and puts the request in a free row, while the other rows stay where they are.

        Args:
            row: one of `free`.
            session: of one prompt, with the batch's model and end tokens, and no larger than `largest`.
            seed: as that of `generate` for the prompt alone.
            sampler: its temperature and filters, if the method's steps draw by row (`Steps.draws_by_row`); None: those
                of the batch.

        Raises:
            ValueError: a row that is taken, a request that does not fit, logits without a choice; or the batch is not
                `ready`.
            MemoryError: the pool of pages is too small for the prompt and its new tokens.

        Nothing has changed after an error. The host waits for the prompt's forward.
        """
        self._check(row, session)
        steps, started = self.steps, self.staging.steps
        refuse(
            sampler is not None and self._samplers is None, _OP, "these steps draw all rows alike", "Pass no sampler."
        )
        first = self.staging.start(session, checked_seeds(_OP, seed, 1), sampler)
        _refuse_failed(session)
        refuse_no_choice(session, [first])
        length = 0 if steps.keeps_pages else session.longest
        steps.admit(row, started, length, session.longest + session.max_new_tokens)
        self._put(row, session, 0, sampler)
        self._record(row, lambda: started.opened(session, first))
        self._show(row, session, None)
        self._stop()

    def _put(self, row: int, session: Session, taken_part: int, sampler: Sampler | None) -> None:
        self._rows = self.steps.entry.rows()
        self.sessions[row], self._taken_part[row] = session, taken_part
        if self._samplers is not None:
            self._samplers[row] = sampler or self._sampler

    @inference()
    def grow(self, row: int, tokens: int) -> None:
        """Gives the sequence of a row pages of the pool for `tokens` tokens."""
        self.steps.cache.resize_row_(row, tokens)

    @inference()
    def leave(self, row: int) -> Preempted:
        """Frees the row of a request that will go on later, for steps with `Steps.resumes`. Its K and V are gone.

        Raises:
            ValueError: a row without a request, or steps that do not let one leave.
        """
        session = self.sessions[row]
        assert session is not None
        check(self.steps.resumes, _OP, "leave", "be called for a method whose sequences can go on later", "another")
        state = [tensor[row].clone() for tensor in self.steps.state]
        sampler = None if self._samplers is None else self._samplers[row]
        preempted = Preempted(session, state, int(self.steps.cache.lengths[row]), self._taken_part[row], sampler)
        self.sessions[row] = None
        self._end([row])
        self._give_back(row)
        return preempted

    @inference()
    def resume(self, row: int, preempted: Preempted) -> None:
        """Puts a request that has left into a free row, when `staging` has run its text again."""
        self._check(row, preempted.session)
        self.staging.resume(preempted.text, preempted.session.longest, preempted.state)
        self.steps.admit(row, self.staging.steps, preempted.length, self.steps.cache.capacity)
        self._put(row, preempted.session, preempted.taken_part, preempted.sampler)

    @inference()
    def close(self) -> None:
        """Gives its pages back to a pool; it is of no use then."""
        for row in range(len(self.sessions)):
            self._give_back(row)
        self.staging.drop()

    @inference()
    def take_over(self, other: RunningBatch) -> None:
        """Takes the requests of another batch into the rows from 0 on, as they are; that one has none then.

        Both have the method, options and sizes, but for the number of rows. The host waits for the device.

        Raises:
            ValueError: this batch has requests, or too few rows; or the method fills canvases, which have rows for
                every new position.
            MemoryError: the pool of pages is too small.
        """
        other_rows = other._taken()
        check(not self.busy, _OP, "take_over", "be called without requests", f"{len(self._taken())}")
        check(
            len(other_rows) <= len(self.sessions),
            _OP,
            "other",
            f"have at most {len(self.sessions)} requests",
            len(other_rows),
        )
        check(not self.steps.keeps_pages, _OP, "take_over", "be called for a method on a KV cache", "a canvas")
        lengths = other.steps.cache.lengths.tolist()
        try:
            for row, other_row in enumerate(other_rows):
                session = other.sessions[other_row]
                assert session is not None
                capacity = session.longest + session.max_new_tokens
                self.steps.admit(row, other.steps, lengths[other_row], capacity, other_row)
        except BaseException:
            self._end(list(range(len(other_rows))))
            for row in range(len(other_rows)):
                self._give_back(row)
            raise
        for row, other_row in enumerate(other_rows):
            self.sessions[row], other.sessions[other_row] = other.sessions[other_row], None
            self._taken_part[row] = other._taken_part[other_row]
            if self._samplers is not None and other._samplers is not None:
                self._samplers[row] = other._samplers[other_row]
            if other_row in other._errors:
                self._errors[row] = other._errors.pop(other_row)
        self._rows = self.steps.entry.rows()
        other._end(other_rows)
        for row in other_rows:
            other._give_back(row)

    @inference()
    def step(self) -> list[int]:
        """Runs one round, if anything is pending. Returns the rows whose requests are done: `retire` takes them out.

        An error in the record of a request, of its logits or its callback, ends this request alone: `retire` raises it.
        """
        before = self._rows
        if any(row.pending for row in before):
            self._rows = next_entry(self.steps, before)
            for row, session in enumerate(self.sessions):
                if session is not None and before[row].pending:
                    self._step(row, session, before[row])
            self._stop()
        return [row for row, session in enumerate(self.sessions) if session and not self._rows[row].pending]

    @inference()
    def retire(self, row: int) -> int:
        """Frees the row of a request, done or not, and returns the forwards it took part in. Its session has the rest.

        Raises:
            ValueError: a row without a request.
            BaseException: what ended the request, if that was an error.
        """
        check(self.sessions[row] is not None, _OP, "row", f"hold a request; {self._taken()} do", row)
        self.sessions[row] = None
        if self._rows[row].pending:
            self._end([row])
        self._give_back(row)
        error = self._errors.pop(row, None)
        if error is not None:
            raise error
        return self._taken_part[row]

    def _sized(self, prompts: list[list[int]]) -> Session:
        """A session for other prompts, of the same sizes."""
        largest = self._largest
        session = Session(
            largest.model, prompts, largest.max_new_tokens, largest.end_tokens, None, False, params=largest.params
        )
        session.filters, session.pool = largest.filters, largest.pool
        session.keeps_windows = largest.keeps_windows
        return session

    def _other_cache(self) -> str:
        cache = self.steps.cache
        return "" if hasattr(cache, "copy_row_") else f"one whose {type(cache).__name__} has no copy_row_"

    def _taken(self) -> list[int]:
        return [row for row, session in enumerate(self.sessions) if session is not None]

    def _check(self, row: int, session: Session) -> None:
        largest, limit = self._largest, session.max_new_tokens
        check(row in self.free, _OP, "row", f"be one of {self.free}", row)
        check(self.ready, _OP, "admit", "be called when `ready`", "before", "Run more steps.")
        check(session.batch == 1, _OP, "session", "have one prompt", session.batch)
        check(session.model is largest.model, _OP, "session", "have the model of the batch", "another")
        check(session.tails is None, _OP, "session", "have no masks in its prompt", "some")
        check(
            session.longest <= largest.longest, _OP, "prompt", f"have at most {largest.longest} tokens", session.longest
        )
        for name in ("end_tokens", "filters"):
            expected, other = getattr(largest, name), getattr(session, name)
            check(expected == other, _OP, name, f"be those of the batch, {expected}", other)
        if self.steps.any_limit:
            maximum = largest.max_new_tokens
            check(1 <= limit <= maximum, _OP, "max_new_tokens", f"be in 1 .. {maximum}", limit)
        else:
            expectation = f"be {largest.max_new_tokens}, that of the batch, for a method that fills a canvas"
            check(limit == largest.max_new_tokens, _OP, "max_new_tokens", expectation, limit)

    def _step(self, row: int, session: Session, before: Any) -> None:
        def record() -> int:
            rows = [self._rows[row]]
            _refuse_failed(session)
            refuse_no_choice(session, [rows])
            forwards, most = self.steps.stepped(session, [before], rows), most_forwards(session.max_new_tokens)
            endless = self.steps.keeps_pages and self._taken_part[row] + forwards > most
            refuse(endless, _OP, f"a request takes more than {most} forwards", "Choose options that fill more in each.")
            return forwards

        self._record(row, record)
        self._show(row, session, before)

    def _show(self, row: int, session: Session, before: Any) -> None:
        """Tells who wants to know what stands after the text of a request."""
        if session.on_provisional is not None and row not in self._errors and not session.stopped[0]:
            session.on_provisional(self.steps.provisional(session, before, self._rows[row]))

    def _record(self, row: int, record: Any) -> None:
        try:
            self._taken_part[row] += record()
        except BaseException as error:  # a callback may also raise SystemExit
            self._errors[row] = error

    def _stop(self) -> None:
        """Ends the requests that a stop string or an error has ended."""
        stopped = [row for row, session in enumerate(self.sessions) if session and session.stopped[0]]
        ended = [row for row in (*stopped, *self._errors) if self._rows[row].pending]
        if ended:
            self._end(ended)

    def _end(self, rows: list[int]) -> None:
        self.steps.end(rows)
        self._rows = self.steps.entry.rows()

    def _give_back(self, row: int) -> None:
        """Returns the pages of a row without a request, but for what a step reads and writes of it, and its sampler."""
        if self._samplers is not None:
            self._samplers[row] = None
        cache = self.steps.cache
        if self.steps.keeps_pages:
            return
        cache.idle_row_(row)
        if cache.block_table is not None:
            cache.resize_row_(row, _IDLE if self.staging.pool is None else 0)


def _refuse_failed(session: Session) -> None:
    """Raises what its grammar has met."""
    if session.grammar is not None and session.grammar.failure is not None:
        raise session.grammar.failure
