"""Regular languages as expressions, and the automata over the bytes of their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from pdkernels import _host
from pdkernels._validation import check_text, refuse, sentence
from pdkernels.grammar.budget import OP as OP
from pdkernels.grammar.budget import WORK_PER_STEP, current, spend

MAX_STATES = 150_000
"""Of the nondeterministic automaton: what an expression unfolds to."""
MAX_DETERMINISTIC = 32_768
_MAX_OF_TEXTS = 65_536
"""Of the automaton of a list of texts: 64 MiB."""
_MANY = 16
"""Texts that have an automaton of their own, as in host_expression.h."""
_MAX_WORK = 20_000_000
TOO_LARGE = "Shorten its repetitions, or set longest for those of a schema."

Ranges = tuple[tuple[int, int], ...]
"""Of code points, ascending, both ends included."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


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
    """The texts that an automaton accepts."""

    automaton: _host.ByteAutomaton


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
    return Seq(tuple(map(_character, characters)))


@lru_cache(maxsize=4096)
def _character(character: str) -> Chars:
    return Chars(((ord(character), ord(character)),))


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


def check_unfolded(expression: Expression, source: str) -> None:
    """Checks how many states an expression, which errors call `source`, unfolds to."""
    with _limited(source) as work:
        _host.ByteAutomaton.unfolded(expression, MAX_STATES, _MAX_OF_TEXTS, work)


@contextmanager
def _limited(source: str) -> Iterator[int]:
    """The steps that compiled code may take for `source`, and what it means if they, or states, are too few."""
    work = min(_MAX_WORK, current().work)
    try:
        yield work
    except _host.TooLarge as error:
        bound, _, steps = str(error).partition(" ")
        spend(int(steps or 0) // WORK_PER_STEP + 1)
        refuse(bound == "levels", OP, f"{source} has too many levels inside each other")
        check_size(bound == "unfolded", f"{source} unfolds to more than {MAX_STATES} states")
        check_size(bound == "texts", f"the automaton of {source} has more than {_MAX_OF_TEXTS} states")
        raise TooLarge(sentence(OP, f"the automaton of {source} is too large", TOO_LARGE)) from None


def compiled(expression: Expression, source: str) -> _host.ByteAutomaton:
    """The automaton of an expression, which errors call `source`.

    >>> compiled(Repeat(text("ab"), 1, 2), "it").accepts(b"abab")
    True
    """
    automaton = determinised(expression, source)
    refuse(automaton.states == 0, OP, f"no text satisfies {source}")
    return automaton


def one_of(texts: tuple[str, ...], source: str) -> Expression:
    """One of some texts: of many their smallest automaton, which is made once in a compile."""
    if len(texts) < _MANY:
        return Alt(tuple(map(text, texts)))
    memo, key = current().memo, ("texts", texts)
    if key not in memo:
        with _limited(source):
            automaton = _host.ByteAutomaton.of_texts([characters.encode() for characters in texts], _MAX_OF_TEXTS)
        spend(sum(map(len, texts)) // WORK_PER_STEP + automaton.states)
        memo[key] = Machine(automaton)
    expression: Expression = memo[key]
    return expression


def determinised(expression: Expression, source: str) -> _host.ByteAutomaton:
    """The automaton of an expression; without states if no text satisfies it."""
    with _limited(source) as work:
        automaton = _host.ByteAutomaton.of(expression, MAX_STATES, _MAX_OF_TEXTS, MAX_DETERMINISTIC, work)
    spend(automaton.work // WORK_PER_STEP + automaton.states)
    return automaton


def product(first: _host.ByteAutomaton, second: _host.ByteAutomaton, source: str, *, intersect: bool) -> Expression:
    """The texts of the first automaton that the second one has, or has not."""
    check_without_calls(first, source)
    check_without_calls(second, source)
    with _limited(source) as work:
        automaton = first.product(second, intersect, MAX_DETERMINISTIC, work)
    spend(automaton.work // WORK_PER_STEP + automaton.states)
    return Machine(automaton) if automaton.states else NOTHING


CALL = 0xFE
"""The first byte of a call (`calls.py`)."""


def check_without_calls(automaton: _host.ByteAutomaton, source: str) -> None:
    """Refuses calls where texts are compared: an automaton does not know those of a call."""
    if current().memo.get(CALL) and any(last >= CALL for line in automaton.runs for _, last, _ in line):
        fault = f"{source} compares the texts of a recursive reference with others, which depth=None does not follow"
        raise NotImplementedError(sentence(OP, fault, "Pass a depth."))


def machine(states: int, edges: Sequence[tuple[int, int, int, int]], accepting: Iterable[int]) -> Machine:
    """The texts of a deterministic automaton, whose first state is 0, by its edges: from, first byte, last byte, to."""
    ends = [(state, states) for state in accepting]
    return Machine(_host.ByteAutomaton(states + 1, edges, ends, 0, states, states + 1, _MAX_WORK))


def sequence(*items: Expression | str) -> Expression:
    """A `Seq` of expressions and strings."""
    return Seq(tuple(text(item) if isinstance(item, str) else item for item in items))


def either(branches: Sequence[Expression]) -> Expression:
    return branches[0] if len(branches) == 1 else Alt(tuple(branches))
