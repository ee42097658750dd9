"""`generate` as an iterator: pieces of text as soon as their tokens are final."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from pdkernels._threads import Worker, tell_forks
from pdkernels._validation import sentence
from pdkernels.generation.result import DecodeResult

_OP = "decoding.stream"


class Piece(NamedTuple):
    """New tokens of one text."""

    sequence: int
    """Number of the text in the batch."""
    ids: list[int]
    """A `ChunkTokens` for a chunk of "planned", in the order of completion."""
    text: str | None
    """What they add to the text; empty while a character is incomplete; None if the model has no tokenizer, and for
    "planned"."""
    accepted: int
    """How many of `ids`, from the front, were accepted drafts."""
    provisional: list[int | None] | None = None
    """Of an engine's request that asks for it: what stands after the text so far, None where nothing is written. It
    replaces what was there before, and may still change. Such a piece has no `ids`."""


class _Stopped(Exception):
    """The reader has stopped reading."""


class Stream(Iterator[Piece]):
    """The pieces of a generation, which runs in a thread of its own. `result` is that of `generate`, after the last
    piece.

    Leaving the loop early, `close`, or the end of the program ends the generation at its next token.
    """

    def __init__(self, generate: Any, model: Any, prompt: Any, method: Any, options: dict[str, Any]) -> None:
        self.result: DecodeResult[Any, Any] | None = None
        planned = getattr(method, "name", method) == "planned"  # whose tokens are not all text
        self._tokenizer: Any = None if planned else getattr(model, "tokenizer", None)
        self._ids: dict[int, list[int]] = {}
        self._text: dict[int, str] = {}
        self._pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._done = False
        self._rest: list[Piece] = []
        # Not this object, which the thread would keep from being collected.
        pieces, closed = self._pieces, self._closed

        def put(sequence: int, ids: list[int], accepted: int) -> None:
            if closed.is_set():
                raise _Stopped
            pieces.put((sequence, ids, accepted))

        def run() -> None:
            try:
                pieces.put(generate(model, prompt, method, on_tokens=put, **options))
            except BaseException as error:
                pieces.put(error)

        self._thread = Worker(run, closed.set, "pdkernels-stream")
        tell_forks(self)
        self._thread.start()

    def __next__(self) -> Piece:
        if self._rest:
            return self._rest.pop(0)
        if self._done:
            raise StopIteration
        self._refuse_itself()
        item = self._pieces.get()
        if isinstance(item, tuple):
            return Piece(item[0], item[1], self._added(item[0], item[1]), item[2])
        self._done = True
        self._thread.join()
        if isinstance(item, BaseException):
            raise item
        self.result = item
        self._rest = [*self._incomplete()]
        return self.__next__()

    def close(self) -> None:
        """Ends the generation. There is no result then."""
        self._refuse_itself()
        self._closed.set()
        self._done = True
        self._thread.join()

    def _after_fork(self) -> None:
        self._closed, self._pieces = threading.Event(), queue.SimpleQueue()
        fault = "this process is a fork of the one that generates, whose thread it does not have"
        self._pieces.put(RuntimeError(sentence(_OP, fault, "Start a stream here.")))

    def _refuse_itself(self) -> None:
        if self._thread.is_current:
            raise RuntimeError(sentence(_OP, "a hook must not read or close the stream that waits for it"))

    def __del__(self) -> None:
        self._closed.set()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _incomplete(self) -> Iterator[Piece]:
        """The ends of texts that stop within a character."""
        for sequence, ids in self._ids.items():
            text, before = str(self._tokenizer.decode(ids)), self._text.get(sequence, "")
            if text != before and text.startswith(before):
                yield Piece(sequence, [], text[len(before) :], 0)

    def _added(self, sequence: int, ids: list[int]) -> str | None:
        if self._tokenizer is None:
            return None
        sequence_ids = self._ids.setdefault(sequence, [])
        sequence_ids += ids
        before, text = self._text.get(sequence, ""), str(self._tokenizer.decode(sequence_ids))
        if text.endswith("\ufffd") or not text.startswith(before):
            return ""
        self._text[sequence] = text
        return text[len(before) :]
