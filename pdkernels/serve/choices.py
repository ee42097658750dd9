"""One answer of a request: read from the engine as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pdkernels.engine import Generation
from pdkernels.models.text.tokenizers import incremental
from pdkernels.serve.parser import AnswerParser, Thought
from pdkernels.serve.stops import StopCut
from pdkernels.serve.tagged import CallDelta
from pdkernels.serve.threads import in_thread

Standing = list[str | None]
"""What stands after a text: pieces of text, None for each position where nothing is written."""
New = str | Thought | CallDelta | Standing


class Rest(NamedTuple):
    """What follows a thought whose budget is spent."""

    generation: Generation | None
    """None: there is no room or no time for more."""
    forced: int
    """Tokens that close the thought."""
    late: bool = False
    """Whether there is no time for more."""


class Choice:
    """One of the answers to a request.

    Args:
        handle: its generation.
        tokenizer: of the model.
        stops: what ends the text.
        before: what the text begins with.
        parser: finds thoughts and calls; None: all is text.
        marks: the tags that are special tokens, which texts leave out, by their ids.
        closing: what closes a thought whose budget is spent.
        go_on: submits what comes after the budget, from the generation of the thought, its tokens and whether they must be
            closed; None: there is no budget.
    """

    def __init__(
        self,
        handle: Generation,
        tokenizer: Any,
        stops: Sequence[str],
        *,
        before: str = "",
        parser: AnswerParser | None = None,
        marks: Mapping[int, str] = {},
        closing: str = "",
        go_on: Callable[[Generation, list[int], bool], Rest] | None = None,
    ) -> None:
        self.handle, self.prompt, self.tokenizer, self._before, self._parser = (
            handle,
            handle.prompt,
            tokenizer,
            before,
            parser,
        )
        self.marks, self._closing, self._go_on = marks, closing, go_on
        self._stops, self._cut, self._decoder = stops, StopCut(stops), incremental(tokenizer)
        self._ended = list[Generation]()
        self._rest: Generation | None = None
        self._forced, self._late, self._cancelled = 0, False, False
        self.text = ""
        """What `news` has read so far, thoughts and calls included."""
        self.thought_tokens = 0
        """Those of its tokens that were read in thoughts, with their tags."""

    async def news(self) -> AsyncIterator[New]:
        """Pieces of its text and its thoughts, none empty, and of its calls; and what stands after the text, if that was
        asked for."""
        if self._before:
            yield self._before
        unended = True
        while unended:
            async for piece in self.handle:
                if piece.provisional is not None:
                    pending = (self._parser.held if self._parser else "") + self._cut.held
                    yield [*([pending] if pending else []), *self._written(piece.provisional)]
                elif self._parser is None:
                    for new in self._read(piece.text or ""):
                        yield new
                else:
                    for new in self._tokens(piece.ids):
                        yield new
                over_two = self._ended and self._cut.found is not None  # which the engine has not seen whole
                if (self._parser and self._parser.over) or over_two:
                    self.handle.cancel()  # and it soon ends
            unended, news = await self._after_budget()
            for new in news:
                yield new
        text = self._decoder.flush() if self._parser else ""
        for new in merged(
            [*self._read(text), *self._parsed(self._cut.flush()), *(self._parser.flush() if self._parser else [])]
        ):
            yield new

    def _tokens(self, ids: Sequence[int]) -> list[New]:
        parser, news = self._parser, list[New]()
        assert parser is not None
        for token in ids:
            was_thinking = parser.thinking
            news += self._read(self._decoder.feed([token]) + self.marks.get(token, ""))
            self.thought_tokens += was_thinking or parser.thinking
        return merged(news)

    def _read(self, text: str) -> Sequence[New]:
        return self._parsed(self._cut.feed(text))

    def _parsed(self, text: str) -> Sequence[New]:
        if self._parser is None or not self._parser.over:
            self.text += text
        return self._parser.feed(text) if self._parser else [text] if text else []

    async def _after_budget(self) -> tuple[bool, list[New]]:
        """Whether it goes on after the budget of a thought, and what is new by that."""
        parser, go_on, news = self._parser, self._go_on, list[New]()
        self._go_on = None
        ended = self.handle.finish_reason != "length" or self._cut.found is not None
        if go_on is None or parser is None or ended or parser.over or self._cancelled:
            return False, news
        closes, tokens = parser.thinking, [token for piece in self.handle.pieces for token in piece.ids]

        def submit() -> Rest:
            rest = go_on(self.handle, tokens, closes)
            self._rest = rest.generation
            if self._cancelled:  # nobody may wait for it any more
                self.cancel()
            return rest

        continuation = await in_thread(submit)
        if closes:
            news += [*self._read(self._decoder.flush()), *self._parsed(self._cut.flush()), *self._parsed(self._closing)]
            # Stop strings are searched for in what the model writes, and the rest is a text of its own for that.
            self._cut, self._decoder = StopCut(self._stops), incremental(self.tokenizer)
            self._forced, self.thought_tokens = continuation.forced, self.thought_tokens + continuation.forced
        self._late = continuation.late
        if continuation.generation is not None:
            self._ended.append(self.handle)
            self.handle = continuation.generation
        return continuation.generation is not None, merged(news)

    def cancel(self) -> None:
        """Ends what still runs."""
        self._cancelled = True
        self.handle.cancel(unread=True)
        if self._rest is not None:
            self._rest.cancel(unread=True)

    def _written(self, tokens: list[int | None]) -> Standing:
        standing: Standing = []
        for is_written, run in groupby(tokens, key=lambda token: token is not None):
            group = list(run)
            if not is_written:
                standing += [None] * len(group)
            elif text := self._decoded([token for token in group if token is not None]):
                standing.append(text)
        return standing

    def _decoded(self, ids: list[int]) -> str:
        """The text of `ids` inside a text, where some tokenizers have a space that they leave out at its beginning."""
        if not getattr(self.tokenizer, "skips_first_space", False):
            return str(self.tokenizer.decode(ids))
        before = str(self.tokenizer.decode(ids[:1]))
        return str(self.tokenizer.decode([ids[0], *ids])).removeprefix(before)

    @property
    def tokens(self) -> tuple[int, int]:
        """Its tokens so far, and those of them that were drafted and accepted."""
        pieces = [piece for handle in (*self._ended, self.handle) for piece in handle.pieces]
        return self._forced + sum(len(piece.ids) for piece in pieces), sum(piece.accepted for piece in pieces)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended its text."""
        return self._cut.found

    @property
    def cached(self) -> int:
        """Tokens of its prompt whose K and V were known."""
        return (self._ended or [self.handle])[0].reused

    @property
    def reason(self) -> str:
        """OpenAI's name of why it ended; a time limit has none there."""
        found, parser = self._cut.found is not None, self._parser
        reason = "stop" if found else "timeout" if self._late else self.handle.finish_reason or "stop"
        if parser is None or not (reason == "stop" or parser.over):
            return reason
        if parser.unfinished:
            return "length"  # so that nobody runs half a call
        return "tool_calls" if parser.count else reason


def merged(news: Iterable[New]) -> list[New]:
    """The same with what belongs together in one.

    >>> merged(["a", "b", Thought("c"), "d"])
    ['ab', 'c', 'd']
    """
    joined_news = list[New]()
    for new in news:
        last = joined_news[-1] if joined_news else None
        if isinstance(new, str) and isinstance(last, str) and type(new) is type(last):
            joined_news[-1] = type(new)(last + new)
        elif isinstance(new, CallDelta) and isinstance(last, CallDelta) and (new.name, last.name) == (None, None):
            joined_news[-1] = last._replace(arguments=last.arguments + new.arguments)
        else:
            joined_news.append(new)
    return joined_news
