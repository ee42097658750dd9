"""Messages of OpenAI's interface as templates of checkpoints know them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pdkernels._json import parsed_json
from pdkernels.models.text.chat import asks_for_content
from pdkernels.serve.errors import Refused, clipped, shown
from pdkernels.serve.json_text import read_json

_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")
"""Fields of messages beside their contents."""
CACHED = ("cache_control", "prompt_cache_breakpoint")
"""Fields of parts that say what may be kept for later requests. They change no text."""
SENT_ALONG = (*CACHED, "id", "index", "annotations", "_meta")
"""Fields of parts of text that clients send along. They change no text."""
_UNSHOWN = ("audio", "refusal")
"""Fields of an answer's message that few templates show."""
_READ = re.compile(r"""(?:\.(?:get\(\s*["'])?|\[\s*["'])(\w+)""")
"""A name that a template reads, as an attribute or as a key."""


def plain(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages with texts for contents: parts of text are joined, since templates differ in whether they take them. Other
    fields that templates show as texts must be texts.

    The role "developer" becomes "system", which it has replaced in OpenAI's interface, unless the template knows it.
    The arguments of calls, which are JSON there, become objects, and what a tool has answered gets the tool's name,
    which the call has. A message with calls and without text has an empty one, or None if the template asks for that.

    Args:
        messages: of a request.
        template: its source.

    Raises:
        Refused: what is no message; calls, where the template does not read them.
    """
    found, called = [], dict[str, str]()
    for place, message in enumerate(messages):
        where = f"messages.{place}"
        role, content = message.get("role"), _text(message, f"{where}.content", template)
        if not isinstance(role, str):
            raise Refused(f"{where}.role must be text", 400, f"{where}.role")
        for field in _TEXTS:
            part(message, field, where, str, "")
        role = "system" if role == "developer" and "developer" not in template else role
        made = {**message, "role": role, "content": content}
        if message.get("tool_calls") not in (None, []):
            if "tool_calls" not in template:
                raise Refused(
                    "the chat template of this model has no place for calls of tools", 400, f"{where}.tool_calls"
                )
            made["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
            called |= {call.get("id") or "": call["function"]["name"] for call in made["tool_calls"]}
        for field in _UNSHOWN:
            if message.get(field) and field not in _read_by(template):
                raise Refused(f"the chat template of this model does not show {field}", 400, f"{where}.{field}")
        if message.get("function_call") and "function_call" not in _read_by(template):
            fault = "the chat template of this model does not show function_call, which tool_calls have replaced"
            raise Refused(fault, 400, f"{where}.function_call")
        name = called.get(message.get("tool_call_id") or "")
        if role == "tool" and name is not None:
            made.setdefault("name", name)
        found.append(made)
    return found


def part(item: Mapping[str, Any], name: str, place: str, kind: Any, default: Any = None) -> Any:
    """A field of an item that a client sends, of a kind that is text or an object.

    >>> part({"id": "a"}, "id", "input.0", str), part({}, "input", "input.0", Mapping, {})
    ('a', {})

    Raises:
        Refused: it is of another kind, or there is none.
    """
    value = item.get(name)
    value = default if value is None else value
    if not isinstance(value, kind):
        words = "text" if kind is str else "an object"
        raise Refused(f"{place}.{name} must be {words}, got {shown(value)}", 400, f"{place}.{name}")
    return value


@lru_cache(maxsize=8)
def _read_by(template: str) -> frozenset[str]:
    return frozenset(_READ.findall(template))


def check_fields(item: Mapping[str, Any], names: Collection[str], place: str) -> None:
    """Refuses what a client sends beside fields with these names; what is empty asks for nothing.

    >>> check_fields({"type": "text", "text": "a", "title": None}, ("type", "text"), "input.0")

    Raises:
        Refused: there is another field.
    """
    for name, value in item.items():
        if name not in names and value is not None and value not in ("", [], {}):
            where = f"{place}.{clipped(name, 60)}"
            raise Refused(f"{where} is not supported here", 400, where)


def check_function(fields: Mapping[str, Any], template: str, place: str) -> None:
    """Refuses fields of a function that the template does not read, such as one that is misspelt. What a function
    returns is shown with it by templates that show the whole.

    Args:
        fields: beside those that every template knows.
        template: its source.
        place: of the function.
    """
    check_fields(fields, _read_by(template) | {"return"}, place)


def arguments_of(arguments: Any, place: str) -> dict[str, Any]:
    """The arguments of a call that a client sends: JSON of an object, or the object; none of a function without
    parameters.

    >>> arguments_of('{"a": 1}', "input.0.arguments"), arguments_of(None, "input.0.arguments")
    ({'a': 1}, {})

    Raises:
        Refused: it is none.
    """
    fields = arguments
    if isinstance(arguments, str):
        try:
            fields = parsed_json(arguments or "{}")
        except (ValueError, RecursionError):
            pass
    fields = {} if fields is None else fields
    if not isinstance(fields, Mapping):
        raise Refused(f"{place} must be a JSON object, written as text", 400, place)
    return dict(fields)


def handed_on(text: str) -> dict[str, Any]:
    """The arguments of a call that a model wrote, as an object; what is none stands in one, as Anthropic suggests.

    >>> handed_on('{"a": 1}'), handed_on('{"a": 1,}')
    ({'a': 1}, {'INVALID_JSON': '{"a": 1,}'})
    """
    arguments = read_json(text or "{}")
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}


def _text(message: Mapping[str, Any], place: str, template: str) -> str | None:
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return None if asks_for_content(template) else ""  # calls have no text beside them
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{place} must be text or a list of parts", 400, place)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Refused(f"{place}: a part of type {shown(kind)} is not supported; only text is", 400, place)
        check_fields(part, ("type", "text", *SENT_ALONG), f"{place}.{number}")
        texts.append(part["text"])
    return "".join(texts)


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise Refused(f"{place} must be a list", 400, place)
    found = []
    for number, call in enumerate(calls):
        where = f"{place}.{number}.function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refused(f"{where} must have a name and arguments", 400, where)
        part(call, "id", f"{place}.{number}", str, "")
        arguments = arguments_of(function.get("arguments"), f"{where}.arguments")
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found
