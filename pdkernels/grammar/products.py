"""Products of regular languages: the texts of two at once, and those of one without the other's."""

from __future__ import annotations

from pdkernels.grammar.language import Expression, determinised, product


def both(first: Expression, second: Expression, source: str) -> Expression:
    """The texts of two expressions at once, by the product of their automata.

    >>> from pdkernels.grammar.language import Chars, Repeat, compiled
    >>> vowel, short = Repeat(Chars(((97, 97), (101, 101))), 0, None), Repeat(Chars(((97, 122),)), 2, 3)
    >>> made = compiled(both(vowel, short, "it"), "it")
    >>> made.accepts(b"aea"), made.accepts(b"aeae"), made.accepts(b"ab")
    (True, False, False)
    """
    return product(determinised(first, source), determinised(second, source), source, intersect=True)


def without(first: Expression, second: Expression, source: str) -> Expression:
    """The texts of an expression that are none of the other.

    >>> from pdkernels.grammar.language import Chars, Repeat, compiled, text
    >>> made = compiled(without(Repeat(Chars(((97, 98),)), 1, 2), text("ab"), "it"), "it")
    >>> made.accepts(b"ab"), made.accepts(b"a"), made.accepts(b"bb")
    (False, True, True)
    """
    return product(determinised(first, source), determinised(second, source), source, intersect=False)
