"""The requests of one method with the same options: those that wait, the one whose prompt runs, and the batch of the
others."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdkernels._validation import sentence
from pdkernels.decoding.request import finished
from pdkernels.decoding.steps import Preempted, RunningBatch, Steps
from pdkernels.engine.broken import refuse_broken
from pdkernels.engine.disk import Piece
from pdkernels.engine.generation import FinishReason, Generation
from pdkernels.engine.metrics import EngineMetrics
from pdkernels.engine.pages import Memory
from pdkernels.engine.scoring import Ended, Scoring
from pdkernels.engine.tree import SHORTEST, CachedPrefix
from pdkernels.generation.filters import Filters
from pdkernels.generation.grammar_rows import JoinedGrammars
from pdkernels.generation.result import LogProbs
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import NoChoice, Session

# Turns with at most half of the rows taken before a batch shrinks: moving it costs a read of its rows.
_PATIENCE = 32


@dataclass(eq=False)
class Request:
    """What the engine knows of a request."""

    handle: Generation
    session: Session
    deadline: float | None
    sampler: Sampler | None = None
    """Its temperature and filters, if they are not those of the batch."""
    stored: list[Piece] = field(default_factory=list)
    """Pages of its prompt that have been read from a folder."""
    preempted: Preempted | None = None
    """What it was when it gave its pages to an older request."""

    @property
    def text(self) -> list[int]:
        """The tokens that run before it joins a batch."""
        return self.session.prompts[0] if self.preempted is None else self.preempted.text

    @property
    def over(self) -> FinishReason | None:
        """Why it must not go on; None if it may."""
        if self.handle.cancelled:
            return "cancelled"
        late = self.deadline is not None and time.perf_counter() > self.deadline
        return "timeout" if late else None


class MethodBatch:
    """One method with its options. Its batch has as many rows as its requests need, rounded up to a power of two: every
    row costs.

    Args:
        method: its name.
        kind, options: of the batch.
        model, filters: what its requests share.
        session_of: a session with the largest sizes, for a number of rows.
        rows: maximum number of requests at a time.
        grows: whether the number of rows follows the requests, for methods on a KV cache; else it is always `rows`.
        grammars: of its requests, if they have some and share the batch all the same.
    """

    def __init__(
        self,
        method: str,
        kind: type[Steps],
        options: dict[str, Any],
        model: Any,
        filters: Filters,
        session_of: Callable[[int], Session],
        rows: int,
        grows: bool,
        grammars: JoinedGrammars | None = None,
    ) -> None:
        self.method, self.model, self.filters, self._grammars = method, model, filters, grammars
        self._kind, self._options, self._session_of = kind, options, session_of
        self._rows, self._grows = rows, grows
        self.waiting: deque[Request] = deque()
        self.prefilling: Request | None = None
        """The one whose prompt runs."""
        self._stops: list[int] = []
        """Where its states are kept for prompts that leave it there."""
        self.running: dict[int, Request] = {}
        """By row."""
        self.batch: RunningBatch | None = None
        self._batches: dict[int, RunningBatch] = {}  # by number of rows
        self._unused = 0  # turns with at most half of the rows taken
        self.last_used = 0.0

    @property
    def busy(self) -> bool:
        """Whether a request runs, or its prompt does."""
        return bool(self.running) or self.prefilling is not None

    @property
    def oldest(self) -> int:
        """The number of the first request that waits."""
        return self.waiting[0].handle.number

    @property
    def next_prompt(self) -> float:
        """The number of the request whose prompt runs next; infinity: there is none."""
        return self.prefilling.handle.number if self.prefilling else self.oldest if self.waiting else math.inf

    def open(self) -> None:
        """Allocates the smallest batch."""
        self._take(self._size(1))

    def close(self) -> None:
        """Frees the batches; there are no requests."""
        for batch in self._batches.values():
            batch.close()
        self.batch, self._batches = None, {}

    def fail(self, error: BaseException, metrics: EngineMetrics) -> None:
        """Ends all requests that have prefilling, after an error of the batch, which is dropped."""
        prefilling = [*self.running.values(), *([self.prefilling] if self.prefilling else [])]
        self.running, self.prefilling = {}, None
        self.close()
        for request in prefilling:
            _ended(request, None, metrics, error=error)

    def turn(self, memory: Memory, budget: int, before: int | None, metrics: EngineMetrics) -> int:
        """Lets requests join and leave, and runs a step. Returns the tokens of prompts that ran.

        Args:
            memory: earlier prompts, and pages.
            budget: tokens of prompts that may run in this turn; one prompt that cannot run in pieces may be longer. Without
                a positive one none runs.
            before: only requests with a smaller number may begin; None: all may.
            metrics: is updated.
        """
        assert self.batch is not None
        for row, request in list(self.running.items()):
            if (reason := request.over) is not None:
                self._leave(row, memory, metrics, reason)
        spent = 0
        while spent < budget and (ran := self._join(memory, budget - spent, before, metrics)) > 0:
            spent += ran
        self._grow(memory, metrics)
        if self.running:
            metrics.steps += 1
            self._follow(self.batch.sessions)
            for row in self.batch.step():
                self._leave(row, memory, metrics)
        self._shrink()
        self.last_used = time.perf_counter()
        return spent

    def drop_waiting(self, memory: Memory, metrics: EngineMetrics) -> None:
        """Ends the waiting requests that have been cancelled, or are late."""
        for request in [request for request in self.waiting if request.over]:
            self.waiting.remove(request)
            self._ended(request, request.over, memory, metrics)

    def last(self) -> Request | None:
        """The youngest request that has pages and could give them up."""
        if self.batch is None or self.batch.staging.pool is None:
            return None
        if self.prefilling is not None:
            return self.prefilling
        able = self.running.values() if self.batch.steps.resumes else ()
        return max(able, key=lambda request: request.handle.number, default=None)

    def give_up(self, request: Request, memory: Memory, metrics: EngineMetrics) -> None:
        """Takes the pages of a request, `last`, which waits again: its K and V will be computed anew, if they are not
        known then."""
        assert self.batch is not None
        metrics.preemptions += 1
        if self.prefilling is request:
            self.batch.staging.drop()
            self.prefilling = None
        else:
            row = next(row for row, running in self.running.items() if running is request)
            self._keep_answer(memory, request, row)
            del self.running[row]
            request.preempted = self.batch.leave(row)
        # Those that wait here are all younger.
        self.waiting.appendleft(request)

    def _grow(self, memory: Memory, metrics: EngineMetrics) -> None:
        """Gives each request pages for the next step, the oldest first. If there are too few, the youngest one gives up
        its own."""
        if self.batch is None or self.batch.staging.pool is None or not self.running:
            return
        batch, cache, pages = self.batch, self.batch.steps.cache, memory.pages
        lengths = cache.lengths.tolist()
        for row, request in sorted(self.running.items(), key=lambda item: item[1].handle.number):
            if self.running.get(row) is not request:
                continue  # it has given up its pages
            room = batch.staging.room(request.session, lengths[row])
            shortage = -(-room // pages.pool.page_size) - len(cache.pages(row))
            while shortage > 0 and not pages.reclaim(shortage) and self.running.get(row) is request:
                method_batch, youngest = memory.youngest()
                method_batch.give_up(youngest, memory, metrics)
            if shortage > 0 and self.running.get(row) is request:
                batch.grow(row, room)
        if pages.groups:
            for row, request in self.running.items():
                batch.staging.slide(cache, row, request.session, lengths[row], lengths[row])

    def _restore(self, request: Request, memory: Memory, budget: int, metrics: EngineMetrics) -> int:
        """Copies pages of a request's text that have been read from a folder; returns the tokens of this turn if there
        are more to come, else 0."""
        if not request.stored:
            return 0
        restored, request.stored = memory.restore(request.session, request.stored, budget)
        metrics.restored_tokens += restored
        return restored if request.stored else 0

    def _begin(self, request: Request, memory: Memory, metrics: EngineMetrics) -> bool:
        """Finds what is known of a request's text, and pages for the rest of it; whether there are enough."""
        assert self.batch is not None
        staging, text = self.batch.staging, request.text
        prompt = request.session.prompts[0]
        staging.adapt(request.session)
        if staging.pool is not None:
            pages = memory.pages
            prefix = (
                pages.find(memory.root(request.session), text if request.preempted else text[:-1])
                if staging.in_pieces or request.preempted
                else CachedPrefix([], None, 0, None, 0)
            )
            in_windows, window_need = prefix.windows, staging.need(request.session)
            held_pages = [*prefix.pages, *([] if prefix.partial is None else [prefix.partial])]
            room = staging.room(request.session, len(text))
            need = -(-room // pages.pool.page_size)
            if need > pages.pool.num_pages:
                raise MemoryError(
                    sentence("Engine", f"a request needs {need} pages of {pages.pool.num_pages}", "Raise cache_tokens.")
                )
            windows_fit = pages.keeps(window_need)
            pages.pool.hold(held_pages)
            pages.hold_windows(in_windows)
            try:
                if not (windows_fit and pages.reclaim(need - len(prefix.pages))):
                    memory.lacks(request.handle.number)
                    return False
                beginning, windows = text[: prefix.length], (in_windows, window_need)
                staging.begin(prefix.pages, prefix.partial, beginning, len(prompt), room, prefix.states, *windows)
                self._stops = self._worth_keeping(memory, request, prefix)
                pages.blocked = None
            finally:
                pages.pool.release(held_pages)
                pages.release_windows(in_windows)
            length = prefix.length
        elif staging.in_pieces:
            owner = self._owner(memory, request)
            prefix_cache = memory.prefixes.find(owner, prompt)
            if prefix_cache.length:
                staging.adopt(prefix_cache.cache, prefix_cache.length)
            self._stops, length = [prefix_cache.branch], prefix_cache.length
        else:
            return True
        if request.preempted is None:
            metrics.reused_tokens += length
            request.handle.reused = length
        return True

    def _worth_keeping(self, memory: Memory, request: Request, prefix: CachedPrefix) -> list[int]:
        """The lengths of a text after which recurrent states, or windows, are kept: where earlier texts have left it, at multiples,
        and after its last end token, since chat templates may write the beginning of an answer in another way when the
        answer is there."""
        pages, text = memory.pages, request.text
        if pages.goes_back:
            return []
        ends = [at + 1 for at, token in enumerate(text) if token in request.session.end_tokens]
        first = prefix.length + SHORTEST
        stops = {prefix.branch, *range(pages.every, len(text), pages.every), *ends[-1:]}
        return sorted(stop for stop in stops if first <= stop < len(text))

    def _keep(self, memory: Memory, request: Request, text: list[int], row: int | None = None) -> None:
        """Remembers the K and V of a text: those of a row, or of `staging`."""
        assert self.batch is not None
        staging, root = self.batch.staging, memory.root(request.session)
        cache = staging.steps.cache if row is None else self.batch.steps.cache
        if staging.pool is not None:
            states = cache.save_states(row or 0) if memory.pages.state_rows else None
            windows = cache.window_pages(row or 0) if memory.pages.groups else None
            memory.pages.keep(root, text, cache.pages(row or 0), states, windows)
        elif staging.in_pieces:
            memory.prefixes.keep(self._owner(memory, request), text, staging.steps.cache)

    def _owner(self, memory: Memory, request: Request) -> tuple[Any, ...]:
        """Whose kept prompts a request may go on with: those of its model and adapter, in a cache that keeps the same rows."""
        assert self.batch is not None
        last_rows = getattr(self.batch.staging.steps.cache, "another", None) is not None
        return request.session.model, *memory.root(request.session), last_rows

    def _keep_answer(self, memory: Memory, request: Request, row: int) -> None:
        """Remembers the K and V of a request that leaves its row, for a text that goes on after it."""
        assert self.batch is not None
        if self.batch.staging.pool is not None and self.batch.steps.resumes:
            length = int(self.batch.steps.cache.lengths[row])
            text = (request.session.prompts[0] + request.session.tokens[0])[:length]
            self._keep(memory, request, text, row)
            memory.write(request.session, text)

    def _join(self, memory: Memory, budget: int, before: int | None, metrics: EngineMetrics) -> int:
        """Runs a piece of a prompt, or lets its request join. Returns the tokens it ran; 0: there is none, or no
        room."""
        batch = self.batch
        assert batch is not None
        if self.prefilling is None:
            young = not self.waiting or (before is not None and self.oldest >= before)
            if young or self._scores(memory) or len(self.running) == self._rows or memory.before(self.oldest):
                return 0
            self._stops = []
            try:
                if restored := self._restore(self.waiting[0], memory, budget, metrics):
                    return restored
                if not self._begin(self.waiting[0], memory, metrics):
                    return 0
            except BaseException as error:
                batch.staging.drop()
                self._ended(self.waiting.popleft(), None, memory, metrics, error=error)
                return 1
            self.prefilling = self.waiting.popleft()
        request, staging = self.prefilling, batch.staging
        if (reason := request.over) is not None:
            staging.drop()
            self.prefilling = None
            self._ended(request, reason, memory, metrics)
            return 1
        # The last token of a prompt runs as the request joins; a text that has been there before has no such token.
        prompt = request.text if request.preempted is None else [*request.text, 0]
        remaining = len(prompt) - staging.cached
        # Rows after the first piece stay beside recurrent states until the next one; layers with windows have room for
        # so many.
        budget = min(budget, *(getattr(staging.steps.cache, name, budget) for name in ("pending", "piece")))
        budget = min([budget, *(stop - staging.cached for stop in self._stops if stop > staging.cached)])
        self._follow([request.session])
        try:
            pieces = staging.in_pieces or request.preempted is not None
            if pieces and remaining > budget:
                staging.run(prompt, budget)
                if staging.cached in self._stops:
                    self._keep(memory, request, prompt[: staging.cached])
                return budget
            # Nothing moves out of a batch that nobody is in, so then it becomes as small as those who wait allow.
            rows = self._size(1 + (len(self.running) or len(self.waiting)))
            if not batch.free or (not self.running and rows < len(batch.sessions)):
                batch = self._take(rows)
                self._follow([request.session])
            if not batch.ready:
                return 0
            row = batch.free[0]
            request.handle.joined = request.handle.joined or time.perf_counter()
            if request.preempted is None:
                seed = request.session.params.seed
                assert isinstance(seed, int)
                batch.admit(row, request.session, seed, request.sampler)
            else:
                staging.run(prompt, remaining)
                batch.resume(row, request.preempted)
        except BaseException as error:  # of this request: the rows of the others have not changed
            staging.drop()
            self.prefilling = None
            self._ended(request, None, memory, metrics, error=error)
            return max(1, remaining)
        self.prefilling, self.running[row] = None, request
        if request.preempted is None:
            metrics.prompt_tokens += len(prompt)
        else:
            metrics.recomputed_tokens += remaining - 1
        self._keep(memory, request, request.text, row)
        request.preempted = None
        return max(1, remaining)

    def _follow(self, sessions: Sequence[Session | None]) -> None:
        """Says whose grammars the rows of the next forward follow."""
        if self._grammars is not None:
            self._grammars.now = [None if session is None else session.grammar for session in sessions]

    def _scores(self, memory: Memory) -> bool:
        """Whether as many texts wait for their log-probabilities as may run, so that the next that asks for them waits."""
        return self.waiting[0].session.params.logprobs is not None and len(memory.scoring) >= self._rows

    def _leave(self, row: int, memory: Memory, metrics: EngineMetrics, reason: FinishReason | None = None) -> None:
        assert self.batch is not None
        request = self.running.pop(row)
        try:
            try:
                self._keep_answer(memory, request, row)
            finally:  # whatever that raises, the row is free
                forwards = self.batch.retire(row)
        except BaseException as error:
            _ended(request, None, metrics, error=error)
            return
        self._finish(request, reason, memory, metrics, forwards)

    def _ended(
        self,
        request: Request,
        reason: FinishReason | None,
        memory: Memory,
        metrics: EngineMetrics,
        error: BaseException | None = None,
    ) -> None:
        """Ends a request that is in no batch."""
        if error is None and request.preempted is not None:
            self._finish(request, reason, memory, metrics, request.preempted.taken_part)
        else:
            _ended(request, reason, metrics, error=error)

    def _finish(
        self, request: Request, reason: FinishReason | None, memory: Memory, metrics: EngineMetrics, forwards: int
    ) -> None:
        handle, session = request.handle, request.session
        if reason is None:
            tokens = session.tokens[0]
            stopped = session.stopped[0] or any(token in session.end_tokens for token in tokens[-1:])
            reason = "stop" if stopped or len(tokens) < session.max_new_tokens else "length"
        else:
            session.stopped[0] = True  # whatever it has, it is whole

        def tell(log_probs: list[LogProbs] | None, error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                _ended(request, reason, metrics, self.method, forwards, log_probs=log_probs)
            except BaseException as failed:  # a model, or a text that is not one of its grammar
                _ended(request, None, metrics, error=failed)

        if Scoring.needed(handle, session):
            memory.scoring.add(Ended(handle, session, memory.root(session), tell))
        else:
            tell(None, None)

    def _size(self, requests: int) -> int:
        return min(self._rows, 1 << (requests - 1).bit_length()) if self._grows else self._rows

    def _take(self, rows: int) -> RunningBatch:
        """The batch with this number of rows, to which the requests have moved."""
        old = self.batch
        if rows not in self._batches:
            self._follow([])
            staging = None if old is None else old.staging
            self._batches[rows] = RunningBatch(self._kind, self._session_of(rows), staging, **self._options)
        new = self._batches[rows]
        if old is not None and old is not new:
            new.take_over(old)
            self.running = dict(enumerate(self.running[row] for row in sorted(self.running)))
        self.batch, self._unused = new, 0
        return new

    def _shrink(self) -> None:
        assert self.batch is not None
        size = self._size(max(1, len(self.running) + (self.prefilling is not None)))
        self._unused = self._unused + 1 if size < len(self.batch.sessions) else 0
        if self._unused > _PATIENCE:
            self._take(size)


def _ended(
    request: Request,
    reason: FinishReason | None,
    metrics: EngineMetrics,
    method: str = "",
    forwards: int | None = None,
    error: BaseException | None = None,
    log_probs: list[LogProbs] | None = None,
) -> None:
    """Tells a request that it has ended, and counts it. Without `forwards` it never ran; `log_probs`:
    those of its tokens."""
    if isinstance(error, NoChoice):
        refuse_broken(getattr(request.session.model, "model_itself", request.session.model), error)
    handle, result = request.handle, None
    flushed = handle._flush()
    error = error or flushed
    reason = reason if error is None else None
    if forwards is not None and error is None:
        result = finished(request.session, True, method, lambda: forwards, lambda _: log_probs)
        seconds = time.perf_counter() - (handle.joined or handle.submitted)
        result = replace(result, stats=replace(result.stats, seconds=seconds))
        metrics.new_tokens += result.stats.tokens
        metrics.accepted_tokens += sum(piece.accepted for piece in handle.pieces)
        metrics.forwards += forwards
    name = "error" if reason is None else reason
    metrics.finished[name] = metrics.finished.get(name, 0) + 1
    handle._end(reason, result, error)
    if forwards is not None and handle.joined is not None and handle.ended is not None:
        metrics.waited += handle.joined - handle.submitted
        metrics.to_first_token += (handle.first_token or handle.ended) - handle.submitted
        metrics.total += handle.ended - handle.submitted
