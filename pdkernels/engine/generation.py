"""A request's side of an engine: its tokens as they come, its result, its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Literal

from pdkernels._threads import Worker
from pdkernels._validation import check, check_type, sentence
from pdkernels.decoding import DecodeResult, Piece
from pdkernels.models.architectures.lora import LoraAdapter

FinishReason = Literal["stop", "length", "cancelled", "timeout"]


class Generation:
    """A submitted request. Iterate over it, with `for` or `async for`, for its pieces as they come; any number of
    times.

    All methods may be called from any thread. A piece is kept until the generation itself is dropped, so a slow reader
    delays nobody.
    """

    def __init__(
        self, number: int, prompt: list[int], decoder: Any, worker: Worker, adapter: LoraAdapter | None = None
    ) -> None:
        self.number = number
        """Requests of an engine are numbered from 0 in the order of their submission."""
        self.prompt = prompt
        self.submitted = time.perf_counter()
        """As `time.perf_counter`; so are the other times. None: not yet."""
        self.joined: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None
        self.reused = 0
        """Tokens of the prompt whose K and V were known."""
        self.finish_reason: FinishReason | None = None
        """Why it ended; None while it has not, and after an error."""
        self._decoder = decoder
        self._pieces: list[Piece] = []
        self._result: DecodeResult[Any, Any] | None = None
        self._error: BaseException | None = None
        self.cancelled = False
        """Whether `cancel` was called."""
        self.unread = False
        """Whether nobody will read it."""
        self._standing: tuple[int, int, list[int | None]] = (0, 0, [])  # number, the pieces before it, its tokens
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._worker, self._goes_on, self._adapter = worker, False, adapter
        self.keeps_adapter = False
        """Whether its adapter stays loaded when it has ended, for a request that goes on from it."""

    def _go_on(self, worker: Worker) -> None:
        """Called for the request that comes after it; there is one at most."""
        ready = self._worker is worker and self.joined is not None and not self._goes_on
        expectation = "be a generation of this engine that has joined a batch, and is gone on from once"
        check(ready, "Engine.submit", "after", expectation, f"number {self.number}")
        self._goes_on, self.keeps_adapter = True, False

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.ended is not None

    def uses(self, adapter: LoraAdapter) -> bool:
        """Whether an adapter must stay loaded for it."""
        return self._adapter is adapter and (self.keeps_adapter or not self.done)

    @property
    def pieces(self) -> list[Piece]:
        """What has come so far."""
        with self._changed:
            return list(self._pieces)

    def cancel(self, *, unread: bool = False) -> None:
        """Ends it at the next step; what it has so far stays readable. No effect on one that has ended.

        Args:
            unread: nobody will read it, so its log-probabilities are not computed.
        """
        self.unread = self.unread or unread
        self.cancelled, self.keeps_adapter = True, False

    def result(self, timeout: float | None = None) -> DecodeResult[Any, Any]:
        """Waits for the end, and returns what `generate` returns for the prompt alone.

        Args:
            timeout: seconds to wait; None: for ever. The generation goes on after that.

        Raises:
            TimeoutError: it has not ended in time.
            RuntimeError: a callback or a hook waits for it, which the engine's thread runs; or the engine has failed.
            concurrent.futures.CancelledError: it was cancelled, or had a time limit, before it joined a batch.
            Exception: what ended it, if that was an error.
        """
        timeout = checked_wait("Engine", timeout)
        self._refuse_callbacks(self.done)
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"pdkernels.Engine: request {self.number} has not ended within {timeout} s")
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise CancelledError(f"pdkernels.Engine: request {self.number} ended before it began: {self.finish_reason}")
        return self._result

    def __iter__(self) -> Iterator[Piece]:
        reader = _Reader(self)
        while True:
            self._refuse_callbacks(reader.waits_no_more)
            with self._changed:
                self._changed.wait_for(lambda: reader.waits_no_more)
                pieces = reader.read()
            if not pieces:
                break
            yield from pieces
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(news.set)

        with self._changed:
            self._listeners.append(tell)
        try:
            reader = _Reader(self)
            while True:
                news.clear()
                with self._changed:
                    pieces, done = reader.read(), self.done
                for piece in pieces:
                    yield piece
                if not pieces and done:
                    break
                if not pieces:
                    self._refuse_callbacks(False)
                    await news.wait()
        finally:
            with self._changed:
                self._listeners.remove(tell)
        if self._error is not None:
            raise self._error

    def _refuse_callbacks(self, ready: bool) -> None:
        if not ready and self._worker.is_current:
            fault = f"a callback or a hook must not wait for request {self.number}: the engine's thread, which would have to run it, waits for the callback"
            raise RuntimeError(sentence("Engine", fault))

    def _after_fork(self, error: BaseException) -> None:
        """Ends it in a forked child, if it has not ended: another thread may hold its lock, or have changed half of
        it."""
        self._changed, self._listeners = threading.Condition(), []
        if not self.done:
            self._end(None, error=error)

    # The rest is called by the engine's thread.

    def _add(self, ids: list[int], accepted: int) -> None:
        if self.first_token is None and ids:
            self.first_token = time.perf_counter()
        text = None if self._decoder is None else self._decoder.feed(ids)
        self._publish(Piece(0, list(ids), text, accepted))

    def _show(self, tokens: list[int | None]) -> None:
        with self._changed:
            number, *before = self._standing
            new = [len(self._pieces), tokens] != before
            if new:
                self._standing = number + 1, len(self._pieces), tokens
        if new:
            self._tell()

    def _flush(self) -> BaseException | None:
        """Publishes the end of a text that stops within a character; returns what the tokenizer raises."""
        try:
            if tail := "" if self._decoder is None else self._decoder.flush():
                self._publish(Piece(0, [], tail, 0))
        except BaseException as error:
            return error
        return None

    def _end(
        self,
        reason: FinishReason | None,
        result: DecodeResult[Any, Any] | None = None,
        error: BaseException | None = None,
    ) -> None:
        with self._changed:
            self.finish_reason, self._result, self._error = reason, result, error
            self.ended = time.perf_counter()
        self._tell()

    def _publish(self, piece: Piece) -> None:
        with self._changed:
            self._pieces.append(piece)
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


def checked_wait(op: str, timeout: Any) -> float | None:
    """Seconds to wait, no more than a lock takes; None: for ever."""
    if timeout is None:
        return None
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    check_type(number, op, "timeout", "be a number", type(timeout).__name__)
    check(timeout == timeout, op, "timeout", "be a number of seconds", timeout)
    seconds: float = min(timeout, threading.TIMEOUT_MAX)
    return seconds


class _Reader:
    """How far one reader has come. Its methods are for the holder of the generation's lock."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._at, self._seen = generation, 0, 0

    @property
    def waits_no_more(self) -> bool:
        """Whether there is something to read, or nothing to wait for."""
        of = self._generation
        return len(of._pieces) > self._at or of.done or self._shown

    @property
    def _shown(self) -> bool:
        """Whether something new stands after the last piece."""
        number, after, _ = self._generation._standing
        return number > self._seen and after == len(self._generation._pieces) and not self._generation.done

    def read(self) -> list[Piece]:
        """What is new."""
        of = self._generation
        pieces = of._pieces[self._at :]
        self._at += len(pieces)
        if self._shown:
            self._seen, _, tokens = of._standing
            pieces = [*pieces, Piece(0, [], None if of._decoder is None else "", 0, list(tokens))]
        return pieces
