"""Expressions as deterministic automata, so that what holds them several times is small."""

from __future__ import annotations

from functools import cache
from itertools import groupby

from pdkernels.grammar.language import Expression, Machine, compiled, is_nothing, machine

Edges = tuple[tuple[int, int, int], ...]
"""Of a state: first byte, last byte, to."""


def deterministic(expression: Expression, source: str) -> Machine:
    """The automaton of an expression, which errors call `source`."""
    return Machine(compiled(expression, source))


def smallest(expression: Expression, source: str) -> Expression:
    """The automaton with the fewest states of an expression whose texts are bounded: states with the same continuations
    are one."""
    if is_nothing(expression):
        return expression
    automaton = compiled(expression, source)
    table, accepting = automaton.table, automaton.accepting
    numbers: dict[tuple[bool, Edges], int] = {}

    @cache
    def number(state: int) -> int:
        edges = _edges([to if to < 0 else number(to) for to in table[state]])
        return numbers.setdefault((accepting[state], edges), len(numbers))

    last = number(0)
    edges = [(last - n, low, high, last - to) for (_, runs), n in numbers.items() for low, high, to in runs]
    return machine(last + 1, edges, [last - n for (ends, _), n in numbers.items() if ends])


def _edges(line: list[int]) -> Edges:
    runs = ((to, [*group]) for to, group in groupby(range(256), line.__getitem__))
    return tuple((bytes_[0], bytes_[-1], to) for to, bytes_ in runs if to >= 0)
