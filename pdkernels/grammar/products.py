"""Products of regular languages: the texts of two at once, and those of one without the other's."""

from __future__ import annotations

from collections.abc import Iterator

from pdkernels.grammar.budget import spend
from pdkernels.grammar.language import MAX_DETERMINISTIC, NOTHING, Expression, Machine, check_size, determinised

_MAX_EDGES = 400_000


def both(first: Expression, second: Expression, source: str) -> Expression:
    """The texts of two expressions at once, by the product of their automata.

    >>> from pdkernels.grammar.language import Chars, Repeat, compiled
    >>> vowel, short = Repeat(Chars(((97, 97), (101, 101))), 0, None), Repeat(Chars(((97, 122),)), 2, 3)
    >>> made = compiled(both(vowel, short, "it"), "it")
    >>> made.accepts(b"aea"), made.accepts(b"aeae"), made.accepts(b"ab")
    (True, False, False)
    """
    return _product(first, second, source, True)


def without(first: Expression, second: Expression, source: str) -> Expression:
    """The texts of an expression that are none of the other.

    >>> from pdkernels.grammar.language import Chars, Repeat, compiled, text
    >>> made = compiled(without(Repeat(Chars(((97, 98),)), 1, 2), text("ab"), "it"), "it")
    >>> made.accepts(b"ab"), made.accepts(b"a"), made.accepts(b"bb")
    (False, True, True)
    """
    return _product(first, second, source, False)


def _product(first_language: Expression, second_language: Expression, source: str, intersect: bool) -> Expression:
    """The texts of the first language that the second has, or has not."""
    first, second = determinised(first_language, source), determinised(second_language, source)
    if first.states == 0 or second.states == 0:
        return NOTHING if intersect or first.states == 0 else first_language
    lines, other_runs = first.runs, [*second.runs, []]  # state -1 has none
    ends, other_ends = first.accepting, second.accepting
    start = (0, 0)
    number, queue, edges = {start: 0}, [start], list[tuple[int, int, int, int]]()
    for here in queue:
        before = len(edges)
        for low, high, to, beside in _joined(lines[here[0]], other_runs[here[1]]):
            if intersect and beside < 0:
                continue
            pair = (to, beside)
            if pair not in number:
                number[pair] = len(queue)
                queue.append(pair)
            edges.append((number[here], low, high, number[pair]))
        spend(1 + len(edges) - before)
        large = len(queue) > MAX_DETERMINISTIC or len(edges) > _MAX_EDGES
        check_size(large, f"the automaton of {source} is too large")
    accepting = [n for n, (a, b) in enumerate(queue) if ends[a] and (b >= 0 and other_ends[b]) == intersect]
    return Machine(len(queue), tuple(edges), tuple(accepting)) if accepting else NOTHING


def _joined(
    runs: list[tuple[int, int, int]], other_runs: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """The ranges of `runs`, parted by those of `others`, and where both lead; -1: the second nowhere."""
    at = 0
    for low, high, to in runs:
        while at < len(other_runs) and other_runs[at][1] < low:
            at += 1
        next_ = at
        while low <= high:
            if next_ == len(other_runs) or other_runs[next_][0] > high:
                yield low, high, to, -1
                break
            first, last, beside = other_runs[next_]
            if low < first:
                yield low, first - 1, to, -1
                low = first
            yield low, min(high, last), to, beside
            low, next_ = min(high, last) + 1, next_ + 1
