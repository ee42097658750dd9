"""Log-probabilities of texts that have ended: a forward at a time, between the steps of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from pdkernels.cache import PagedKVCache
from pdkernels.generation.logprobs import scored, steps_of
from pdkernels.generation.result import LogProbs
from pdkernels.generation.session import inference

if TYPE_CHECKING:
    from pdkernels.engine.method_batch import Request
    from pdkernels.engine.pages import Memory


class Ended(NamedTuple):
    """A request whose text has ended, and waits for its log-probabilities."""

    request: Request
    tell: Callable[[list[LogProbs] | None, BaseException | None], None]
    """Ends the request, with its log-probabilities, with none, or with an error."""


class Scoring:
    """Texts that have ended and wait for their log-probabilities, one after the other.

    A text runs once more, in pieces as short as those of a prompt, so that the others go on. Of its prompt it takes over
    what is kept."""

    def __init__(self) -> None:
        self._ended = deque[Ended]()
        self._steps: Generator[int, None, list[LogProbs]] | None = None

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def requests(self) -> list[Request]:
        """Those that wait."""
        return [ended.request for ended in tuple(self._ended)]

    @staticmethod
    def wanted(request: Request) -> bool:
        """Whether anybody waits for the log-probabilities of a text."""
        session = request.session
        return session.params.logprobs is not None and not request.handle.unread

    def add(self, ended: Ended) -> None:
        """Puts a text behind the others."""
        self._ended.append(ended)

    def turn(self, memory: Memory, budget: int) -> None:
        """Runs the oldest texts, as many tokens of them as of a prompt."""
        while self._ended and budget > 0:
            ended, found, error = self._ended[0], None, None
            if self.wanted(ended.request):
                try:
                    with inference():
                        self._steps = self._steps or _begun(ended.request, memory)
                        budget -= next(self._steps)
                    continue
                except StopIteration as end:
                    found = end.value
                except BaseException as failed:  # of this text: no other has a part in its forward
                    error = failed
            self._ended.popleft()
            self._steps = None
            ended.tell(found, error)

    def clear(self) -> None:
        """Forgets all of them."""
        self._ended.clear()
        self._steps = None


def _begun(request: Request, memory: Memory) -> Generator[int, None, list[LogProbs]]:
    session = request.session
    model, count = getattr(session.model, "model_itself", session.model), session.params.logprobs
    assert count is not None

    def known(cache: Any) -> int:
        return _copy_known(request, cache, memory)

    logits = scored(model, session.prompts, session.tokens, adapters=session.adapters, known=known, in_pieces=True)
    return steps_of(logits, session.tokens, count)


def _copy_known(request: Request, cache: Any, memory: Memory) -> int:
    """Copies the rows of a prompt that are kept into a cache; returns their number."""
    tree, prompt = memory.shared_pages, request.session.prompts[0]
    if tree is None or not tree.goes_back:  # states and windows are kept after some places alone
        return 0
    prefix = tree.find(memory.root(request.session), prompt[:-1])
    if not prefix.length:
        return 0
    pages = PagedKVCache.on(tree.pool, 1, prefix.length)
    pages.hold_row_(0, [*prefix.pages, *([] if prefix.partial is None else [prefix.partial])])
    try:
        cache.copy_row_(0, pages, 0, prefix.length)
    finally:
        pages.resize_row_(0, 0)
    return prefix.length
