"""JSON as all readers take it. Python's own parser also takes NaN, Infinity and numbers beyond all floats, which it would write
again as no other reads them."""

from __future__ import annotations

import json
import math
from typing import Any


class NotANumber(ValueError):
    """What stands where JSON has a number is none there.

    Attributes:
        text: as it was written.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parsed_json(text: str | bytes, strict: bool = True) -> Any:
    """The value of a JSON text. Unless `strict`, its strings may have line breaks.

    >>> parsed_json('{"a": 1e5}')
    {'a': 100000.0}

    Raises:
        NotANumber: it has NaN, Infinity or a number beyond all floats.
        ValueError: it is no JSON.
        RecursionError: it is too deep.
    """
    return json.loads(text, strict=strict, parse_constant=_refused, parse_float=_finite)


def _refused(text: str) -> Any:
    raise NotANumber(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text)
