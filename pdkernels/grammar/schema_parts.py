"""What the texts of arrays and objects are made of, for all parts of the compiler of schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pdkernels._validation import refuse
from pdkernels.grammar.budget import current
from pdkernels.grammar.language import (
    EMPTY,
    OP,
    Alt,
    Chars,
    Expression,
    Machine,
    Ranges,
    Repeat,
    Seq,
    Subsequence,
    either,
    normal,
    one_of,
    optional,
    text,
)
from pdkernels.grammar.numbers import POINTED
from pdkernels.grammar.regex import parsed
from pdkernels.grammar.schema_flat import Flattener
from pdkernels.grammar.schema_keywords import Unknown
from pdkernels.grammar.schema_merge import unsupported
from pdkernels.grammar.schema_strings import quoted

_WHOLE_WITHOUT_POINT = ("draft-03", "draft-04")
"""Drafts in which 1.0 is no integer."""
_MAX_ANY_ORDER = 8
"""Properties whose order is free: each set of those that are there already is a state."""
_SPACES: dict[str, tuple[Expression, Expression]] = {
    "compact": (EMPTY, EMPTY),
    "single": (EMPTY, text(" ")),
    "any": (Repeat(Chars(((9, 10), (13, 13), (32, 32))), 0, None),) * 2,
}
"""Around brackets and before commas and colons; after these."""


class Parts:
    """Brackets, commas, listed values."""

    def __init__(
        self, root: Any, whitespace: str | None, unknown: Unknown, complete: bool, any_order: bool = False
    ) -> None:
        self._flat, self._complete, self._any_order = Flattener(root, unknown), complete, any_order
        draft = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
        self._pointed = complete and not any(old in draft for old in _WHOLE_WITHOUT_POINT)
        self._contains_evaluates = "2019-09" not in draft
        spaces = (EMPTY, optional(text(" "))) if whitespace is None else _SPACES.get(whitespace)
        gap, space = spaces or (parsed(whitespace or ""),) * 2
        wide = any(not {9, 10, 13, 32}.issuperset(range(first, last + 1)) for first, last in _characters(gap))
        refuse(wide, OP, "whitespace matches characters that are no space in JSON", r"Write [ \t\n\r], not \s.")
        self._gap = gap
        self._comma, self._colon = Seq((gap, text(","), space)), Seq((gap, text(":"), space))

    def value(self, schema: Any, place: str) -> Expression:
        """The texts of the values of a schema, which errors call `place`."""
        raise NotImplementedError

    def _exactly(self, value: Any) -> Expression:
        if isinstance(value, str):  # the same expression all through a compile
            memo, key = current().memo, ("exactly", self._complete, value)
            if key not in memo:
                memo[key] = quoted(text(value), complete=True) if self._complete else text(_json(value))
            written: Expression = memo[key]
            return written
        if isinstance(value, Mapping):
            pairs = [Seq((self._exactly(name), self._colon, self._exactly(item))) for name, item in value.items()]
            if self._any_order:
                return self._enclosed("{", "}", self._in_any_order([(True, pair) for pair in pairs], "a listed value"))
            return self._enclosed("{", "}", self._joined(pairs))
        if isinstance(value, list):
            return self._enclosed("[", "]", self._joined([self._exactly(item) for item in value]))
        literal = text(_json(value))
        if not self._complete or type(value) not in (int, float) or value != value // 1:
            return literal
        return Alt((literal, Seq((text(str(int(value))), POINTED))))

    def _one_of(self, values: Sequence[Any], place: str) -> Expression:
        """One of some values. Those that are written in one way are one expression all through a compile."""
        simple = {
            value: _json(value)
            for value in values
            if isinstance(value, str) and (not self._complete or (value.isascii() and value.isprintable()))
        }
        others = [self._exactly(value) for value in values if not isinstance(value, str) or value not in simple]
        return either([*others, *([one_of(tuple(simple.values()), f"the schema at {place}")] if simple else [])])

    def _joined(self, items: Sequence[Expression]) -> Expression:
        return Seq(
            tuple(expression for n, item in enumerate(items) for expression in ((self._comma, item) if n else (item,)))
        )

    def _enclosed(self, first: str, last: str, content: Expression) -> Expression:
        return Seq((text(first), self._gap, content, self._gap, text(last)))

    def _some(
        self,
        items: Sequence[tuple[bool, Expression]],
        minimum: int,
        maximum: int | None,
        other_item: Expression | None = None,
    ) -> Expression:
        """From `minimum` to `maximum` of the parts in their order, those that must be there among them; then any number
        of `other_item`, as `Subsequence` counts them."""
        if other_item is None:
            maximum = maximum if maximum is None or maximum < len(items) else None
        return Subsequence(tuple(items), self._comma, minimum, maximum, other_item)

    def _in_any_order(
        self,
        items: Sequence[tuple[bool, Expression]],
        place: str,
        minimum: int = 0,
        maximum: int | None = None,
        other_item: Expression | None = None,
    ) -> Expression:
        """As `_some`, in every order, with `other_item` anywhere."""
        fault = f"{len(items)} properties in any order, more than {_MAX_ANY_ORDER},"
        unsupported(len(items) > _MAX_ANY_ORDER, place, fault, "Leave key_order at 'schema'.")
        needed = sum(1 << n for n, (must, _) in enumerate(items) if must)
        bounded = minimum > 0 or maximum is not None

        @cache
        def later(there: int, unnamed: int) -> Expression:
            """What may follow some of the items and so many unnamed ones."""
            first = there == 0 and unnamed == 0
            ways = list[Expression]()
            if there & needed == needed and there.bit_count() + min(unnamed, 1) >= minimum:
                ways.append(EMPTY)
            if maximum is None or there.bit_count() + unnamed < maximum:
                before = EMPTY if first else self._comma
                for n, (_, item) in enumerate(items):
                    if not there >> n & 1:
                        after = later(there | 1 << n, unnamed if bounded else 1)
                        ways.append(Seq((before, item, after)))
                if other_item is not None and (maximum is not None or unnamed == 0):
                    ways.append(Seq((before, other_item, later(there, unnamed + 1))))
            following = either(ways)
            if other_item is None or maximum is not None or unnamed == 0:
                return following
            return Seq((Repeat(Seq((self._comma, other_item)), 0, None), following))

        return later(0, 0)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _characters(expression: Expression) -> Ranges:
    """All that occur in an expression."""
    if isinstance(expression, Chars):
        return expression.ranges
    if isinstance(expression, Repeat):
        return _characters(expression.item)
    assert not isinstance(expression, (Machine, Subsequence))
    return normal(bounds for inner in expression.items for bounds in _characters(inner))
