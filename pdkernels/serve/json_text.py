"""JSON that all readers take, from what clients send and from what models write."""

from __future__ import annotations

import json
from typing import Any

from pdkernels._json import NotANumber, parsed_json

_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Words of Python's that models write."""
_MARKS = frozenset('{}[],:"')
_DECODER = json.JSONDecoder(strict=False)
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def read_json(text: str) -> Any:
    """The value of a JSON text that a model wrote; None: it is none."""
    try:
        return parsed_json(text, strict=False)
    except (ValueError, RecursionError):
        return None


_AT_ONCE = 64
"""Items of a list that are written at once."""
_LEVELS = 6
"""Lists and objects inside each other that are cut: what is deeper is written at once."""


def members(text: str) -> dict[str, str]:
    """The values of an object as they are written; of a repeated name the last. `text` is JSON.

    >>> members(' {"a": 1.10, "b": {"c": []}}')
    {'a': '1.10', 'b': '{"c": []}'}
    """
    written, at = dict[str, str](), text.index("{") + 1
    while (start := _after_blanks(text, at)) < len(text) and text[start] != "}":
        name, at = _DECODER.raw_decode(text, start)
        start = _after_blanks(text, text.index(":", at) + 1)
        _, at = _DECODER.raw_decode(text, start)
        written[name] = text[start:at]
        at = _after_blanks(text, at)
        at += text[at] == ","
    return written


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def written_json(value: Any) -> str:
    """A value as JSON in ASCII, without NaN. It is written in pieces: while the library writes, no other thread runs.

    >>> written_json({"a": [{"b": "\u00e9"}, 1.5], "c": {}})
    '{"a":[{"b":"\\\\u00e9"},1.5],"c":{}}'
    >>> written_json([*range(100)]) == json.dumps([*range(100)], separators=(",", ":"))
    True
    """
    pieces = list[str]()
    _write(value, pieces, _LEVELS)
    return "".join(pieces)


def _write(value: Any, pieces: list[str], levels: int) -> None:
    if levels and isinstance(value, dict) and value:
        for number, (key, item) in enumerate(value.items()):
            pieces.append(("," if number else "{") + _dumped({key: 0})[1:-2])
            _write(item, pieces, levels - 1)
        pieces.append("}")
    elif isinstance(value, (list, tuple)) and len(value) > _AT_ONCE:
        for start in range(0, len(value), _AT_ONCE):
            pieces.append(("," if start else "[") + _dumped(value[start : start + _AT_ONCE])[1:-1])
        pieces.append("]")
    elif levels and isinstance(value, (list, tuple)) and any(isinstance(item, (dict, list, tuple)) for item in value):
        for number, item in enumerate(value):
            pieces.append("," if number else "[")
            _write(item, pieces, levels - 1)
        pieces.append("]")
    else:
        pieces.append(_dumped(value))


def _dumped(value: Any) -> str:
    return _ENCODER.encode(value)


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
