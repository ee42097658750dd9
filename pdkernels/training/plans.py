"""Plain-text plans: plans, chunks and syncs as tags, parsed, checked and written.

::

    <topic>what it is 2</topic><topic>uses 3</topic>
    <async>A kernel is a function that runs on many cores.</async>
    <async>Kernels compute ...</async>
    <sync/>
    <topic>summary 1</topic>
    <async>In short, ...</async>

A round is a plan, an item ``<topic>TOPIC NUMBER</topic>`` for each chunk, then the chunks in the same order. Rounds are
separated by ``<sync/>``: the text after it may read the text before it, while chunks of one round are written in
parallel without seeing each other. The optional number is the chunk's length in units of tokens. White space is ignored
between tags and kept within chunks.

Annotated data have no plan: a chunk carries its topic and its length in tokens, from which the plan is made::

    <async topic="what it is" tokens="20">A kernel is a function that runs on many cores.</async>

Source: Planned Diffusion, section 4 (control tags, fine-tuning dataset) and appendix A; the plan comes first, as in its
released training code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from pdkernels._validation import check, check_type, integer, message
from pdkernels.models.text.tokenizers import Tokenizer
from pdkernels.training.planned import PlanItem, PlannedSample

__all__ = ["Item", "PlanError", "Round", "as_sample", "format", "parse", "without_syncs", "without_topics"]

_TAG = re.compile(r"(?:<promise>-)?<topic>|</topic>|<async(?P<attributes>\s[^<>]*)?>|</async>|<sync/>")
_ATTRIBUTE = re.compile(r'\s*(topic|tokens)="([^"]*)"\s*')
_PADS = re.compile(r"(?:\s*\[PAD\])+\s*$")
_MAX = 99
_MAX_WORDS = 3  # of a topic


class Item(NamedTuple):
    """A chunk and its item in the plan."""

    topic: str
    content: str
    number: int | None = None
    """Its length in units of tokens, 1 .. 99; None: to be computed."""


Round = tuple[Item, ...]
_Any = TypeVar("_Any", Item, PlanItem)


class PlanError(ValueError):
    """A malformed text; `line` and `column` (from 1) give the place."""

    def __init__(self, expectation: str, actual: str, line: int, column: int) -> None:
        super().__init__(
            message("training.plans.parse", "text", expectation, f"{actual} at line {line}, column {column}")
        )
        self.line, self.column = line, column


class _Piece(NamedTuple):
    """A tag, or the text between two of them."""

    start: int
    text: str
    tag: str
    """Without "<promise>-" and attributes; empty for text."""
    attributes: str = ""


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pieces = [piece for piece in self._split() if piece.tag or piece.text]
        self.next = 0

    def _split(self) -> Iterator[_Piece]:
        end = 0
        for match in _TAG.finditer(self.text):
            yield _Piece(end, self.text[end : match.start()], "")
            attributes = match["attributes"] or ""
            tag = "<async>" if attributes else match[0].removeprefix("<promise>-")
            yield _Piece(match.start(), match[0], tag, attributes)
            end = match.end()
        yield _Piece(end, self.text[end:], "")

    def fail(self, expectation: str, actual: str, start: int) -> NoReturn:
        before = self.text[:start]
        raise PlanError(expectation, actual, before.count("\n") + 1, start - (before.rfind("\n") + 1) + 1)

    def blank(self) -> None:
        """Skips white space between tags; other text is an error."""
        while self.next < len(self.pieces) and not self.pieces[self.next].tag:
            piece = self.pieces[self.next]
            text = piece.text.strip()
            if text:
                start = piece.start + piece.text.index(text)
                self.fail("have all words inside of <async> or <topic>", repr(text[:40]), start)
            self.next += 1

    def peek(self) -> str:
        self.blank()
        return self.pieces[self.next].tag if self.next < len(self.pieces) else "the end of the text"

    def start(self) -> int:
        return self.pieces[self.next].start if self.next < len(self.pieces) else len(self.text)

    @property
    def attributes(self) -> str:
        """Those of the next tag."""
        self.blank()
        return self.pieces[self.next].attributes if self.next < len(self.pieces) else ""

    def element(self, opening: str, closing: str) -> tuple[str, int]:
        """The text between two tags, and where it starts. The first tag is known to come next."""
        opened = self.start()
        self.next += 1
        content, start = "", self.start()
        if self.next < len(self.pieces) and not self.pieces[self.next].tag:
            content = self.pieces[self.next].text
            self.next += 1
        if self.next == len(self.pieces):
            self.fail(f"close every {opening} with {closing}", f"an open {opening}", opened)
        if self.pieces[self.next].tag != closing:
            tag = self.pieces[self.next].tag
            self.fail(f"close {opening} with {closing} before the next tag", tag, self.start())
        self.next += 1
        return content, start


def parse(text: str, *, unit: int = 10) -> tuple[Round, ...]:
    """The rounds of a text with tags.

    Checks balance (each tag is closed), overlap (no tag inside another), coverage (no words outside chunks and plans),
    ranges (numbers from 1 to 99, topics of one to three words), and that each plan has as many items as chunks.

    Args:
        text: in the format at the top of this module. ``<promise>-<topic>``, as the released models spell it, is read
            as ``<topic>``; ``[PAD]`` at the end of a chunk is dropped.
        unit: the tokens that a number stands for, `PlanTokens.unit` of the model. A length in tokens is rounded up to
            whole units.

    Raises:
        PlanError: a text that breaks the rules, with line and column; it is a ValueError.
        TypeError: not a str, or a unit that is not an int.
        ValueError: a unit below 1.

    Source: Planned Diffusion, section 4.2, "fine-tuning dataset", and appendix A. The released check covers only
    balance and nesting.

    Example:
        >>> from pdkernels.training import plans
        >>> plans.parse("<topic>a 1</topic><async>x y</async><sync/><topic>b</topic><async>z</async>")
        ((Item(topic='a', content='x y', number=1),), (Item(topic='b', content='z', number=None),))
        >>> plans.parse('<async topic="a" tokens="15">x y</async>')
        ((Item(topic='a', content='x y', number=2),),)
        >>> plans.parse("<topic>a 1</topic>\\n<async>x</async> y")
        Traceback (most recent call last):
        pdkernels.training.plans.PlanError: pdkernels.training.plans.parse: text must have all words inside of <async>
        or <topic>, got 'y' at line 2, column 18.
    """
    check_type(isinstance(text, str), "training.plans.parse", "text", "be a str", type(text).__name__)
    integer("training.plans.parse", "unit", unit, 1)
    reader, rounds = _Reader(text), []
    while True:
        rounds.append(_annotated(reader, unit) if reader.attributes else _round(reader))
        if reader.peek() != "<sync/>":
            break
        reader.next += 1
    if reader.next < len(reader.pieces):
        tag = reader.peek()
        reader.fail("have <sync/> between two rounds, and every tag opened before it is closed", tag, reader.start())
    return tuple(rounds)


def _round(reader: _Reader) -> Round:
    plan: list[tuple[str, int | None, int]] = []
    while reader.peek() == "<topic>":
        opened = reader.start()
        plan.append((*_item(reader, *reader.element("<topic>", "</topic>")), opened))
    if not plan:
        reader.fail("begin every round with a plan", reader.peek(), reader.start())
    contents: list[str] = []
    while reader.peek() == "<async>":
        opened = reader.start()
        if reader.attributes:
            reader.fail("have attributes in chunks without a plan only", reader.attributes.strip(), opened)
        if len(contents) == len(plan):
            reader.fail("have a <topic> for every chunk", f"chunk {len(plan) + 1} of {len(plan)}", opened)
        contents.append(_PADS.sub("", reader.element("<async>", "</async>")[0]))
    if len(contents) < len(plan):
        topic, _, opened = plan[len(contents)]
        reader.fail("have a chunk for every <topic>", f"none for {topic!r}", opened)
    return tuple(Item(topic, content, number) for (topic, number, _), content in zip(plan, contents, strict=True))


def _annotated(reader: _Reader, unit: int) -> Round:
    """Chunks that carry their item of the plan as attributes."""
    items = []
    while reader.peek() == "<async>":
        opened, attributes = reader.start(), reader.attributes
        start = opened + len("<async")
        fields, end = dict[str, tuple[str, int]](), 0
        while end < len(attributes):
            match = _ATTRIBUTE.match(attributes, end)
            if match is None or match[1] in fields:
                reader.fail('have topic=".." and tokens=".." once in <async>', attributes[end:].strip(), start + end)
            fields[match[1]], end = (match[2], start + match.start(2)), match.end()
        topic, place = fields.get("topic", ("", opened))
        tokens, number = fields.get("tokens"), None
        if tokens is not None:
            most = _MAX * unit
            number = -(-int(tokens[0]) // unit) if re.fullmatch("[0-9]{1,9}", tokens[0]) else 0
            if not 1 <= number <= _MAX:
                reader.fail(f"have tokens from 1 to {most}", repr(tokens[0]), tokens[1])
        content = _PADS.sub("", reader.element("<async>", "</async>")[0])
        items.append(Item(_topic(reader, topic, place), content, number))
    return tuple(items)


def _topic(reader: _Reader, text: str, start: int) -> str:
    topic = text.strip()
    if not topic:
        reader.fail("name a topic in every item", "none", start)
    if len(topic.split()) > _MAX_WORDS:
        reader.fail(f"have topics of at most {_MAX_WORDS} words", repr(topic), start + text.index(topic))
    return topic


def _item(reader: _Reader, text: str, start: int) -> tuple[str, int | None]:
    fields = text.rsplit(maxsplit=1)
    number = None
    if fields and fields[-1].isascii() and fields[-1].isdigit():
        number = int(fields[-1][:9])
        if not 1 <= number <= _MAX:
            reader.fail(f"have numbers from 1 to {_MAX}", fields[-1], start + text.rindex(fields[-1]))
        text = fields[0] if len(fields) == 2 else ""
    return _topic(reader, text, start), number


def format(rounds: Iterable[Sequence[Item]]) -> str:
    """The text of rounds, which `parse` reads back: a line for the plan, one per chunk, one for a sync.

    Args:
        rounds: items without tags in their texts.

    Raises:
        ValueError: no rounds, a round without items, an empty topic, one of more than three words, one with a tag or a
            line feed, or, where no number follows it, one that ends with a number; a content with a tag, or with ``[PAD]`` at its end; a number
            outside 1 .. 99.
        TypeError: something that is not an `Item`.

    Example:
        >>> from pdkernels.training import plans
        >>> text = plans.format([[plans.Item("numbers", "one two", 1)], [plans.Item("more", "three")]])
        >>> print(text)
        <topic>numbers 1</topic>
        <async>one two</async>
        <sync/>
        <topic>more</topic>
        <async>three</async>
        >>> plans.format(plans.parse(text)) == text
        True
    """
    op = "training.plans.format"
    sections = []
    for items in rounds:
        check(len(items) > 0, op, "rounds", "hold items", "an empty round")
        for item in items:
            check_type(isinstance(item, Item), op, "rounds", "hold Items", type(item).__name__)
            topic, content, number = item
            check(bool(topic) and topic == topic.strip() and "\n" not in topic, op, "topic", "be words", repr(topic))
            check(not _TAG.search(topic + "\n" + content), op, "topic and content", "hold no tags", repr(item))
            check(not _PADS.search(content), op, "content", "not end with [PAD]", repr(content))
            check(len(topic.split()) <= _MAX_WORDS, op, "topic", f"have at most {_MAX_WORDS} words", repr(topic))
            last = topic.split()[-1]
            clear = number is not None or not (last.isascii() and last.isdigit())
            check(clear, op, "topic", "not end with a number where none follows it", repr(topic))
            check(number is None or 1 <= number <= _MAX, op, "number", f"lie in 1 .. {_MAX}", number)
        plan = "".join(f"<topic>{topic}{'' if n is None else f' {n}'}</topic>" for topic, _, n in items)
        sections.append("\n".join([plan, *(f"<async>{item.content}</async>" for item in items)]))
    check(bool(sections), op, "rounds", "not be empty", "none")
    return "\n<sync/>\n".join(sections)


def as_sample(
    prompt: str, rounds: Iterable[Sequence[Item]], tokenizer: Tokenizer, *, separator: str = " ", numbers: bool = False
) -> PlannedSample:
    """Ids of a prompt and of rounds, for `lay_out`.

    Args:
        prompt: encoded unchanged; the caller applies the chat template, if any.
        rounds: from `parse`.
        tokenizer: of the model. It never sees the tags, which have their own ids.
        separator: between topic and number.
        numbers: keep the numbers of items, as the released code does, instead of counting tokens. Chunks are then not
            padded.

    Example:
        >>> from pdkernels.models import ByteTokenizer
        >>> from pdkernels.training import plans
        >>> plans.as_sample("?", plans.parse("<topic>a 7</topic><async>bc</async>"), ByteTokenizer())
        PlannedSample(prompt=[63], rounds=[[PlanItem(topic=[97, 32], content=[98, 99], number=None)]], tail=())
    """
    encode = tokenizer.encode
    return PlannedSample(
        encode(prompt),
        [
            [
                PlanItem(encode(topic + separator), encode(content), number if numbers else None)
                for topic, content, number in items
            ]
            for items in rounds
        ],
    )


def without_topics(rounds: Iterable[Sequence[_Any]], topic: Any = "topic") -> tuple[tuple[_Any, ...], ...]:
    """Replaces the topic, text or ids, of all items of rounds by the same one: an ablation.

    Source: Planned Diffusion, section 5.

    >>> without_topics([[Item("a", "x", 1), Item("b", "y")]])
    ((Item(topic='topic', content='x', number=1), Item(topic='topic', content='y', number=None)),)
    """
    return tuple(tuple(item._replace(topic=topic) for item in items) for items in rounds)


def without_syncs(rounds: Iterable[Sequence[_Any]]) -> tuple[tuple[_Any, ...], ...]:
    """All items in one round, so that no chunk sees another's clean text: an ablation.

    A decoder that continues until the end token writes all plans before all chunks. The released training data instead
    keep the chunks of each round after its plan, and only delete the sync: a layout that its decoder never produces.

    Source: Planned Diffusion, section 5.

    >>> without_syncs([[Item("a", "x")], [Item("b", "y")]])
    ((Item(topic='a', content='x', number=None), Item(topic='b', content='y', number=None)),)
    """
    return (tuple(item for items in rounds for item in items),)
