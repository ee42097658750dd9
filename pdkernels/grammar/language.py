"""Regular languages as expressions, and the automata over the bytes of their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from pdkernels import _host
from pdkernels._validation import check_text, refuse, sentence
from pdkernels.grammar.budget import OP as OP
from pdkernels.grammar.budget import WORK_PER_STEP, current, spend

MAX_STATES = 100_000
"""Of the nondeterministic automaton: what an expression unfolds to."""
MAX_DETERMINISTIC = 20_000
_MAX_OF_TEXTS = 65_536
"""Of the automaton of a list of texts: 64 MiB."""
_MANY = 16
"""So many alternatives that are texts have an automaton of their own."""
_MAX_WORK = 20_000_000
TOO_LARGE = "Shorten its repetitions, or set longest for those of a schema."

Ranges = tuple[tuple[int, int], ...]
"""Of code points, ascending, both ends included."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_LENGTHS = (0x7F, 0x7FF, 0xFFFF, _LAST)  # the last code points of one byte, two, ..


class TooLarge(ValueError):
    """An expression or an automaton has more states than it may have."""


def check_size(large: bool, fault: str) -> None:
    if large:
        raise TooLarge(sentence(OP, fault, TOO_LARGE))


class Chars(NamedTuple):
    """One of these characters."""

    ranges: Ranges


class Seq(NamedTuple):
    """One after the other."""

    items: tuple[Expression, ...]


class Alt(NamedTuple):
    """One of these; without items: nothing matches."""

    items: tuple[Expression, ...]


class Repeat(NamedTuple):
    """`item`, from `minimum` to `maximum` times; None: any number."""

    item: Expression
    minimum: int
    maximum: int | None


class Subsequence(NamedTuple):
    """Some of several items in their order, those that are marked among them, from `minimum` to `maximum` in all, with
    `separator` between two. Any number of `others` may follow, all of which the maximum counts, and one of which the
    minimum does: they may be the same."""

    items: tuple[tuple[bool, Expression], ...]
    separator: Expression
    minimum: int
    maximum: int | None
    others: Expression | None = None


class Machine(NamedTuple):
    """The texts that a deterministic automaton over bytes accepts; its first state is 0."""

    states: int
    edges: tuple[tuple[int, int, int, int], ...]
    """From, first byte, last byte, to."""
    accepting: tuple[int, ...]


Expression: TypeAlias = Chars | Seq | Alt | Repeat | Subsequence | Machine

EMPTY = Seq(())
NOTHING = Alt(())


def is_nothing(expression: Expression) -> bool:
    """Whether an expression is written as `NOTHING`, which as a tuple equals `EMPTY`."""
    return isinstance(expression, Alt) and not expression.items


def may_be_empty(expression: Expression) -> bool:
    """Whether the empty text is among the texts of a pattern."""
    if isinstance(expression, Seq):
        return all(map(may_be_empty, expression.items))
    if isinstance(expression, Alt):
        return any(map(may_be_empty, expression.items))
    return isinstance(expression, Repeat) and (expression.minimum == 0 or may_be_empty(expression.item))


def text(characters: str) -> Expression:
    """These characters."""
    check_text(OP, characters, "a text")
    return Seq(tuple(Chars(((ord(character), ord(character)),)) for character in characters))


def written_text(expression: Expression) -> bytes | None:
    """The one text that an expression is written as, character by character.

    >>> written_text(text("hé")), written_text(Repeat(text("h"), 1, 1))
    (b'h\\xc3\\xa9', None)
    """
    characters = expression.items if isinstance(expression, Seq) else (expression,)
    codes = []
    for character in characters:
        if not isinstance(character, Chars) or len(character.ranges) != 1:
            return None
        (first, last), *_ = character.ranges
        if first != last:
            return None
        codes.append(first)
    return "".join(map(chr, codes)).encode("utf-8", "surrogatepass")


def automaton_of(texts: Sequence[bytes], source: str) -> _host.ByteAutomaton:
    """The smallest automaton of some texts, which errors call `source`."""
    try:
        automaton = _host.ByteAutomaton.of_texts(texts, _MAX_OF_TEXTS)
    except _host.TooLarge:
        fault = f"the automaton of {source} has more than {_MAX_OF_TEXTS} states"
        raise TooLarge(sentence(OP, fault, TOO_LARGE)) from None
    spend(automaton.work // WORK_PER_STEP + automaton.states)
    return automaton


def optional(expression: Expression) -> Expression:
    return Repeat(expression, 0, 1)


def separated(item: Expression, separator: Expression, minimum: int, maximum: int | None) -> Expression:
    """`item`, from `minimum` to `maximum` times, with `separator` between two."""
    if maximum is not None and maximum < minimum:
        return NOTHING
    if maximum == 0:
        return EMPTY
    later_items = Repeat(Seq((separator, item)), max(0, minimum - 1), None if maximum is None else maximum - 1)
    items = Seq((item, later_items))
    return optional(items) if minimum == 0 else items


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending ranges that do not touch.

    >>> normal([(5, 9), (1, 4), (20, 20)])
    ((1, 9), (20, 20))
    """
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        elif first <= last:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All other characters; surrogates are none.

    >>> complement(((0, 0x10FFFE),))
    ((1114111, 1114111),)
    """
    gaps, start = [], 0
    for first, last in normal([*ranges, _SURROGATES]):
        gaps.append((start, first - 1))
        start = last + 1
    return normal([*gaps, (start, _LAST)])


@lru_cache(maxsize=1024)
def utf8(ranges: Ranges) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The bytes of characters: sequences of ranges of bytes.

    >>> utf8(((0x41, 0xFF),))
    (((65, 127),), ((194, 195), (128, 191)))
    """
    sequences: list[tuple[tuple[int, int], ...]] = []
    for first, last in ranges:
        for start, end in zip((0, *(at + 1 for at in _LENGTHS)), _LENGTHS):
            low, high = max(first, start), min(last, end)
            if low <= high:
                _split(low, high, sequences)
    return tuple(sequences)


def _split(first: int, last: int, sequences: list[tuple[tuple[int, int], ...]]) -> None:
    """Characters of the same number of bytes, as ranges whose bytes vary independently."""
    length = len(chr(first).encode("utf-8", "surrogatepass"))
    for free in range(1, length):  # continuation bytes at the end
        unit = 1 << 6 * free
        if first // unit != last // unit:
            if first % unit:
                middle = (first // unit + 1) * unit
            elif (last + 1) % unit:
                middle = (last + 1) // unit * unit
            else:
                continue
            _split(first, middle - 1, sequences)
            _split(middle, last, sequences)
            return
    low, high = (chr(at).encode("utf-8", "surrogatepass") for at in (first, last))
    sequences.append(tuple(zip(low, high)))


class _Builder:
    """The nondeterministic automaton of an expression, built from its end.

    Parts that are equal and followed by the same state are one part of the automaton. So an expression may share its
    parts, and endings are shared.
    """

    def __init__(self, source: str) -> None:
        self.states, self._words = 0, source
        self.edges: list[tuple[int, int, int, int]] = []
        self.empty: list[tuple[int, int]] = []
        self._starts: dict[tuple[int | Chars, int], int] = {}
        self._before: dict[tuple[int, ...], int] = {}
        self._tails: dict[tuple[tuple[tuple[int, int], ...], int], int] = {}
        self._kept: list[Expression] = []  # parts of `_starts` that nothing else holds

    def state(self) -> int:
        self.states += 1
        check_size(self.states > MAX_STATES, f"{self._words} unfolds to more than {MAX_STATES} states")
        return self.states - 1

    def either(self, *ways: int) -> int:
        """The state that goes on as these do."""
        different = tuple(dict.fromkeys(ways))
        if len(different) == 1:
            return ways[0]
        if different not in self._before:
            start = self._before[different] = self.state()
            self.empty += [(start, way) for way in different]
        return self._before[different]

    def add(self, expression: Expression, end: int) -> int:
        """The state from which `expression` leads to `end`. Nothing may leave it besides."""
        key = expression if isinstance(expression, Chars) else id(expression), end
        if key in self._starts:
            return self._starts[key]
        spend()
        if isinstance(expression, Chars):
            start, lines = self.state(), utf8(expression.ranges)
            spend(len(lines))
            for (first, last), *later_bytes in lines:
                self.edges.append((start, first, last, self._tail(tuple(later_bytes), end)))
        elif isinstance(expression, Seq):
            start = end
            for item in reversed(expression.items):
                start = self.add(item, start)
        elif isinstance(expression, Alt):
            start = self.either(*(self.add(item, end) for item in self._with_texts_joined(expression.items)))
        elif isinstance(expression, Repeat):
            start = self._repeated(expression, end)
        elif isinstance(expression, Subsequence):
            start = self._subsequence(expression, end)
        else:
            start = self.states
            for _ in range(expression.states):
                self.state()
            spend(len(expression.edges) // 8)
            self.edges += [(start + from_, first, last, start + to) for from_, first, last, to in expression.edges]
            self.empty += [(start + state, end) for state in expression.accepting]
        self._starts[key] = start
        return start

    def _with_texts_joined(self, items: tuple[Expression, ...]) -> tuple[Expression, ...]:
        """Alternatives, with the smallest automaton of those that are texts in their place, if they are many."""
        texts = {n: written for n, item in enumerate(items) if (written := written_text(item)) is not None}
        if len(texts) < _MANY:
            return items
        automaton = automaton_of(list(texts.values()), self._words)
        edges = [(state, *run) for state, runs in enumerate(automaton.runs) for run in runs]
        accepting = tuple(state for state, ends in enumerate(automaton.accepting) if ends)
        joined = Machine(automaton.states, tuple(edges), accepting)
        self._kept.append(joined)
        return joined, *(item for n, item in enumerate(items) if n not in texts)

    def _tail(self, line: tuple[tuple[int, int], ...], end: int) -> int:
        """The state from which the last bytes of a character lead to `end`."""
        if not line:
            return end
        if (line, end) not in self._tails:
            here = self._tails[line, end] = self.state()
            self.edges.append((here, *line[0], self._tail(line[1:], end)))
        return self._tails[line, end]

    def _repeated(self, repeat: Repeat, end: int) -> int:
        if repeat.maximum is None:
            here = self.state()
            self.empty += [(here, end), (here, self.add(repeat.item, here))]
        else:
            here = end
            for _ in range(repeat.maximum - repeat.minimum):
                here = self.either(end, self.add(repeat.item, here))
        for _ in range(repeat.minimum):
            before = self.add(repeat.item, here)
            if before == here:  # nothing, as often as one likes
                break
            here = before
        return here

    def _subsequence(self, subsequence: Subsequence, end: int) -> int:
        """A state before each part for each number of parts so far, as far as it matters."""
        top = max(1, subsequence.minimum) if subsequence.maximum is None else subsequence.maximum
        needed = sum(must for must, _ in subsequence.items)
        after = self._others(subsequence, top, end)
        for at in reversed(range(len(subsequence.items))):
            must, item = subsequence.items[at]
            needed -= must
            here = {}
            for count in range(min(top, needed), min(top, at) + 1):
                ways = [] if must or count not in after else [after[count]]
                included = after.get(count + 1 if subsequence.maximum is not None else min(top, count + 1))
                if included is not None:
                    included = self.add(item, included)
                    ways.append(self.add(subsequence.separator, included) if count else included)
                if ways:
                    here[count] = self.either(*ways)
            after = here
        return after[0] if 0 in after else self.state()

    def _others(self, subsequence: Subsequence, top: int, end: int) -> dict[int, int]:
        """The states after all items, for each number of them."""
        counts, other_item = range(subsequence.minimum, top + 1), subsequence.others
        if other_item is None:
            return {count: end for count in counts}
        item = Seq((subsequence.separator, other_item))
        self._kept.append(item)
        if subsequence.maximum is None:
            loop = self._repeated(Repeat(item, 0, None), end)
            after = {count: loop for count in counts if count}
            before = self.add(item if subsequence.minimum > 1 else other_item, loop)
            return after | (
                {0: self.either(end, before)} if subsequence.minimum == 0 else {subsequence.minimum - 1: before}
            )
        after, here = {top: end}, end
        for count in reversed(range(subsequence.minimum, top)):
            before = self.add(item if count else other_item, here)
            here = after[count] = self.either(end, before)
        if subsequence.minimum > 0:
            after[subsequence.minimum - 1] = self.add(item if subsequence.minimum > 1 else other_item, here)
        return after


def unfolded(expression: Expression, source: str) -> tuple[_Builder, int, int]:
    """The nondeterministic automaton of an expression, its start and its end.

    Raises:
        ValueError: it has too many states.
    """
    builder = _Builder(source)
    end = builder.state()
    try:
        return builder, builder.add(expression, end), end
    except RecursionError:
        raise ValueError(sentence(OP, f"{source} has too many levels inside each other")) from None


def compiled(expression: Expression, source: str) -> _host.ByteAutomaton:
    """The automaton of an expression, which errors call `source`.

    >>> compiled(Repeat(text("ab"), 1, 2), "it").accepts(b"abab")
    True
    """
    automaton = determinised(expression, source)
    refuse(automaton.states == 0, OP, f"no text satisfies {source}")
    return automaton


def determinised(expression: Expression, source: str) -> _host.ByteAutomaton:
    """The automaton of an expression; without states if no text satisfies it."""
    texts = [written_text(item) for item in expression.items] if isinstance(expression, Alt) else []
    written = [each for each in texts if each is not None]
    if len(written) == len(texts) >= _MANY:
        return automaton_of(written, source)
    builder, start, end = unfolded(expression, source)
    work = min(_MAX_WORK, current().work)
    try:
        automaton = _host.ByteAutomaton(
            builder.states, builder.edges, builder.empty, start, end, MAX_DETERMINISTIC, work
        )
    except _host.TooLarge:
        spend(0 if work == _MAX_WORK else work // WORK_PER_STEP + 1)
        raise TooLarge(sentence(OP, f"the automaton of {source} is too large", TOO_LARGE)) from None
    spend(automaton.work // WORK_PER_STEP + automaton.states)
    return automaton


def sequence(*items: Expression | str) -> Expression:
    """A `Seq` of expressions and strings."""
    return Seq(tuple(text(item) if isinstance(item, str) else item for item in items))


def either(branches: Sequence[Expression]) -> Expression:
    return branches[0] if len(branches) == 1 else Alt(tuple(branches))
