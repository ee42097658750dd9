"""One model, one thread that steps, many requests."""

from __future__ import annotations

import copy
import itertools
import os
import queue
import threading
import time
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet, ref

import torch

from pdkernels._threads import Worker, tell_forks
from pdkernels._validation import check, check_flag, check_type, integer, message, refuse, sentence
from pdkernels.decoding import Method, OnTokens, available, find
from pdkernels.decoding.canvas.states import MOST_STATES
from pdkernels.decoding.generate import ARGUMENTS, check_capabilities, prepare
from pdkernels.decoding.options import check_options, suggests
from pdkernels.decoding.steps import Staging
from pdkernels.engine.broken import BrokenModel
from pdkernels.engine.generation import Generation, checked_wait
from pdkernels.engine.method_batch import MethodBatch, Request
from pdkernels.engine.metrics import EngineMetrics
from pdkernels.engine.pages import Memory
from pdkernels.generation.filtered_model import FilteredModel
from pdkernels.generation.generation_config import completed
from pdkernels.generation.grammar_rows import JoinedGrammars
from pdkernels.generation.params import MAX_POSITIONS, SETTINGS, SamplingParams, take_params
from pdkernels.generation.prompts import Prompts
from pdkernels.generation.session import Session
from pdkernels.models.checkpoints.request_adapters import add_adapter, checked_name, new_adapter, unload_adapter
from pdkernels.models.protocols import LanguageModel, check_language_model, keeps_windows, missing
from pdkernels.models.text.tokenizers import incremental

_OP = "Engine.submit"
_BUCKET = 32  # canvases of one batch are padded to a multiple of this many prompt tokens


class EngineFull(RuntimeError):
    """There are `max_waiting` requests that have not joined a batch: try again later."""


class Engine:
    """Continuous batching over one model: requests join and leave a running batch between two steps.

    A request gets the tokens that `generate` gives it alone, whatever else runs, if the logits of a row do not depend
    on the other rows of a forward; on the CPU this library's models have the same bits.

    Requests of one method with the same options share a batch, and the batches take turns. A request has a seed of its
    own, and a temperature and filters where the method draws tokens by row (`Steps.draws_by_row`). A batch on a KV
    cache grows and shrinks with the number of its requests.

    K and V are in pages that all batches share (`PagePool`), if the model's cache has them, and the pages of a common
    beginning belong to all that have it. A request joins with pages for its prompt and takes more as it grows. If there
    are none, earlier prompts are forgotten, then the youngest request gives up its own and waits again; its K and V are
    computed anew. Where a method cannot go on like that (`Steps.resumes`), and without a pool, room for the whole of a
    request is set aside when it joins. Those that find none wait, in the order of their submission.

    What a callback, a hook or a tokenizer raises ends its own request, whatever it is. An engine that nobody refers to
    finishes its requests and is freed; at the end of the program they are cancelled. A forked child has no engine:
    there its requests have failed.

    Args:
        model: as for `generate`. Nothing else may run it while the engine does.
        max_running: requests of a batch at a time.
        max_canvases: the same for methods that fill canvases, whose forwards are wide already; None: 1 on the CPU, else
            `max_running`.
        max_batches: batches at a time. If more kinds of requests come, a batch that is idle makes room, and none idle,
            nothing younger than the oldest request without a batch joins.
        max_prompt_tokens, max_new_tokens: limits of a request; a row of a cache has room for both. None: what the model
            was trained for, at most 4,096 together, three quarters of it for the prompt.
        max_waiting: requests that have not joined a batch.
        prompt_tokens_per_step: tokens of prompts, of all batches, that may run between two steps. A longer prompt runs in
            pieces, so that it does not stall the others.
        kept_prompt_tokens: tokens of earlier prompts and answers whose K and V are kept, for prompts that begin with the
            same ones; 0 keeps none. Recurrent states that are kept count as the tokens whose memory they take; of layers
            with windows the rows before some places are kept, as long as running requests leave room.
        cache_tokens: tokens that all pages hold together, of running requests and of earlier texts; there are enough
            for the longest request in any case. None: enough for `max_running` of them and `kept_prompt_tokens`, but at
            most half of the memory that is free. Layers with windows hold fewer, those that tokens to come can see.
        prefix_dir: a folder where K and V of earlier texts are kept as well, for an engine with the same weights that
            is made later; several engines may have the same one. It holds the texts: who reads it knows them, and who
            writes to it decides what is answered. None: nowhere.
        prefix_dir_bytes: of its files; those of the texts used least recently are deleted.

    Raises:
        ValueError, TypeError: a limit out of range; an object that is no model.
        OSError: `prefix_dir` cannot be written to.

    Example:
        >>> import pdkernels as pd
        >>> with pd.Engine(pd.models.load("tiny-code")) as engine:
        ...     first = engine.submit("import os\\n", "jacobi", max_new_tokens=8)
        ...     second = engine.submit("def f(", "jacobi", max_new_tokens=12)
        ...     text = "".join(piece.text or "" for piece in first)
        >>> text == first.result().text, second.result().stats.tokens, second.finish_reason
        (True, 12, 'length')
    """

    @suggests("Engine")
    def __init__(
        self,
        model: Any,
        *,
        max_running: int = 8,
        max_canvases: int | None = None,
        max_batches: int = 4,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        max_waiting: int = 1024,
        prompt_tokens_per_step: int = 256,
        kept_prompt_tokens: int = 16384,
        cache_tokens: int | None = None,
        prefix_dir: str | os.PathLike[str] | None = None,
        prefix_dir_bytes: int = 1 << 32,
    ) -> None:
        op = "Engine"
        check_language_model(op, model)
        unmet, page = missing(model, LanguageModel), "See docs/own_models.md."
        check_type(not unmet, op, "model", f"have {unmet}", f"{type(model).__name__} without it", page)
        self.model = model
        trained = getattr(model.config, "max_positions", None) or MAX_POSITIONS
        positions = min(trained, 4096)
        self.max_running = integer(op, "max_running", max_running, 1)
        # A plain function does not say where it is.
        self._on_cpu = torch.device(getattr(model, "device", "cpu")).type == "cpu"
        default = 1 if self._on_cpu else self.max_running
        self.max_canvases = default if max_canvases is None else integer(op, "max_canvases", max_canvases, 1)
        self.max_batches = integer(op, "max_batches", max_batches, 1)
        new = positions // 4 if max_new_tokens is None else integer(op, "max_new_tokens", max_new_tokens, 1)
        check(new < trained, op, "max_new_tokens", f"leave room for a prompt in the model's {trained} positions", new)
        longest = max(1, positions - new) if max_prompt_tokens is None else max_prompt_tokens
        self.max_new_tokens, self.max_prompt_tokens = new, integer(op, "max_prompt_tokens", longest, 1)
        check(new + longest <= MAX_POSITIONS, op, "max_prompt_tokens", f"leave room in {MAX_POSITIONS}", longest)
        self.max_waiting = integer(op, "max_waiting", max_waiting, 1)
        self.prompt_tokens_per_step = integer(op, "prompt_tokens_per_step", prompt_tokens_per_step, 1)
        prefix_tokens = integer(op, "kept_prompt_tokens", kept_prompt_tokens, 0)
        longest = self.max_prompt_tokens + new
        by_default, wish = cache_tokens is None, self.max_running * longest + prefix_tokens
        page_tokens = wish if by_default else integer(op, "cache_tokens", cache_tokens, 1)
        folder_bytes = integer(op, "prefix_dir_bytes", prefix_dir_bytes, 1)
        self._memory = Memory(
            model, prefix_tokens, page_tokens, longest, self.max_running, by_default, prefix_dir, folder_bytes
        )
        self._numbers = itertools.count()
        self._method_batches: dict[Hashable, MethodBatch] = {}
        self._metrics = EngineMetrics()
        self._closing: str = ""  # "finish" or "cancel"
        self.failure: BaseException | None = None
        """What ended its thread before `close`; None: nothing did."""
        self._handles: WeakSet[Generation] = WeakSet()
        self._lock = threading.RLock()
        self._calls = calls = queue.SimpleQueue[Engine | None]()

        def stop() -> None:
            if (engine := reference()) is not None:
                engine._close("cancel")

        # The thread of an idle engine does not keep it.
        reference = ref(self, lambda _: calls.put(None))
        memory = self._memory
        self._thread = Worker(lambda: _run(calls, memory), stop, "pdkernels-engine")
        tell_forks(self)
        self._thread.start()

    def submit(
        self,
        prompt: Prompts,
        method: str | Method = "autoregressive",
        *,
        params: SamplingParams | None = None,
        on_tokens: OnTokens | None = None,
        timeout: float | None = None,
        provisional: bool = False,
        after: Generation | None = None,
        **options: Any,
    ) -> Generation:
        """Queues a request and returns at once.

        Args:
            prompt: one prompt, as for `generate`.
            method: its name; one whose sequences can join and leave a batch.
            params: `SamplingParams` to start from; settings among the `options` come before its own.
            on_tokens: as for `generate`, with sequence 0; called by the engine's thread, which waits for it. Its error
                ends the request.
            timeout: seconds from now after which it ends with what it has; None: no limit. Log-probabilities come after
                it.
            provisional: also give pieces with what stands after the text so far (`Piece.provisional`), for a method
                that fills positions in any order. A reader gets the latest; older ones are not kept.
            after: a generation of this engine that has joined a batch, which this one goes on from: it was let in, so this
                one waits for its turn even if `max_waiting` requests do. One can be gone on from once.
            **options: of the method; and settings (the fields of `SamplingParams`), `trace` and `overflow`, as for
                `generate`. `n` must be 1, `seed` an int, and `max_new_tokens` at most the engine's. Requests with a
                hook have a batch of their own, and so have those with a grammar where canvases are filled.

        Raises:
            ValueError, TypeError: as `generate`; a batch of prompts; a request beyond the engine's limits.
            NotImplementedError: a method or an option that lets no sequences join and leave.
            EngineFull: too many requests wait.
            RuntimeError: the engine is closed, has failed, or runs in the process of which this one is a fork.
        """
        self._refuse_closed()
        arguments = {name: options.pop(name) for name in ARGUMENTS if name in options}
        params = completed(_OP, take_params(_OP, params, options), self.model)
        chosen = method if isinstance(method, Method) else find(method)
        check_capabilities(chosen, self.model, options)
        check_options(chosen, options, (*SETTINGS, *ARGUMENTS, "timeout", "provisional", "after"))
        if chosen.steps is None:
            fitting = [name for name in _joining() if find(name).supports(self.model)]
            remedy = f"These can: {', '.join(fitting) or 'none'}."
            raise NotImplementedError(
                message(_OP, "method", "let requests join and leave a batch", chosen.name, remedy)
            )
        check_flag(_OP, "provisional", provisional)
        check_type(
            after is None or isinstance(after, Generation), _OP, "after", "be a Generation", type(after).__name__
        )
        if provisional and not chosen.steps.shows_provisional:
            remedy = f"These do: {', '.join(_showing())}."
            raise NotImplementedError(message(_OP, "method", "write provisional text", chosen.name, remedy))
        refuse(params.n > 1, _OP, "a request has one answer", "Submit it several times, with other seeds.")
        check_flag(_OP, "infill", infill := arguments.pop("infill", False))
        refuse(infill, _OP, "masks in prompts cannot be filled here", "Use generate.")
        check_type(type(params.seed) is int, _OP, "seed", "be an int", type(params.seed).__name__)
        timeout = checked_wait(_OP, timeout)
        check(timeout is None or timeout > 0, _OP, "timeout", "be above 0 seconds", timeout)
        most, longest = self.max_new_tokens, self.max_prompt_tokens
        max_new_tokens = params.max_new_tokens
        remedy = f"Pass fewer, or make the engine with Engine(max_new_tokens={max_new_tokens})." * (
            max_new_tokens > most
        )
        within = f"be in 1 .. {most}, the engine's"
        check(1 <= max_new_tokens <= most, _OP, "max_new_tokens", within, max_new_tokens, remedy)
        session, single = prepare(self.model, prompt, chosen, params, options, on_tokens, **arguments)
        if session.likely is not None:
            fault = f"method {chosen.name!r} does not follow logprobs in a running batch: they are kept by a text's own forwards"
            raise NotImplementedError(sentence(_OP, fault, "Call pdkernels.decoding.generate."))
        check(single, _OP, "prompt", "be one prompt", f"a batch of {session.batch}", "Submit each one.")
        remedy = f"Shorten it, or make the engine with Engine(max_prompt_tokens={session.longest})."
        within = f"have at most {longest} tokens, the engine's"
        check(session.longest <= longest, _OP, "prompt", within, session.longest, remedy)
        decoder = None if self.model.tokenizer is None else incremental(self.model.tokenizer)
        worker, on_tokens = self._thread, session.on_tokens
        adapter = session.adapters[0] if session.adapters else None
        handle = Generation(next(self._numbers), session.prompts[0], decoder, worker, adapter)

        def tell(sequence: int, ids: list[int], accepted: int) -> None:
            handle._add(ids, accepted)
            if on_tokens is not None:
                with worker.callback():
                    on_tokens(sequence, ids, accepted)

        session.on_tokens = tell
        session.on_provisional = handle._show if provisional else None
        sampler = session.sampler if chosen.steps.draws_by_row(options) else None
        key = self._key(chosen, session, options, handle.number)
        if key not in self._method_batches or (session.adapters is not None and chosen.fills_canvases):
            self._check_steps(chosen, session, options)
        deadline = None if timeout is None else time.perf_counter() + timeout
        stored = self._memory.prepare(session) if chosen.steps.continues else []
        request = Request(handle, session, deadline, sampler, stored)
        with self._lock:
            self._refuse_closed()
            is_loaded = adapter is None or adapter in self.model.adapters.values()
            check(is_loaded, _OP, "adapter", "stay loaded until it is submitted", repr(params.adapter))
            waiting = sum(len(method_batch.waiting) for method_batch in self._method_batches.values())
            if after is not None:
                after._go_on(self._thread)
            elif waiting >= self.max_waiting:
                raise EngineFull(
                    sentence(_OP, f"{waiting} requests wait already", "Try again later, or raise max_waiting.")
                )
            if key not in self._method_batches:
                self._method_batches[key] = self._new_method_batch(chosen, session, options)
            session.model, session.filters = self._method_batches[key].model, self._method_batches[key].filters
            self._method_batches[key].waiting.append(request)
            self._handles.add(handle)
            self._metrics.submitted += 1
            self._wake()
        return handle

    @property
    def running(self) -> bool:
        """Whether it takes requests."""
        return not self._closing and self._thread.is_alive()

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Gives its model a LoRA adapter that requests may name, while others run; `pdkernels.models.load_adapter` says
        what it raises."""
        adapter = new_adapter(self.model, name, folder)
        with self._lock:
            add_adapter(self.model, adapter)

    def unload_adapter(self, name: str) -> None:
        """Takes an adapter from its model.

        Raises:
            ValueError: no adapter has this name, or a request uses it.
        """
        op = "Engine.unload_adapter"
        with self._lock:
            adapter = checked_name(op, "name", self.model, name)
            # Not by the lists of those that wait and run: between two of them a request is in none.
            users = sum(handle.uses(adapter) for handle in self._handles)
            check(users == 0, op, "name", "be that of an adapter that no request uses", f"{name!r}, which {users} use")
            unload_adapter(self.model, name)

    def metrics(self) -> EngineMetrics:
        """A copy of the counters.

        >>> import pdkernels as pd
        >>> with pd.Engine(pd.models.load("tiny-code")) as engine:
        ...     handle = engine.submit("import os", max_new_tokens=3)
        >>> engine.metrics().finished, engine.metrics().new_tokens
        ({'length': 1}, 3)
        """
        with self._lock:
            now = copy.copy(self._metrics)
            now.finished = dict(now.finished)
            method_batches = list(self._method_batches.values())
            now.waiting = sum(len(method_batch.waiting) for method_batch in method_batches)
            now.running = sum(
                len(method_batch.running) + (method_batch.prefilling is not None) for method_batch in method_batches
            )
            now.running += len(self._memory.scoring)
            now.batches = sum(method_batch.batch is not None for method_batch in method_batches)
            self._memory.count(now)
        return now

    def close(self, *, finish: bool = True, timeout: float | None = None) -> bool:
        """Takes no more requests; returns whether all have ended, and the thread has.

        Args:
            finish: wait for the requests that are there; False cancels them, without their log-probabilities.
            timeout: seconds to wait; None: for ever. A callback or a hook, which the thread runs, does not wait.
        """
        check_flag("Engine.close", "finish", finish)
        timeout = checked_wait("Engine.close", timeout)
        self._close("finish" if finish else "cancel")
        if not self._thread.is_current:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _close(self, how: str) -> None:
        with self._lock:
            self._closing = how if self._closing != "cancel" else "cancel"
            self._wake()

    def _wake(self) -> None:
        if self._calls.empty():
            self._calls.put(self)

    def _refuse_closed(self) -> None:
        if self.failure is not None:
            raise RuntimeError(sentence(_OP, f"the engine is closed: {_reason(self.failure)}")) from self.failure
        if self._closing:
            raise RuntimeError(sentence(_OP, "the engine is closed"))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finish=kind is None)

    def _key(self, method: Method, session: Session, options: dict[str, Any], number: int) -> Hashable:
        """What the requests of a batch share. The sizes of canvases are those of a request, since they cost what they
        hold."""
        assert method.steps is not None
        joins = _joins(method, session)
        if session.filters.hooks or (session.filters.allowed is not None and not joins):
            return number  # these follow one text
        sizes = () if method.steps.any_limit else (session.max_new_tokens, -(-session.longest // _BUCKET))
        chosen = tuple(sorted((name, _written(value)) for name, value in options.items()))
        drawn = None if method.steps.draws_by_row(options) else session.sampler
        filters = repr(replace(session.filters, allowed=None))
        return method.name, chosen, drawn, session.end_tokens, filters, sizes, joins

    def _check_steps(self, method: Method, session: Session, options: dict[str, Any]) -> None:
        """Raises what the method's steps say of the options and of the model."""
        assert method.steps is not None
        if session.grammar is not None and method.writes_in_parallel and not method.steps.follows_grammars:
            fault = f"method {method.name!r} does not follow a grammar in a running batch: what it fills at once must fit together"
            raise NotImplementedError(sentence(_OP, fault, "Call pdkernels.decoding.generate."))
        states = options.get("speculate", 0)
        if type(states) is int and 0 < states <= MOST_STATES:  # of others the method says what is wrong
            self._memory.check_states(1 + states, self.max_running * (self.max_prompt_tokens + self.max_new_tokens))
        steps = Staging(method.steps, session, **options).steps
        unsupported = steps.lacks
        if not unsupported and not hasattr(steps.cache, "copy_row_"):
            unsupported = f"a cache, {type(steps.cache).__name__}, without copy_row_"
        if unsupported:
            raise NotImplementedError(message(_OP, "method", "let requests join and leave a batch", unsupported))

    def _new_method_batch(self, method: Method, session: Session, options: dict[str, Any]) -> MethodBatch:
        ends, filters, kind = session.end_tokens, session.filters, method.steps
        assert kind is not None
        grammars = JoinedGrammars() if _joins(method, session) else None
        if grammars is not None:
            filters = replace(filters, allowed=grammars.words)
        # Rows that draw by themselves bring their samplers.
        params = SamplingParams() if kind.draws_by_row(options) else session.params.replace(seed=0, adapter=None)
        model = self.model if method.fills_canvases or not filters.any else FilteredModel(self.model, filters)
        longest, limit = self.max_prompt_tokens, self.max_new_tokens
        if not kind.any_limit:
            longest, limit = -(-session.longest // _BUCKET) * _BUCKET, session.max_new_tokens

        pages = None if kind.keeps_pages or options.get("page_size") is not None else self._memory.shared_pages
        pool, windows = None if pages is None else pages.pool, keeps_windows(self.model)

        def session_of(rows: int) -> Session:
            largest = Session(model, [[0] * longest] * rows, limit, ends, None, False, params=params)
            largest.filters, largest.pool, largest.keeps_windows = filters, pool, windows
            if kind.follows_grammars:
                largest.grammar = session.grammar
            return largest

        rows = self.max_canvases if kind.keeps_pages else self.max_running
        rows = 1 if kind.follows_grammars and session.grammar is not None else rows  # the grammar is that of one text
        grows = not kind.keeps_pages and self._on_cpu
        return MethodBatch(method.name, kind, options, model, filters, session_of, rows, grows, grammars)

    @property
    def _idle(self) -> bool:
        with self._lock:
            return not (self._closing or self._works)

    @property
    def _works(self) -> bool:
        """Whether there are requests."""
        batches = self._method_batches.values()
        return any(batch.busy or batch.waiting for batch in batches) or len(self._memory.scoring) > 0

    def _turn(self) -> bool:
        """Lets all batches run a step; whether there may be more to do."""
        with self._lock:
            method_batches = list(self._method_batches.values())
            for handle in self._handles if self._closing == "cancel" else ():
                if not handle.done:
                    handle.cancel(unread=True)
            for method_batch in method_batches:
                method_batch.drop_waiting(self._memory, self._metrics)
            self._memory.waiting(
                {request.handle.number for method_batch in method_batches for request in method_batch.waiting}
            )
            if self._closing and not self._works:
                return False
            before = self._open_batches()
        live = self._memory.method_batches = [
            method_batch
            for method_batch in method_batches
            if method_batch.batch is not None and (method_batch.busy or method_batch.waiting)
        ]
        budget = self.prompt_tokens_per_step
        for method_batch in sorted(live, key=lambda method_batch: method_batch.next_prompt):
            try:
                budget -= method_batch.turn(self._memory, budget, before, self._metrics)
            except BrokenModel:
                raise
            except BaseException as error:  # of the batch: a model that fails, memory that has run out, a hook
                method_batch.fail(error, self._metrics)
                budget = 0  # some of it may be spent
        self._memory.scoring.turn(self._memory.shared_pages, max(1, budget), self.prompt_tokens_per_step)
        return True

    def _fail(self, error: BaseException) -> None:
        """Ends all requests when the thread cannot go on."""
        with self._lock:
            self.failure, self._method_batches, self._memory.method_batches = error, {}, []
            self._memory.scoring.clear()
            for handle in list(self._handles):
                if not handle.done:
                    self._metrics.finished["error"] = self._metrics.finished.get("error", 0) + 1
                    ended = RuntimeError(sentence("Engine", f"the engine has ended: {_reason(error)}"))
                    ended.__cause__ = error
                    handle._end(None, error=ended)

    def _after_fork(self) -> None:
        self._lock, self._method_batches, self._memory.method_batches = threading.RLock(), {}, []
        self._memory.scoring.clear()
        if self.failure is None:
            fault = "it runs in the process of which this one is a fork"
            self.failure = RuntimeError(sentence("Engine", fault, "Make an engine in this process."))
        for handle in list(self._handles):
            handle._after_fork(self.failure)

    def _open_batches(self) -> int | None:
        """Gives batches to method_batches that have none, the oldest requests first, and forgets method_batches that
        have nothing to do. Returns the number of the oldest request that found no room, before which no younger one may
        begin."""
        closed = [
            method_batch
            for method_batch in self._method_batches.values()
            if method_batch.batch is None and method_batch.waiting
        ]
        for method_batch in sorted(closed, key=lambda method_batch: method_batch.oldest):
            live = [other for other in self._method_batches.values() if other.batch is not None]
            if len(live) >= self.max_batches:
                number = method_batch.waiting[0].handle.number
                idle = [other for other in live if not other.busy and (not other.waiting or number < other.oldest)]
                if not idle:
                    return number
                min(idle, key=lambda other: other.last_used).close()
            try:
                method_batch.open()
            except BaseException as error:
                method_batch.prefilling = method_batch.waiting.popleft()
                method_batch.fail(error, self._metrics)
        self._method_batches = {
            key: method_batch
            for key, method_batch in self._method_batches.items()
            if method_batch.batch is not None or method_batch.waiting
        }
        return None


def _run(calls: queue.SimpleQueue[Engine | None], memory: Memory) -> None:
    """What the thread of an engine does until it is closed, or nobody refers to it: waits for a call, and steps while
    there are requests."""
    try:
        while (engine := calls.get()) is not None:
            try:
                while not engine._idle:
                    if not engine._turn():
                        return
            except BaseException as error:
                engine._fail(error)
                return
            engine = None
    finally:
        memory.close()


def _joins(method: Method, session: Session) -> bool:
    """Whether a request with a grammar can share a batch: its tokens come one after the other, so each row has a state."""
    grammar, steps = session.grammar, method.steps
    assert steps is not None
    in_rows = grammar is not None and session.filters.allowed == grammar.words
    return in_rows and not (steps.follows_grammars or method.writes_in_parallel or session.filters.hooks)


def _reason(failure: BaseException) -> str:
    tells_reason = isinstance(failure, BrokenModel) or (isinstance(failure, RuntimeError) and "fork" in str(failure))
    return str(failure) if tells_reason else f"{failure!r} ended its thread"


def _written(value: Any) -> str:
    """The same for equal settings; a model or a hook is only equal to itself."""
    is_scalar = value is None or isinstance(value, (bool, int, float, str))
    is_list = isinstance(value, (list, tuple)) and all(isinstance(item, (bool, int, float, str)) for item in value)
    return repr(value) if is_scalar or is_list else f"{type(value).__name__} {id(value)}"


def _joining() -> list[str]:
    return [name for name in available() if find(name).steps is not None]


def _showing() -> list[str]:
    return [name for name in _joining() if getattr(find(name).steps, "shows_provisional", False)]
