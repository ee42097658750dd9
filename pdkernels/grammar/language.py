"""Regular languages as expressions, and the automata over the bytes of their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from pdkernels import _host
from pdkernels._validation import check_text, refuse, sentence
from pdkernels.grammar.budget import OP as OP
from pdkernels.grammar.budget import WORK_PER_STEP, current, spend

MAX_STATES = 100_000
"""Of the nondeterministic automaton: what an expression unfolds to."""
_MAX_DETERMINISTIC = 20_000
_MAX_WORK = 20_000_000
_MAX_EDGES = 400_000
TOO_LARGE = "Shorten its repetitions, or set longest for those of a schema."

Ranges = tuple[tuple[int, int], ...]
"""Of code points, ascending, both ends included."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_LENGTHS = (0x7F, 0x7FF, 0xFFFF, _LAST)  # the last code points of one byte, two, ..


class Chars(NamedTuple):
    """One of these characters."""

    ranges: Ranges


class Seq(NamedTuple):
    """One after the other."""

    parts: tuple[Expression, ...]


class Alt(NamedTuple):
    """One of these; without parts: nothing matches."""

    parts: tuple[Expression, ...]


class Repeat(NamedTuple):
    """From `least` to `most` times; None: any number."""

    part: Expression
    least: int
    most: int | None


class Subsequence(NamedTuple):
    """Some of several parts in their order, those that are marked among them, from `least` to `most` in all; `by` between two."""

    parts: tuple[tuple[bool, Expression], ...]
    by: Expression
    least: int
    most: int | None


class Machine(NamedTuple):
    """The texts that a deterministic automaton over bytes accepts; its first state is 0."""

    states: int
    edges: tuple[tuple[int, int, int, int], ...]
    """From, first byte, last byte, to."""
    accepting: tuple[int, ...]


Expression: TypeAlias = Chars | Seq | Alt | Repeat | Subsequence | Machine

EMPTY = Seq(())
NOTHING = Alt(())


def is_nothing(part: Expression) -> bool:
    """Whether it is written as `NOTHING`, which as a tuple equals `EMPTY`."""
    return isinstance(part, Alt) and not part.parts


def text(characters: str) -> Expression:
    """These characters."""
    check_text(OP, characters, "a text")
    return Seq(tuple(Chars(((ord(one), ord(one)),)) for one in characters))


def optional(part: Expression) -> Expression:
    return Repeat(part, 0, 1)


def separated(part: Expression, by: Expression, least: int, most: int | None) -> Expression:
    """`part`, from `least` to `most` times, with `by` between two."""
    if most is not None and most < least:
        return NOTHING
    if most == 0:
        return EMPTY
    more = Repeat(Seq((by, part)), max(0, least - 1), None if most is None else most - 1)
    whole = Seq((part, more))
    return optional(whole) if least == 0 else whole


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ascending ranges that do not touch.

    >>> normal([(5, 9), (1, 4), (20, 20)])
    ((1, 9), (20, 20))
    """
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        elif first <= last:
            found.append((first, last))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """All other characters; surrogates are none.

    >>> complement(((0, 0x10FFFE),))
    ((1114111, 1114111),)
    """
    rest, start = [], 0
    for first, last in normal([*ranges, _SURROGATES]):
        rest.append((start, first - 1))
        start = last + 1
    return normal([*rest, (start, _LAST)])


@lru_cache(maxsize=1024)
def utf8(ranges: Ranges) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The bytes of characters: sequences of ranges of bytes.

    >>> utf8(((0x41, 0xFF),))
    (((65, 127),), ((194, 195), (128, 191)))
    """
    found: list[tuple[tuple[int, int], ...]] = []
    for first, last in ranges:
        for start, end in zip((0, *(at + 1 for at in _LENGTHS)), _LENGTHS):
            low, high = max(first, start), min(last, end)
            if low <= high:
                _split(low, high, found)
    return tuple(found)


def _split(first: int, last: int, found: list[tuple[tuple[int, int], ...]]) -> None:
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
            _split(first, middle - 1, found)
            _split(middle, last, found)
            return
    low, high = (chr(at).encode("utf-8", "surrogatepass") for at in (first, last))
    found.append(tuple(zip(low, high)))


class _Builder:
    """The nondeterministic automaton of an expression, built from its end.

    Parts that are equal and followed by the same state are one part of the automaton. So an expression may share its parts, and endings are shared.
    """

    def __init__(self, words: str) -> None:
        self.states, self._words = 0, words
        self.edges: list[tuple[int, int, int, int]] = []
        self.empty: list[tuple[int, int]] = []
        self._starts: dict[tuple[int | Chars, int], int] = {}
        self._before: dict[tuple[int, ...], int] = {}

    def state(self) -> int:
        self.states += 1
        refuse(self.states > MAX_STATES, OP, f"{self._words} unfolds to more than {MAX_STATES} states", TOO_LARGE)
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

    def add(self, part: Expression, end: int) -> int:
        """The state from which `part` leads to `end`. Nothing may leave it besides."""
        key = part if isinstance(part, Chars) else id(part), end
        if key in self._starts:
            return self._starts[key]
        spend()
        if isinstance(part, Chars):
            start, lines = self.state(), utf8(part.ranges)
            spend(len(lines))
            for line in lines:
                here = start
                for number, (first, last) in enumerate(line):
                    to = end if number == len(line) - 1 else self.state()
                    self.edges.append((here, first, last, to))
                    here = to
        elif isinstance(part, Seq):
            start = end
            for one in reversed(part.parts):
                start = self.add(one, start)
        elif isinstance(part, Alt):
            start = self.either(*(self.add(one, end) for one in part.parts))
        elif isinstance(part, Repeat):
            start = self._repeated(part, end)
        elif isinstance(part, Subsequence):
            start = self._subsequence(part, end)
        else:
            start = self.states
            for _ in range(part.states):
                self.state()
            spend(len(part.edges) // 8)
            self.edges += [(start + from_, first, last, start + to) for from_, first, last, to in part.edges]
            self.empty += [(start + state, end) for state in part.accepting]
        self._starts[key] = start
        return start

    def _repeated(self, part: Repeat, end: int) -> int:
        if part.most is None:
            here = self.state()
            self.empty += [(here, end), (here, self.add(part.part, here))]
        else:
            here = end
            for _ in range(part.most - part.least):
                here = self.either(end, self.add(part.part, here))
        for _ in range(part.least):
            before = self.add(part.part, here)
            if before == here:  # nothing, as often as one likes
                break
            here = before
        return here

    def _subsequence(self, part: Subsequence, end: int) -> int:
        """A state before each part for each number of parts so far, as far as it matters."""
        top = max(1, part.least) if part.most is None else part.most
        needed = sum(must for must, _ in part.parts)
        after = {count: end for count in range(part.least, top + 1)}
        for at in reversed(range(len(part.parts))):
            must, one = part.parts[at]
            needed -= must
            here = {}
            for count in range(min(top, needed), min(top, at) + 1):
                ways = [] if must or count not in after else [after[count]]
                taken = after.get(count + 1 if part.most is not None else min(top, count + 1))
                if taken is not None:
                    taken = self.add(one, taken)
                    ways.append(self.add(part.by, taken) if count else taken)
                if ways:
                    here[count] = self.either(*ways)
            after = here
        return after[0] if 0 in after else self.state()


def unfolded(part: Expression, words: str) -> tuple[_Builder, int, int]:
    """The nondeterministic automaton of an expression, its start and its end.

    Raises:
        ValueError: it has too many states.
    """
    builder = _Builder(words)
    end = builder.state()
    try:
        return builder, builder.add(part, end), end
    except RecursionError:
        raise ValueError(sentence(OP, f"{words} has too many levels inside each other")) from None


def compiled(part: Expression, words: str) -> _host.ByteAutomaton:
    """The automaton of an expression, which errors call `words`.

    >>> compiled(Repeat(text("ab"), 1, 2), "it").accepts(b"abab")
    True
    """
    made = _determinised(part, words)
    refuse(made.states == 0, OP, f"no text satisfies {words}")
    return made


def _determinised(part: Expression, words: str) -> _host.ByteAutomaton:
    """The same; without states if no text satisfies it."""
    builder, start, end = unfolded(part, words)
    work = min(_MAX_WORK, current().work)
    try:
        made = _host.ByteAutomaton(builder.states, builder.edges, builder.empty, start, end, _MAX_DETERMINISTIC, work)
    except _host.TooLarge:
        spend(0 if work == _MAX_WORK else work // WORK_PER_STEP + 1)
        raise ValueError(sentence(OP, f"the automaton of {words} is too large", TOO_LARGE)) from None
    spend(made.work // WORK_PER_STEP + made.states)
    return made


def both(one: Expression, other: Expression, words: str) -> Expression:
    """The texts of two expressions at once, by the product of their automata.

    >>> vowel, short = Repeat(Chars(((97, 97), (101, 101))), 0, None), Repeat(Chars(((97, 122),)), 2, 3)
    >>> made = compiled(both(vowel, short, "it"), "it")
    >>> made.accepts(b"aea"), made.accepts(b"aeae"), made.accepts(b"ab")
    (True, False, False)
    """
    return _product(one, other, words, True)


def without(one: Expression, other: Expression, words: str) -> Expression:
    """The texts of an expression that are none of the other.

    >>> made = compiled(without(Repeat(Chars(((97, 98),)), 1, 2), text("ab"), "it"), "it")
    >>> made.accepts(b"ab"), made.accepts(b"a"), made.accepts(b"bb")
    (False, True, True)
    """
    return _product(one, other, words, False)


def _product(one: Expression, other: Expression, words: str, wanted: bool) -> Expression:
    """The texts of `one` that the other has, or has not."""
    first, second = _determinised(one, words), _determinised(other, words)
    if first.states == 0 or second.states == 0:
        return NOTHING if wanted or first.states == 0 else one
    lines, others = first.runs, [*second.runs, []]  # state -1 has none
    ends, other_ends = first.accepting, second.accepting
    start = (0, 0)
    number, queue, edges = {start: 0}, [start], list[tuple[int, int, int, int]]()
    for here in queue:
        before = len(edges)
        for low, high, to, beside in _joined(lines[here[0]], others[here[1]]):
            if wanted and beside < 0:
                continue
            pair = (to, beside)
            if pair not in number:
                number[pair] = len(queue)
                queue.append(pair)
            edges.append((number[here], low, high, number[pair]))
        spend(1 + len(edges) - before)
        large = len(queue) > _MAX_DETERMINISTIC or len(edges) > _MAX_EDGES
        refuse(large, OP, f"the automaton of {words} is too large", TOO_LARGE)
    fits = [n for n, (a, b) in enumerate(queue) if ends[a] and (b >= 0 and other_ends[b]) == wanted]
    return Machine(len(queue), tuple(edges), tuple(fits)) if fits else NOTHING


def _joined(
    runs: list[tuple[int, int, int]], others: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """The ranges of `runs`, parted by those of `others`, and where both lead; -1: the second nowhere."""
    at = 0
    for low, high, to in runs:
        while at < len(others) and others[at][1] < low:
            at += 1
        next_ = at
        while low <= high:
            if next_ == len(others) or others[next_][0] > high:
                yield low, high, to, -1
                break
            first, last, beside = others[next_]
            if low < first:
                yield low, first - 1, to, -1
                low = first
            yield low, min(high, last), to, beside
            low, next_ = min(high, last) + 1, next_ + 1


def sequence(*parts: Expression | str) -> Expression:
    """A `Seq` of expressions and strings."""
    return Seq(tuple(text(part) if isinstance(part, str) else part for part in parts))


def either(parts: Sequence[Expression]) -> Expression:
    return parts[0] if len(parts) == 1 else Alt(tuple(parts))
