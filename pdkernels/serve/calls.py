"""Calls of tools in an answer: how models write them, and how they are read while the text comes.

Sources: the chat templates of Qwen 2.5 and 3 and of Hermes 2 (`<tool_call>`), of Mistral 7B v0.3 (`[TOOL_CALLS]`), and
of Llama 3.1 to 3.3.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from pdkernels.serve.thoughts import ThoughtForm


class CallForm(NamedTuple):
    """How a model writes calls, each a JSON object with a "name" and arguments."""

    opening: str
    """What comes before a call, or before a list of them."""
    marked: bool
    """Whether a text has `opening`. If not, it is a special token, which texts leave out: an answer that begins with a
    call is one."""
    listed: bool
    """Whether calls are the items of a JSON array."""
    several: bool
    """Whether an answer may have more than one."""
    between: str
    """What separates two calls."""
    closing: str
    """What comes after each call, or after the list of them."""
    arguments: str
    """The key of the arguments."""


HERMES = CallForm("<tool_call>\n", True, False, True, "\n", "\n</tool_call>", "arguments")
MISTRAL = CallForm("[TOOL_CALLS]", False, True, True, ", ", "", "arguments")
LLAMA = CallForm("<|python_tag|>", False, False, False, "; ", "", "parameters")
PLAIN = CallForm("", False, False, False, "", "", "arguments")
"""Of a model that is not known to write calls, and is made to write one."""


def form_of(template: str) -> CallForm | None:
    """The form of a chat template's calls; None: it is not known here.

    >>> form_of("{% for t in tools %}..{% endfor %} <tool_call>\\n{\\"name\\": .., \\"arguments\\": ..}") is HERMES
    True
    """
    if "<tool_call>" in template and "arguments" in template and not re.search("<function=|<arg_key>", template):
        return HERMES
    if "[TOOL_CALLS]" in template and not re.search(r"\[ARGS\]|\[CALL_ID\]", template):
        return MISTRAL
    if '"parameters": ' in template and re.search(r"<\|python_tag\|>|ipython", template):
        return LLAMA
    return None


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


def joined(deltas: Collection[CallDelta]) -> list[dict[str, Any]]:
    """Calls as an answer has them that is not streamed.

    >>> joined([CallDelta(0, "a", "look", "{"), CallDelta(0, None, None, "}")])
    [{'id': 'a', 'type': 'function', 'function': {'name': 'look', 'arguments': '{}'}}]
    """
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.number not in calls:
            calls[delta.number] = {name: value for name, value in delta.written().items() if name != "index"}
        else:
            calls[delta.number]["function"]["arguments"] += delta.arguments
    return list(calls.values())


class _Scan:
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


News = list[str | CallDelta]


class CallParser:
    """Reads a text piece by piece: what is a call, and what is text. A call that is none, since it is no JSON or names
    nothing, stays text. So do calls inside a thought, which the model only considers.

    The pieces do not matter: texts and calls are those of the whole text. Spaces before a call are part of neither.

    >>> parser = CallParser(HERMES, ["add"], None)
    >>> parser.feed("Let me see. <tool")
    ['Let me see.']
    >>> [(one.name, one.arguments) for one in parser.feed('_call>{"name": "add", "arguments": {"a"')]
    [('add', ''), (None, '{"a"')]
    >>> parser.feed(": 1}}</tool_call>"), parser.flush(), parser.count
    ([CallDelta(number=0, id=None, name=None, arguments=': 1}')], [], 1)
    """

    def __init__(
        self,
        form: CallForm,
        names: Collection[str],
        most: int | None,
        thoughts: Sequence[ThoughtForm] = (),
        thought: ThoughtForm | None = None,
    ) -> None:
        """Args:
        form: of the calls.
        names: of the tools. Without an opening in the text, only a call of one of them is one.
        most: calls, after which nothing is read; None: any number.
        thoughts: forms of thoughts.
        thought: the form of the one in which the text begins.
        """
        self._form, self._names, self._most = form, names, most
        self._thoughts = {one.opening: one.closing for one in thoughts}
        self._thought_end = thought.closing if thought else ""
        self._opening, self._closing = form.opening.strip(), form.closing.strip()
        self._head = re.compile(
            rf'\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{form.arguments}"\s*:\s*(?=\{{)', re.DOTALL
        )
        self.count = 0
        """Calls that are complete."""
        self._state: Callable[[News], bool] = self._thought if thought else self._text
        self._buffer = ""
        self._written = False  # whether there was text since the last call
        self._raw = self._object = ""  # what becomes text if it is no call
        self._scan = _Scan(0)

    @property
    def over(self) -> bool:
        """Whether it has all calls that it reads."""
        return self.count == self._most

    @property
    def unfinished(self) -> bool:
        """Whether the text so far ends inside a call."""
        begun = self._state in (self._begin, self._name) and self._form.marked
        return begun or self._state in (self._arguments, self._rest)

    @property
    def held(self) -> str:
        """Text that may become a tag."""
        return self._buffer if self._state in (self._text, self._thought) else ""

    def feed(self, text: str) -> News:
        """What is new and certain."""
        self._buffer += text
        news: News = []
        while not self.over and self._state(news):
            pass
        return news

    def mark(self, tag: str) -> News:
        """What is new and certain after the tag of a thought that is a special token, which texts leave out."""
        news: News = []
        begins = tag in self._thoughts and self._state not in (self._thought, self._arguments, self._rest)
        if begins or (self._state == self._thought and tag == self._thought_end):
            self._pass(self._raw + self._buffer, news)  # what has begun there is no call
            self._raw, self._buffer, self._written = "", "", self._written and begins
            self._thought_end, self._state = self._thoughts.get(tag, ""), self._thought if begins else self._text
        return news

    def flush(self) -> News:
        """What was held back, once no more comes."""
        tail, self._buffer = self._buffer, ""
        if self.over or self._state not in (self._text, self._thought, self._begin, self._name):
            return []
        if self._state in (self._begin, self._name):
            tail = self._raw + tail
        return [tail] if tail and (tail.strip() or self._written or not self.count) else []

    # The states. Each takes from the buffer what it knows of, and returns whether another one can go on.

    def _text(self, news: News) -> bool:
        buffer, tags = self._buffer, [tag for tag in (self._opening, *self._thoughts) if tag]
        if not (self._form.marked or self._written or self.count):
            body = buffer.lstrip(" \t\r\n")
            if not body or any(tag.startswith(body) for tag in tags):
                return False
            if body[0] == ("[" if self._form.listed else "{") and not body.startswith(tuple(tags)):
                self._raw, self._buffer, self._state = buffer[: len(buffer) - len(body)], body, self._begin
                return True
        at, tag = min(((at, tag) for tag in tags if (at := buffer.find(tag)) >= 0), default=(-1, ""))
        if tag in self._thoughts:
            self._pass(buffer[: at + len(tag)], news)
            self._buffer, self._thought_end, self._state = buffer[at + len(tag) :], self._thoughts[tag], self._thought
            return True
        if tag:
            before = buffer[:at].rstrip()
            self._pass(before, news)
            end = at + len(tag)
            self._raw, self._buffer, self._state = buffer[len(before) : end], buffer[end:], self._begin
            return True
        certain = buffer[: len(buffer) - _begun(buffer, tags)].rstrip()
        self._buffer = buffer[len(certain) :]
        self._pass(certain, news)
        return False

    def _thought(self, news: News) -> bool:
        at = self._buffer.find(self._thought_end)
        end = len(self._buffer) - _begun(self._buffer, [self._thought_end]) if at < 0 else at + len(self._thought_end)
        self._pass(self._buffer[:end], news)
        self._buffer = self._buffer[end:]
        if at >= 0:
            self._written, self._state = False, self._text  # the answer begins here
        return at >= 0

    def _begin(self, news: News) -> bool:
        """Before the first call, or the next one of a list."""
        body = self._buffer.lstrip()
        self._raw += self._buffer[: len(self._buffer) - len(body)]
        self._buffer = body
        if body.startswith("[") and self._form.listed and self._raw.strip() in ("", self._opening):
            self._raw, self._buffer = self._raw + "[", body[1:]
            return True
        if body.startswith("{"):
            self._object, self._scan, self._state = "", _Scan(0), self._name
            return True
        return bool(body) and self._fail(news)

    def _name(self, news: News) -> bool:
        """Inside a call, before its arguments."""
        end = self._scan.until(0, self._buffer)
        complete = end >= 0
        chunk, self._buffer = (self._buffer[:end], self._buffer[end:]) if complete else (self._buffer, "")
        self._object += chunk
        self._raw += chunk
        if head := self._head.match(self._object):
            name, tail = _read(head[1]), self._object[head.end() :]
            self._raw, self._buffer = self._raw[: len(self._raw) - len(tail)], tail + self._buffer
            if not self._known(name):
                return self._fail(news)
            news.append(CallDelta(self.count, self._id(), name, ""))
            self._scan, self._state = _Scan(1), self._arguments
            return True
        if not complete:
            return False
        call = _read(self._object)
        name = call.get("name") if isinstance(call, dict) else None
        if not self._known(name):
            return self._fail(news)
        keys = (self._form.arguments, "arguments", "parameters")
        arguments: Any = next((call[key] for key in keys if call.get(key) is not None), {})
        news.append(CallDelta(self.count, self._id(), name, _arguments(arguments)))
        return self._end()

    def _arguments(self, news: News) -> bool:
        end = self._scan.until(1, self._buffer)
        piece = self._buffer if end < 0 else self._buffer[:end]
        self._buffer = self._buffer[len(piece) :]
        if piece:
            news.append(CallDelta(self.count, None, None, piece))
        if end < 0:
            return False
        self._state = self._rest
        return True

    def _rest(self, news: News) -> bool:
        """Behind the arguments: other fields of the call, of which there is no need."""
        end = self._scan.until(0, self._buffer)
        self._buffer = "" if end < 0 else self._buffer[end:]
        return end >= 0 and self._end()

    def _after(self, news: News) -> bool:
        """Behind a call: the end of the list, another call, or text."""
        body = self._buffer.lstrip()
        mark = "]" if self._form.listed else self._closing
        separator = self._form.between.strip()
        if not body or (mark != body and mark.startswith(body)):
            return False
        if mark and body.startswith(mark):
            self._buffer, self._state = body[len(mark) :], self._text
        elif separator and body.startswith(separator):
            self._raw, self._buffer, self._state = separator, body[len(separator) :], self._begin
        elif body.startswith("{"):  # of a marked form: another call in the same tags
            self._state = self._begin
        else:
            self._state = self._text
        return True

    # What the states share

    def _end(self) -> bool:
        self.count += 1
        self._raw, self._written, self._state = "", False, self._after
        return True

    def _fail(self, news: News) -> bool:
        """It was no call."""
        self._pass(self._raw, news)
        self._raw, self._state = "", self._text
        return True

    def _pass(self, text: str, news: News) -> None:
        if text:
            news.append(text)
            self._written = True

    def _known(self, name: Any) -> bool:
        return isinstance(name, str) and bool(name) and (self._form.marked or name in self._names)

    def _id(self) -> str:
        if self._form == MISTRAL:  # whose template takes no other
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _begun(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    sizes = (size for tag in tags for size in range(1, min(len(tag), len(text) + 1)) if text.endswith(tag[:size]))
    return max(sizes, default=0)


def _arguments(arguments: Any) -> str:
    """Arguments as JSON. Some models write them as text that is JSON already, or null for none.

    >>> _arguments('{"a": 1}'), _arguments("null"), _arguments("Rome")
    ('{"a": 1}', '{}', '"Rome"')
    """
    if isinstance(arguments, str):
        value = _read(arguments)
        if value is not None:
            return arguments
        arguments = {} if arguments.strip() in ("", "null") else arguments
    return json.dumps(arguments, ensure_ascii=False)


def _read(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
