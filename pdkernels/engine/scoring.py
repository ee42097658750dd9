"""Log-probabilities of texts that have ended: a forward at a time, between the steps of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from pdkernels.cache import PagedKVCache
from pdkernels.engine.generation import Generation
from pdkernels.engine.tree import PrefixTree, Root
from pdkernels.generation.logprobs import scored, steps_of
from pdkernels.generation.result import LogProbs
from pdkernels.generation.session import Session, inference
from pdkernels.models.architectures.callable_model import CallableModel
from pdkernels.models.capabilities import capabilities


class Ended(NamedTuple):
    """A request whose text has ended, and waits for its log-probabilities."""

    handle: Generation
    session: Session
    root: Root
    """Of its rows in a tree of earlier texts."""
    tell: Callable[[list[LogProbs] | None, BaseException | None], None]
    """Ends the request, with its log-probabilities, with none, or with an error."""


class Scoring:
    """Texts that have ended and wait for their log-probabilities, one after the other.

    A text runs once more, in pieces, so that the others go on. Of its prompt it takes over what is kept."""

    def __init__(self) -> None:
        self._ended = deque[Ended]()
        self._steps: Generator[int, None, list[LogProbs]] | None = None

    def __len__(self) -> int:
        return len(self._ended)

    @staticmethod
    def needed(handle: Generation, session: Session) -> bool:
        """Whether somebody waits for the log-probabilities of a text."""
        return session.params.logprobs is not None and not handle.unread

    def add(self, ended: Ended) -> None:
        """Puts a text behind the others."""
        self._ended.append(ended)

    def turn(self, tree: PrefixTree | None, budget: int, piece: int) -> None:
        """Runs `budget` tokens of the oldest texts, or a forward more, of at most `piece` each; `tree` has the rows of
        prompts."""
        for ended in [ended for ended in self._ended if not self.needed(ended.handle, ended.session)]:
            if ended is self._ended[0]:
                self._steps = None
            self._ended.remove(ended)
            ended.tell(None, None)
        while self._ended and budget > 0:
            ended, result, error = self._ended[0], None, None
            try:
                with inference():
                    self._steps = self._steps or _begun(ended, tree, piece)
                    budget -= next(self._steps)
                continue
            except StopIteration as end:
                result = end.value
            except BaseException as failed:  # of this text: no other has a part in its forward
                error = failed
            self._ended.popleft()
            self._steps = None
            ended.tell(result, error)

    def clear(self) -> None:
        """Forgets all of them."""
        self._ended.clear()
        self._steps = None


def _begun(ended: Ended, tree: PrefixTree | None, piece: int) -> Generator[int, None, list[LogProbs]]:
    session = ended.session
    model, count = getattr(session.model, "model_itself", session.model), session.params.logprobs
    assert count is not None

    def restore(cache: Any) -> int:
        return _restore(ended, cache, tree)

    # What a model of recurrent depth keeps of a prompt depends on how it is cut; a function reads the text anew each time.
    whole = isinstance(model, CallableModel) or "recurrent" in capabilities(model)
    size = None if whole else piece
    logits = scored(model, session.prompts, session.tokens, adapters=session.adapters, restore=restore, piece=size)
    return steps_of(logits, session.tokens, count)


def _restore(ended: Ended, cache: Any, tree: PrefixTree | None) -> int:
    """Copies the rows of a prompt that are kept into a cache; returns their number."""
    if tree is None or not tree.goes_back:  # states and windows are kept after some places alone
        return 0
    prefix = tree.find(ended.root, ended.session.prompts[0][:-1])
    if not prefix.length:
        return 0
    pages = PagedKVCache.on(tree.pool, 1, prefix.length)
    pages.hold_row_(0, [*prefix.pages, *([] if prefix.partial is None else [prefix.partial])])
    try:
        cache.copy_row_(0, pages, 0, prefix.length)
    finally:
        pages.resize_row_(0, 0)
    return prefix.length
