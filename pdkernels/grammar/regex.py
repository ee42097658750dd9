"""Regular expressions in Python's syntax, as expressions of `language`. Their parser is Python's own."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pdkernels._validation import check_text, check_type, fail, refuse, sentence
from pdkernels.grammar.language import (
    EMPTY,
    NOTHING,
    OP,
    Alt,
    Chars,
    Expression,
    Ranges,
    Repeat,
    Seq,
    complement,
    either,
    may_be_empty,
    normal,
    optional,
)
from pdkernels.grammar.unicode_classes import without_classes

if sys.version_info >= (3, 11):
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_parse as parser

MAX_LENGTH = 50_000
ANYTHING = Chars(complement(()))
_LINE = Chars(complement(((10, 10),)))
_LINE_OF_BOTH = Chars(complement(normal([(10, 10), (13, 13), (0x2028, 0x2029)])))
_ASCII: dict[str, Ranges] = {
    "DIGIT": ((48, 57),),
    "SPACE": normal([(9, 13), (32, 32)]),
    "WORD": normal([(48, 57), (65, 90), (95, 95), (97, 122)]),
}
_UNICODE = {"DIGIT": r"\d+", "SPACE": r"[\s\ufeff]+", "WORD": r"\w+"}
"""Characters one after another, as Python has them; JavaScript has one more space."""


def parsed(pattern: str, *, search: bool = False, wide: bool = False) -> Expression:
    """The texts that `pattern` matches whole; with `search`, those in which it is found by Python and by JavaScript,
    whose patterns JSON Schema has; with `wide`, by one of them at least.

    ``\\d``, ``\\s`` and ``\\w`` are those of ASCII; what they exclude, such as by ``\\D`` and ``[^\\w]``, is that of
    Unicode.

    Raises:
        ValueError: not a regular expression.
        NotImplementedError: a part that is none of a regular language, or a flag.
    """
    check_type(isinstance(pattern, str), OP, "pattern", "be a str", type(pattern).__name__)
    refuse(len(pattern) > MAX_LENGTH, OP, f"the pattern has more than {MAX_LENGTH} characters")
    try:
        # Names of groups, and classes of Unicode, as ECMA has them.
        tree = parser.parse(re.sub(r"\(\?<(?![=!])", "(?P<", without_classes(pattern, wide)) if search else pattern)
    except (re.error, OverflowError) as error:
        fail(OP, "pattern", "be a regular expression", f"{pattern[:80]!r}: {error}")
    except RecursionError:
        fail(OP, "pattern", "have fewer groups inside each other", repr(pattern[:80]))
    flags = tree.state.flags & ~(re.UNICODE | re.DOTALL).value
    if flags:
        raise NotImplementedError(sentence(OP, f"flags such as {re.RegexFlag(flags)!r} are not supported in a pattern"))
    line = _LINE_OF_BOTH if search and not wide else _LINE
    try:
        return _Tree(pattern, ANYTHING if tree.state.flags & re.DOTALL.value else line, wide).whole(tree.data, search)
    except RecursionError:
        fail(OP, "pattern", "have fewer groups inside each other", repr(pattern[:80]))


class _Tree:
    def __init__(self, pattern: str, dot: Chars, wide: bool) -> None:
        self._pattern, self._dot, self._wide = pattern, dot, wide

    def whole(self, items: list[Any], search: bool) -> Expression:
        """The whole pattern: anchors may be wherever they hold in some text, at its ends in the end."""
        anything = Repeat(ANYTHING, 0, None)
        last = optional(Chars(((10, 10),))) if self._wide else EMPTY  # Python's $ is also before a last line feed
        forms = []
        for (begins, ends), inner in self.anchored(items).items():
            if search:
                inner = Seq((EMPTY if begins else anything, inner, last if ends else anything))
            forms.append(inner)
        if not forms:  # something has to be before the beginning
            self.item("AT", None)
        return either(forms)

    def anchored(self, items: Sequence[Any]) -> dict[tuple[bool, bool], Expression]:
        """The texts of a sequence, apart by whether it has to be at the beginning, and at the end, of the whole text."""
        forms: dict[tuple[bool, bool], Expression] = {(False, False): EMPTY}
        simple: list[Any] = []
        for kind, value in items:
            if not _has_anchor([(kind, value)]):
                simple.append((kind, value))
                continue
            pieces = self._anchored_part(str(kind), value)
            if pieces is None:
                simple.append((kind, value))  # refused by its name
                continue
            forms = _followed(_followed(forms, {(False, False): self.sequence(simple)}), pieces)
            simple = []
        return _followed(forms, {(False, False): self.sequence(simple)}) if simple or not items else forms

    def _anchored_part(self, kind: str, value: Any) -> dict[tuple[bool, bool], Expression] | None:
        if kind == "AT":
            begins, ends = str(value).startswith("AT_BEGINNING"), str(value).startswith("AT_END")
            return {(begins, ends): EMPTY} if begins or ends else None
        branches: list[Any] = []
        if kind == "BRANCH":
            branches = list(value[1])
        elif kind == "SUBPATTERN" and not value[1] and not value[2]:
            branches = [value[3]]
        elif kind in ("MAX_REPEAT", "MIN_REPEAT") and value[1] == 1:
            branches = [value[2], *([[]] if value[0] == 0 else [])]
        forms: dict[tuple[bool, bool], list[Expression]] = {}
        for branch in branches:
            for where, expression in self.anchored(list(branch)).items():
                forms.setdefault(where, []).append(expression)
        return {where: either(expressions) for where, expressions in forms.items()} or None

    def sequence(self, items: Sequence[Any]) -> Expression:
        return Seq(tuple(self.item(str(kind), value) for kind, value in items))

    def item(self, kind: str, value: Any) -> Expression:
        if kind == "LITERAL":
            self._check(value)
            return self._chars(((value, value),))
        if kind == "NOT_LITERAL":
            return Chars(complement(((value, value),)))
        if kind == "ANY":
            return self._dot
        if kind == "IN":
            return self._set(value)
        if kind == "BRANCH":
            return Alt(tuple(self.sequence(branch) for branch in value[1]))
        if kind == "SUBPATTERN" and not value[1] and not value[2]:
            return self.sequence(value[3])
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            minimum, maximum, body = value
            return Repeat(self.sequence(body), int(minimum), None if maximum == parser.MAXREPEAT else int(maximum))
        names = {
            "AT": "an anchor inside it",
            "ASSERT": "a lookahead or lookbehind",
            "ASSERT_NOT": "a lookahead or lookbehind",
            "GROUPREF": "a reference to a group",
            "GROUPREF_EXISTS": "a reference to a group",
            "SUBPATTERN": "a flag",
            "POSSESSIVE_REPEAT": "a possessive repetition",
            "ATOMIC_GROUP": "an atomic group",
        }
        fault = f"the pattern {self._pattern[:80]!r} has {names.get(kind, kind)}, which is not regular or not supported"
        raise NotImplementedError(sentence(OP, fault))

    def _check(self, point: int) -> None:
        """Half of a surrogate pair, as an escape of UTF-16 writes it, is no character."""
        check_text(OP, chr(point), f"the pattern {self._pattern[:80]!a}")

    def _chars(self, ranges: Ranges) -> Expression:
        characters = normal((first, last) for first, last in ranges if not 0xD800 <= first <= last <= 0xDFFF)
        return Chars(characters) if characters else NOTHING

    def _set(self, items: Sequence[Any]) -> Expression:
        negated = bool(items) and str(items[0][0]) == "NEGATE"
        members, wide = list[tuple[int, int]](), negated != self._wide
        for kind, value in items[negated:]:
            name = str(kind)
            if name == "LITERAL":
                self._check(value)
                members.append((value, value))
            elif name == "RANGE":
                members.append(value)
            else:
                category = str(value).removeprefix("CATEGORY_")
                if category.startswith("NOT_"):
                    # Of what is excluded twice, too little stays out.
                    base = category.removeprefix("NOT_")
                    members += complement(_ASCII[base] if wide else _every(base))
                else:
                    members += _every(category) if wide else _ASCII[category]
        ranges = normal(members)
        return self._chars(complement(ranges) if negated else complement(complement(ranges)))


def _has_anchor(items: Sequence[Any]) -> bool:
    for kind, value in items:
        name, subtrees = str(kind), list[Any]()
        if name == "AT":
            return True
        if name == "BRANCH":
            subtrees = value[1]
        elif name in ("SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT"):
            subtrees = [value[-1]]
        if any(_has_anchor(list(subtree)) for subtree in subtrees):
            return True
    return False


def _followed(
    forms: dict[tuple[bool, bool], Expression], pieces: dict[tuple[bool, bool], Expression]
) -> dict[tuple[bool, bool], Expression]:
    """The texts of one after the other: nothing is before what has to be at the beginning, or after what is at the
    end."""
    joined: dict[tuple[bool, bool], list[Expression]] = {}
    for (begins, ends), first in forms.items():
        for (begins_later, ends_later), second in pieces.items():
            if (begins_later and not may_be_empty(first)) or (ends and not may_be_empty(second)):
                continue
            pair = Seq((EMPTY if begins_later else first, EMPTY if ends else second))
            joined.setdefault((begins or begins_later, ends or ends_later), []).append(pair)
    return {where: either(expressions) for where, expressions in joined.items()}


@lru_cache(maxsize=4)
def _every(category: str) -> Ranges:
    """The characters of a category in all of Unicode."""
    matches = re.finditer(_UNICODE[category], array("I", range(0x110000)).tobytes().decode("utf-32", "surrogatepass"))
    return tuple((match.start(), match.end() - 1) for match in matches)
