"""JSON that all readers take, from what clients send and from what models write.

Python's own parser also takes NaN, Infinity and numbers beyond all floats, which it would write again as no other reads them.
"""

from __future__ import annotations

import json
import math
from typing import Any

_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Words of Python's that models write."""
_MARKS = frozenset('{}[],:"')


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


def read_json(text: str) -> Any:
    """The value of a JSON text that a model wrote; None: it is none."""
    try:
        return parsed_json(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _refused(text: str) -> Any:
    raise NotANumber(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text)


class JsonWords:
    """Writes a model's JSON so that all readers take it, while it comes: a number that JSON does not have becomes a text, a
    word of Python's the one of JSON, and a line break in a text is escaped. What else is no JSON stays.

    >>> words = JsonWords()
    >>> words.feed('{"a": NaN, "b": Tr'), words.feed('ue, "c": 1e999}')
    ('{"a": "NaN", "b": ', 'true, "c": "1e999"}')
    """

    def __init__(self) -> None:
        self._quoted = self._escaped = False
        self.held = ""
        """The beginning of a word, of which more may come."""

    def feed(self, text: str) -> str:
        """What is certain of these further characters."""
        pieces = list[str]()
        for character in text:
            if self._quoted:
                pieces.append(json.dumps(character)[1:-1] if character < " " else character)
                escaped = not self._escaped and character == "\\"
                self._quoted = self._escaped or character != '"'
                self._escaped = escaped
            elif character in _MARKS or character.isspace():
                pieces += [_word(self.held), character]
                self.held, self._quoted = "", character == '"'
            else:
                self.held += character
        return "".join(pieces)


def mended(text: str) -> str:
    """A whole text as `JsonWords` writes it.

    >>> mended("None"), mended('["x", -Infinity]')
    ('null', '["x", "-Infinity"]')
    """
    words = JsonWords()
    return words.feed(text) + _word(words.held)


def _word(word: str) -> str:
    try:
        if word and word not in _LITERALS:
            parsed_json(word)
    except NotANumber:
        return json.dumps(word)
    except ValueError:
        pass
    return _LITERALS.get(word, word)
