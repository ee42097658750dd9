"""What the texts of arrays and objects are made of, for all parts of the compiler of schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdkernels._validation import refuse
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
    normal,
    optional,
    text,
)
from pdkernels.grammar.numbers import POINTED
from pdkernels.grammar.regex import parsed
from pdkernels.grammar.schema_flat import Flattener
from pdkernels.grammar.schema_keywords import Unknown
from pdkernels.grammar.schema_strings import quoted

_WHOLE_WITHOUT_POINT = ("draft-03", "draft-04")
"""Drafts in which 1.0 is no integer."""


class Parts:
    """Brackets, commas, listed values."""

    def __init__(self, root: Any, whitespace: str | None, unknown: Unknown, complete: bool) -> None:
        self._flat, self._complete = Flattener(root, unknown), complete
        draft = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
        self._pointed = complete and not any(old in draft for old in _WHOLE_WITHOUT_POINT)
        gap = EMPTY if whitespace is None else parsed(whitespace)
        space = optional(text(" ")) if whitespace is None else gap
        wide = any(not {9, 10, 13, 32}.issuperset(range(first, last + 1)) for first, last in _characters(gap))
        refuse(wide, OP, "whitespace matches characters that are no space in JSON", r"Write [ \t\n\r], not \s.")
        self._gap = gap
        self._comma, self._colon = Seq((gap, text(","), space)), Seq((gap, text(":"), space))

    def value(self, schema: Any, place: str) -> Expression:
        """The texts of the values of a schema, which errors call `place`."""
        raise NotImplementedError

    def _exactly(self, value: Any) -> Expression:
        if isinstance(value, Mapping):
            pairs = [Seq((self._exactly(name), self._colon, self._exactly(item))) for name, item in value.items()]
            return self._enclosed("{", "}", self._joined(pairs))
        if isinstance(value, list):
            return self._enclosed("[", "]", self._joined([self._exactly(item) for item in value]))
        if self._complete and isinstance(value, str):
            return quoted(text(value), complete=True)
        literal = text(json.dumps(value, ensure_ascii=False, allow_nan=False))
        if not self._complete or type(value) not in (int, float) or value != value // 1:
            return literal
        return Alt((literal, Seq((text(str(int(value))), POINTED))))

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


def _characters(expression: Expression) -> Ranges:
    """All that occur in an expression."""
    if isinstance(expression, Chars):
        return expression.ranges
    if isinstance(expression, Repeat):
        return _characters(expression.item)
    assert not isinstance(expression, (Machine, Subsequence))
    return normal(bounds for inner in expression.items for bounds in _characters(inner))
