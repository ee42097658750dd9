"""Errors in OpenAI's form, in the words of those who send requests: fields by their names there, and no names of
Python's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from pdkernels.engine import BrokenModel
from pdkernels.generation.generation_config import FILE
from pdkernels.generation.params import ALIASES, SETTINGS

_KINDS = {404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 405: "method_not_supported", 429: "rate_limit_exceeded"}
FAILED = "the server failed to answer this request; its log says why"
_MAX_TEXT = 800
_MAX_NAME = 60
_PREFIX = re.compile(r"^pdkernels\.[\w.]+: ")
_FIELDS = {name: setting.wire for name, setting in SETTINGS.items() if setting.wire not in ("", name)}
_TYPES = {
    "an int": "an integer",
    "ints": "integers",
    "int": "integer",
    "a float": "a number",
    "float": "number",
    "floats": "numbers",
    "a str": "a text",
    "str": "text",
    "a bool": "true or false",
    "bool": "boolean",
    "dict": "object",
    "tuple": "list",
    "None": "null",
    "NoneType": "null",
    "True": "true",
    "False": "false",
}
_WORDS = _FIELDS | _TYPES
# What pydantic says of a value's kind, in which it names its classes.
_KIND = re.compile(r"Input should be a valid (dictionary|list|string|integer|number|boolean).*", re.DOTALL)
_KINDS_OF_JSON = {
    "dictionary": "an object",
    "list": "a list",
    "string": "a text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
}
# Not inside quotes, where a client's own words are.
_WORD = re.compile(rf"'[^']*'|\"[^\"]*\"|\b(?:{'|'.join(sorted(_WORDS, key=len, reverse=True))})\b")
# A remedy for those who write Python.
_REMEDY = re.compile(
    r"pdkernels|generate\b|Engine|`|\(\)|pip |docs/|\bPass |\bLoad |attribute|callback|argument|\bset |\w=|\.to\(|\.decode\(|raise "
)


NO_THREAD = "thread_unsupported_request"
"""The code by which Anthropic's client libraries know that they must send a whole conversation."""


class Refused(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        parameter: the field that it is about.
        code: a word for programs, such as "context_length_exceeded"; None: that of the status, if it has one.
    """

    def __init__(self, message: str, status: int = 400, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.parameter, self.code = status, parameter, code


def error_body(message: str, status: int, parameter: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an answer with this status."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = None if parameter is None else clipped(parameter, 2 * _MAX_NAME)
    code = code or _CODES.get(status)
    details = {"details": {"error_code": code}} if code == NO_THREAD else {}
    # The outer field is Anthropic's.
    return {
        "type": "error",
        "error": {"message": clipped(message, _MAX_TEXT), "type": kind, "param": param, "code": code, **details},
    }


def of_failure(error: BaseException) -> tuple[str, int]:
    """What a request is answered that the engine has refused or could not finish, and the status."""
    if isinstance(error, Refused):
        return str(error), error.status
    if isinstance(error, (ValueError, TypeError, NotImplementedError)):
        return in_http_words(str(error)), 400
    if isinstance(error.__cause__, BrokenModel):
        return in_http_words(str(error.__cause__)), 500
    if isinstance(error, RuntimeError) and error.__cause__ is None and "closed" in str(error):
        return "the server is stopping", 503
    return FAILED, 500


def why_closed(failure: BaseException | None) -> str:
    """What `/health` says of an engine that takes no requests.

    >>> why_closed(None)
    'stopping'
    """
    if failure is None:
        return "stopping"
    return f"failed: {in_http_words(str(failure))}" if isinstance(failure, BrokenModel) else "failed"


@contextmanager
def renamed(fields: Mapping[str, str], inside: bool = True) -> Iterator[None]:
    """Errors of a chat in which a request was translated, with the request's own fields. Unless places `inside` its
    messages are those of the request, they are left out: the chat may have others.

    >>> with renamed({"messages": "input"}):
    ...     raise Refused("messages must be short", 400, "messages.0")
    Traceback (most recent call last):
        ...
    pdkernels.serve.errors.Refused: input must be short
    """
    field_names = re.compile(rf"'[^']*'|\b(?:{'|'.join(fields)})\b")

    def translated(text: str) -> str:
        # What a chat has one level deeper.
        flat = re.sub(r"(?<=[\w])\.(function|json_schema)(?=\.\w)", "", text)
        flat = flat if inside else re.sub(r"\bmessages(\.\w+)+", "messages", flat)
        return field_names.sub(lambda word: fields.get(word[0], word[0]), flat)

    try:
        yield
    except Refused as error:
        parameter = None if error.parameter is None else translated(error.parameter)
        raise Refused(translated(str(error)), error.status, parameter, error.code) from None
    except ValidationError as error:
        fault, parameter = invalid(error.errors())
        raise Refused(translated(fault), 400, None if parameter is None else translated(parameter)) from None


def clipped(text: str, most: int) -> str:
    """The text, without its middle if it is longer than `most` characters.

    >>> clipped("abcdefghijklmno", 11)
    'abcd...lmno'
    """
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def shown(value: Any) -> str:
    """A part of a request, as JSON of bounded length, with texts in single quotes.

    >>> shown("a"), shown(None), shown([1, 2])
    ("'a'", 'null', '[1, 2]')
    """
    if isinstance(value, str):
        return repr(clipped(value, _MAX_NAME))
    return clipped(json.dumps(value, default=str), _MAX_NAME)


def in_http_words(text: str) -> str:
    """An error of the engine or of a method as one of a request: with its fields, and without what only Python's
    callers can do.

    >>> in_http_words("pdkernels.Engine.submit: max_new_tokens must be an int, got str. Pass max_new_tokens=5.")
    'max_tokens must be an integer, got text.'
    """
    text, inner = _PREFIX.subn("", text, count=1)
    first, *sentences = re.split(r"(?<=[.?]) (?=[A-Z])", text)
    if inner:
        text = " ".join([first, *(one for one in sentences if FILE in one or not _REMEDY.search(one))])
    return _translated(text)


def _translated(text: str) -> str:
    return _WORD.sub(lambda word: _WORDS.get(word[0], word[0]), text)


def kind_of(annotation: str) -> str:
    """What an option's value must be.

    >>> kind_of('int | Literal["auto"] | None')
    'an integer, "auto" or null'
    """
    kinds = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "None": "null"}
    kinds |= {"Sequence[int]": "a list of integers"}
    matches = re.findall(r"Literal\[([^\]]*)\]|(Sequence\[int\]|\w+)", annotation)
    kinds_in_json = [
        one for literal, name in matches for one in (literal.split(", ") if literal else [kinds.get(name, "")]) if one
    ]
    return (
        " or ".join([*([", ".join(kinds_in_json[:-1])] if kinds_in_json[1:] else []), kinds_in_json[-1]])
        if kinds_in_json
        else "left out"
    )


def invalid(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """What the first of pydantic's `errors` says of a body, and of which field."""
    first = errors[0]
    place = ".".join(clipped(str(part), _MAX_NAME) for part in first["loc"][:8] if part != "body")
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}, at character {place}", None
    if first["type"] == "string_unicode":  # half of a character
        return f"{place or 'a name of a field'} must hold only Unicode characters", place or None
    if not place:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    if first["type"] == "extra_forbidden":
        return f"{place} is not supported here{field_hint(place)}", place
    text = _KIND.sub(lambda kind: f"must be {_KINDS_OF_JSON[kind[1]]}", first["msg"])
    return f"{place}: {_translated(text)}", place


def field_hint(name: str) -> str:
    """The field of the setting that is called `name` here or elsewhere, or why it has none.

    >>> field_hint("eos_token_id"), field_hint("logits_processor"), field_hint("blok_size")
    (': its field is stop_token_ids', ': code cannot be sent by HTTP', '')
    """
    setting = SETTINGS.get(ALIASES.get(name, name))
    if setting is None or setting.wire == name:  # which other routes have
        return ""
    none = (
        "code cannot be sent by HTTP"
        if setting.kind == "functions"
        else "regex, choice and response_format ask for one"
    )
    return f": its field is {setting.wire}" if setting.wire else f": {none}"
