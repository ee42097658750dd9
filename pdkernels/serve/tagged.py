"""Calls whose name and arguments stand between tags: read while the text comes, into JSON.

Sources: the chat templates of Qwen3-Coder, GLM 4.5, DeepSeek V3, R1 and V3.1, Kimi K2 and Gemma 4, and the harmony
format of gpt-oss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pdkernels.serve.json_text import JsonWords, mended, read_json


class TaggedForm(NamedTuple):
    """How a model writes calls between tags."""

    openings: tuple[str, ...]
    """What comes before a call, or before a list of them."""
    begin: str
    """What comes before each call of a list; "": an opening has one call."""
    name_end: str
    """What ends the part with the name."""
    arguments: Literal["json", "fields", "literals"]
    """JSON; one field after another, each between tags; Gemma's own form of objects."""
    end: str
    """What comes after the arguments."""
    closing: str
    """What comes after the call, or after the list of them; "": nothing."""
    key_begin: str = ""
    key_end: str = ""
    field_end: str = ""
    """Of fields: before a key, between it and its value, and after the value."""
    framed: bool = False
    """Whether a value stands on lines of its own, and JSON in a fence."""

    @property
    def tags(self) -> tuple[str, ...]:
        """All of them."""
        quotes = (_QUOTE,) if self.arguments == "literals" else ()
        outer_tags = (*self.openings, self.begin, self.name_end, self.end, self.closing)
        return tuple(tag for tag in (*outer_tags, self.key_begin, self.key_end, self.field_end, *quotes) if tag.strip())


_QUOTE = '<|"|>'
QWEN_CODER = TaggedForm(
    ("<tool_call>",), "<function=", ">", "fields", "</function>", "</tool_call>", "<parameter=", ">", "</parameter>", True
)  # fmt: skip
GLM = TaggedForm(
    ("<tool_call>",), "", "", "fields", "", "</tool_call>", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"
)
_OUTER = "<\uff5ctool\u2581calls\u2581{}\uff5c>"
_INNER = "<\uff5ctool\u2581call\u2581{}\uff5c>"
DEEPSEEK_V3 = TaggedForm(
    (_OUTER.format("begin"),), _INNER.format("begin"), "<\uff5ctool\u2581sep\uff5c>", "json", _INNER.format("end"),
    _OUTER.format("end"), framed=True,
)  # fmt: skip
DEEPSEEK_V31 = DEEPSEEK_V3._replace(framed=False)
KIMI = TaggedForm(
    ("<|tool_calls_section_begin|>",), "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "json",
    "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
_TO = " to=functions."
HARMONY_CALLS = TaggedForm(
    (f"<|channel|>commentary{_TO}", f"<|start|>assistant{_TO}", f"<|channel|>analysis{_TO}"), "", "<|message|>", "json", "<|call|>", ""
)  # fmt: skip
GEMMA4 = TaggedForm(("<|tool_call>",), "call:", "{", "literals", "}", "<tool_call|>")


class CallDelta(NamedTuple):
    """A piece of a call."""

    number: int
    """Of the call in its answer."""
    id: str | None
    """None but in the first piece of a call, as is the name."""
    name: str | None
    arguments: str

    def written(self) -> dict[str, Any]:
        """As a stream has it."""
        head = {} if self.id is None else {"id": self.id, "type": "function"}
        name = {} if self.name is None else {"name": self.name}
        return {"index": self.number, **head, "function": {**name, "arguments": self.arguments}}


class Scan:
    """How deep a text is inside the brackets of JSON."""

    def __init__(self, depth: int) -> None:
        self._depth, self._quoted, self._escaped = depth, False, False

    def until(self, depth: int, text: str) -> int:
        """How many of these further characters lead back to `depth`; -1: more."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == depth:
                    return at + 1
        return -1


class _NoCall(Exception):
    """What has begun is no call."""


_Steps = Generator[None, None, None]


class TaggedReader:
    """Reads what stands behind an opening tag.

    >>> reader = TaggedReader(QWEN_CODER, {"add": {"properties": {"a": {"type": "string"}}}}, 0, None)
    >>> reader.feed("\\n<function=add>\\n<parameter=a>\\n1")
    >>> reader.feed("2\\n</parameter>\\n</function>\\n</tool_call> ok"), reader.over, reader.rest
    (None, True, ' ok')
    >>> "".join(delta.arguments for delta in reader.news)
    '{"a": "12"}'
    """

    def __init__(self, form: TaggedForm, schemas: Mapping[str, Any], count: int, most: int | None) -> None:
        """Args:
        form: of the calls.
        schemas: of the tools' parameters, by their names.
        count: calls before.
        most: calls, after which nothing is read.
        """
        self._form, self._schemas, self._most = form, schemas, most
        self.count = count
        """Calls that are complete."""
        self.begun = False
        """Whether the name of a call was read, but not its end."""
        self.news = list[CallDelta]()
        self.over = False
        self.failed = False
        """Whether what stands there is no call."""
        self.raw = ""
        """What was read since the last call: text, if it is none."""
        self.tail = False
        """Whether nothing but closing tags is missing."""
        self.rest = ""
        self._words = JsonWords()
        self._steps = self._all()

    @property
    def held(self) -> str:
        """The beginning of a word of a call's JSON, of which more may come."""
        return self._words.held if self.begun else ""

    def feed(self, text: str) -> None:
        """Reads on: `news` grows, and once it is `over` or has `failed`, `rest` is what it has not read."""
        self.rest += text
        if not self.begun:
            self.raw += text
        try:
            next(self._steps)
        except StopIteration:
            self.over = True
        except _NoCall:
            self.failed, self.rest = True, ""

    # Steps of reading. Each returns what it has found, and yields where it needs more text.

    def _until(self, *tags: str) -> Generator[None, None, tuple[str, str]]:
        """What stands before the next of these tags, and the tag."""
        while True:
            places = [(at, tag) for tag in tags if (at := self.rest.find(tag)) >= 0]
            if places:
                at, tag = min(places)
                before, self.rest = self.rest[:at], self.rest[at + len(tag) :]
                return before, tag
            yield

    def _next(self, *tags: str) -> Generator[None, None, str]:
        """The tag that comes next, after spaces."""
        while True:
            body = self.rest.lstrip()
            next_tag = next((tag for tag in tags if body.startswith(tag)), None)
            if next_tag is not None:
                self.rest = body[len(next_tag) :]
                return next_tag
            if not any(tag.startswith(body) for tag in tags):
                raise _NoCall
            yield

    def _all(self) -> _Steps:
        form, listed = self._form, self._form.arguments == "json"
        while True:
            tags = [form.begin, *([form.closing] if self.count and listed else [])]
            if form.begin and (yield from self._next(*tags)) != form.begin:
                return
            self.tail = False
            yield from self._call()
            self.count, self.begun, self.tail = self.count + 1, False, True
            if self.count == self._most:
                return
            yield from self._until(form.end if listed else form.closing)
            if not (listed and form.closing):
                return
            self.raw = self.rest

    def _call(self) -> _Steps:
        form = self._form
        if form is GLM:
            head, tag = yield from self._until(form.key_begin, form.closing)
            self.rest = tag + self.rest
        else:
            head, _ = yield from self._until(form.name_end)
        if form.arguments == "json" and head.strip() == "function":
            head, _ = yield from self._until("\n")
            yield from self._next("```json")
        match = re.fullmatch(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?(?:[\s<].*)?", head, re.DOTALL)
        if match is None or (form is GLM and not re.fullmatch(r"\s*[\w.-]+\s*", head)):
            raise _NoCall
        if form.arguments == "json":
            yield from self._next("{")
        call_id = head.strip() if form is KIMI and ":" in head else None  # which its template shows again
        self.begun = True
        self.news.append(CallDelta(self.count, call_id, match[1], ""))
        if form.arguments == "json":
            yield from self._json()
        elif form.arguments == "fields":
            yield from self._fields(_properties(self._schemas.get(match[1])))
        else:
            yield from self._items("}", keyed=True)

    def _json(self) -> _Steps:
        scan, self._words = Scan(1), JsonWords()
        self._write(self._words.feed("{"))
        while (end := scan.until(0, self.rest)) < 0:
            self._write(self._words.feed(self.rest))
            self.rest = ""
            yield
        self._write(self._words.feed(self.rest[:end]))
        self.rest = self.rest[end:]

    def _fields(self, properties: Mapping[str, frozenset[str]]) -> _Steps:
        form, before = self._form, "{"
        end = form.end or form.closing
        while (yield from self._until(form.key_begin, end))[1] == form.key_begin:
            between = form.key_end.split("\n")
            key, _ = yield from self._until(between[0])
            for tag in between[1:]:
                yield from self._until(tag)
            kinds = properties.get(key.strip(), frozenset())
            self._write(f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            if kinds == {"string"}:
                yield from self._string(form.field_end, framed=form.framed)
            else:
                text, _ = yield from self._until(form.field_end)
                self._write(json_of(_unframed(text) if form.framed else text, kinds))
            before = ", "
        self._write("{}" if before == "{" else "}")
        if not form.end:
            self.rest = form.closing + self.rest

    def _string(self, end: str, framed: bool = False) -> _Steps:
        """A text up to `end`, as it comes."""
        self._write('"')
        first = framed
        while True:
            if first and self.rest:
                self.rest, first = self.rest.removeprefix("\n"), False
            at = self.rest.find(end)
            if at >= 0:
                text = self.rest[:at].removesuffix("\n") if framed else self.rest[:at]
                self._write(json.dumps(text, ensure_ascii=False)[1:])
                self.rest = self.rest[at + len(end) :]
                return
            certain = len(self.rest) - begun(self.rest, [f"\n{end}", end] if framed else [end])
            self._write(json.dumps(self.rest[:certain], ensure_ascii=False)[1:-1])
            self.rest = self.rest[certain:]
            yield

    def _literal(self) -> _Steps:
        """A value of Gemma's form: JSON with keys and texts that are quoted otherwise."""
        while not self.rest.strip() or (self.rest.strip() != _QUOTE and _QUOTE.startswith(self.rest.strip())):
            yield
        self.rest = self.rest.lstrip()
        if self.rest.startswith(_QUOTE):
            self.rest = self.rest.removeprefix(_QUOTE)
            yield from self._string(_QUOTE)
        elif self.rest[0] in "{[":
            bracket, self.rest = self.rest[0], self.rest[1:]
            yield from self._items("}" if bracket == "{" else "]", keyed=bracket == "{")
        else:
            text, tag = yield from self._until(",", "}", "]")
            self.rest = tag + self.rest
            self._write(json_of(text, frozenset()))

    def _items(self, end: str, keyed: bool) -> _Steps:
        before = "{" if keyed else "["
        self._write(before)
        while not self.rest.strip():
            yield
        if self.rest.lstrip().startswith(end):
            self.rest = self.rest.lstrip()[1:]
            self._write(end)
            return
        while True:
            if keyed:
                key, _ = yield from self._until(":")
                self._write(json.dumps(key.replace(_QUOTE, "").strip(), ensure_ascii=False) + ": ")
            yield from self._literal()
            _, tag = yield from self._until(",", end)
            self._write(", " if tag == "," else end)
            if tag == end:
                return

    def _write(self, arguments: str) -> None:
        if arguments:
            self.news.append(CallDelta(self.count, None, None, arguments))


def begun(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    sizes = (size for tag in tags for size in range(1, min(len(tag), len(text) + 1)) if text.endswith(tag[:size]))
    return max(sizes, default=0)


def json_of(text: str, kinds: frozenset[str]) -> str:
    """A field's text as JSON, for a schema that takes these kinds of values; none: any kind.

    >>> json_of("12", frozenset({"integer"})), json_of("True", frozenset({"boolean"})), json_of("12", frozenset({"string"}))
    ('12', 'true', '"12"')
    """
    body = mended(text.strip())
    decoded = read_json(body)
    if (decoded is not None or body == "null") and (not kinds or _kind(decoded) & kinds):
        return body
    return json.dumps(text, ensure_ascii=False)


def _kind(value: Any) -> frozenset[str]:
    """JSON Schema's names of a value's kind."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return frozenset({"number", "integer"} if value == int(value) else {"number"}) if abs(value) < 1e300 else frozenset({"number"})  # fmt: skip
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return frozenset({names[type(value)]})


def _properties(schema: Any) -> dict[str, frozenset[str]]:
    """The kinds of values that each property takes."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return (
        {name: kinds_of(property_schema, schema) for name, property_schema in properties.items()}
        if isinstance(properties, dict)
        else {}
    )


def kinds_of(schema: Any, root: Any, depth: int = 4) -> frozenset[str]:
    """The kinds of values that a schema takes; none: it does not say.

    >>> sorted(kinds_of({"anyOf": [{"type": "string"}, {"const": 3}]}, {}))
    ['integer', 'number', 'string']
    """
    if not isinstance(schema, dict) or depth == 0:
        return frozenset()
    if "$ref" in schema:
        target = resolved(schema, root)
        return kinds_of(None if target is schema else target, root, depth - 1)
    kind = schema.get("type")
    if kind is not None:
        kinds_of_value = kind if isinstance(kind, list) else [kind]
        return frozenset(one for one in kinds_of_value if isinstance(one, str))
    if isinstance(choices := schema.get("enum"), list) or "const" in schema:
        return frozenset().union(*map(_kind, choices if isinstance(choices, list) else [schema["const"]]))
    ways: list[Any] = next((schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)), [])
    kinds = [kinds_of(way, root, depth - 1) for way in ways]
    return frozenset().union(*kinds) if kinds and all(kinds) else frozenset()


def resolved(schema: Any, root: Any) -> Any:
    """The schema that a reference within `root` leads to; any other as it is."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    target: Any = root
    for key in reference[2:].split("/"):
        target = target.get(key) if isinstance(target, dict) else None
    return target


def _unframed(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")
