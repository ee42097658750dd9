r"""Classes of Unicode in patterns, ``\p{Lu}`` and ``\P{Letter}``, as JavaScript has them with its flag u: general
categories and scripts, written out as ranges of characters.

Source: ECMA-262, "Runtime Semantics: UnicodeMatchProperty"; Unicode Standard Annex 44, table 12.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache
from itertools import groupby

from pdkernels._validation import refuse
from pdkernels.grammar.language import OP, Ranges, complement, normal
from pdkernels.grammar.unicode_scripts import known, ranges_of

_NAMES = {
    "Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Combining_Mark": "M", "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc", "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl",
    "Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd",
    "Open_Punctuation": "Ps", "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf",
    "Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk",
    "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl", "Paragraph_Separator": "Zp",
    "Control": "Cc", "cntrl": "Cc", "Format": "Cf", "Private_Use": "Co",
}  # fmt: skip
_GROUPS = {"LC": ("Lu", "Ll", "Lt")}
_PIECE = re.compile(r"\\([pP])(?:\{([^}]*)\})?|\\.|(\[\^?)|(\])", re.DOTALL)


def without_classes(pattern: str, wide: bool) -> str:
    r"""A pattern with its classes written out. A later version of Unicode may put a character anywhere that this one
    does not have: it is in no class, and with `wide` in every one.

    >>> without_classes(r"\p{Zl}", False)
    '[\\U00002028-\\U00002028]'

    Raises:
        ValueError: a class that is neither a general category nor a known script.
    """
    if r"\p" not in pattern and r"\P" not in pattern:
        return pattern
    in_class, negated = False, False

    def written(match: re.Match[str]) -> str:
        nonlocal in_class, negated
        kind, name, opening, closing = match.groups()
        if opening and not in_class:
            in_class, negated = True, opening == "[^"
        elif closing:
            in_class = negated = False
        if kind is None:
            return match[0]
        ranges = _class(name, kind == "P", wide != negated)
        text = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
        return text if in_class else f"[{text}]"

    return _PIECE.sub(written, pattern)


def _class(name: str | None, excluded: bool, wide: bool) -> Ranges:
    ranges, unassigned = _ranges(name or ""), _categories()["Cn"]
    if excluded:
        return complement(ranges if wide else normal([*ranges, *unassigned]))
    return normal([*ranges, *unassigned]) if wide else ranges


def _ranges(name: str) -> Ranges:
    """The characters of a class, as far as this version of Unicode has them. A script may be named alone, as in Rust."""
    kind, _, value = name.rpartition("=")
    categories, script = _categories(), ranges_of(value)
    if script is not None and kind in ("", "Script", "sc"):
        return complement(normal([*complement(script), *categories["Cn"]]))
    value = _NAMES.get(value, value)
    members = [category for category in categories if category in _GROUPS.get(value, ()) or category.startswith(value)]
    readable = kind in ("", "gc", "General_Category") and (
        value in ("L", "M", "N", "P", "S", "Z")
        or value in _GROUPS
        or (value in categories and value not in ("Cn", "Cs"))
    )
    refuse(
        not readable,
        OP,
        f"the class \\p{{{name[:40]}}} of a pattern is neither a general category of Unicode nor a known script",
        f"Write the ranges of its characters. Scripts: {known()}.",
    )
    return normal(bounds for category in members for bounds in categories[category])


@cache
def _categories() -> dict[str, Ranges]:
    """The characters of each general category."""
    ranges_of: dict[str, list[tuple[int, int]]] = {}
    for category, group in groupby(range(sys.maxunicode + 1), lambda point: unicodedata.category(chr(point))):
        points = [*group]
        ranges_of.setdefault(category, []).append((points[0], points[-1]))
    return {category: tuple(ranges) for category, ranges in ranges_of.items()}
