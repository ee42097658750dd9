"""Reads the text of an answer while it comes: what is thought, what is a call of a tool, and what is text."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pdkernels.serve.calls import MISTRAL, CallForm, JsonForm
from pdkernels.serve.json_text import JsonWords, members, mended, read_json
from pdkernels.serve.tagged import CallDelta, Scan, TaggedReader, begun
from pdkernels.serve.thoughts import ThoughtForm


class Thought(str):
    """A piece of a thought."""


News = list[str | Thought | CallDelta]


class AnswerParser:
    """Reads a text piece by piece: what is thought, what is a call, and what is text. A call that is none, since it is no
    JSON or names nothing, stays text. So do calls inside a thought, which the model only considers: they are part of it.

    The pieces do not matter: thoughts, texts and calls are those of the whole text. Spaces before a call are part of
    neither, nor are those at the ends of a thought.

    >>> from pdkernels.serve.calls import HERMES
    >>> from pdkernels.serve.thoughts import THINK
    >>> parser = AnswerParser(HERMES, {"add": {}}, thoughts=(THINK,))
    >>> parser.feed("<think>Let me see.</thi"), parser.feed("nk> So <tool")
    (['Let me see.'], ['So'])
    >>> [(one.name, one.arguments) for one in parser.feed('_call>{"name": "add", "arguments": {"a"')]
    [('add', ''), (None, '{"a"')]
    >>> parser.feed(": 1}}</tool_call>"), parser.flush(), parser.count
    ([CallDelta(number=0, id=None, name=None, arguments=': 1}')], [], 1)
    """

    def __init__(
        self,
        form: CallForm | None,
        schemas: Mapping[str, Any] = {},
        most: int | None = None,
        thoughts: Sequence[ThoughtForm] = (),
        thought: ThoughtForm | None = None,
        split: bool = True,
        special: Collection[str] = (),
    ) -> None:
        """Args:
        form: of the calls; None: there are none.
        schemas: of the tools' parameters, by their names. Without an opening in the text, only a call of one of them is
            one.
        most: calls, after which nothing is read; None: any number.
        thoughts: forms of thoughts.
        thought: the form of the one in which the text begins.
        split: whether thoughts come apart from the text; else they are part of it, with their tags.
        special: opening tags of thoughts that are special tokens: what has begun before one is no call.
        """
        self._form, self._schemas, self._most, self._split = form, schemas, most, split
        self._special = special
        self._thoughts = {one.opening: one.closing for one in thoughts}
        self._silent = [tag for one in thoughts for tag in one.silent] if split else []
        self._thought_end = thought.closing if thought else ""
        self._openings: Collection[str] = form.openings if form is not None else ()
        json_form = form if isinstance(form, JsonForm) else None
        self._closing = json_form.closing.strip() if json_form else ""
        self._between = json_form.between.strip() if json_form else ""
        self._listed, self._marked = bool(json_form and json_form.listed), json_form is None or json_form.marked
        self._key = json_form.arguments if json_form else ""
        self._head = re.compile(rf'\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{self._key}"\s*:\s*(?=\{{)', re.DOTALL)
        self.count = 0
        """Calls that are complete."""
        self._state: Callable[[News], bool] = self._thought if thought else self._text
        self._buffer = ""
        self._written = False  # whether there was text since the last call
        self._begins = thought is not None  # whether spaces are left out that come next
        self._ended = False
        self._raw = self._object = ""  # what becomes text if it is no call
        self._scan, self._words = Scan(0), JsonWords()
        self._reader: TaggedReader | None = None

    @property
    def over(self) -> bool:
        """Whether it has all calls that it reads."""
        return self.count == self._most

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._state == self._thought

    @property
    def unfinished(self) -> bool:
        """Whether the text so far ends inside a call."""
        if self._state == self._tagged:
            return self._reader is not None and not self._reader.tail
        begun = self._state in (self._begin, self._name) and self._marked
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

    def flush(self) -> News:
        """What was held back, once no more comes."""
        self._ended = True
        news = self.feed("")
        tail, self._buffer = self._buffer, ""
        reader = self._reader if self._state == self._tagged else None
        word = reader.held if reader else self._words.held if self._state == self._arguments else ""
        if word and not self.over:
            news.append(CallDelta(self.count, None, None, word))
        if self.over or self._state in (self._arguments, self._rest, self._after):
            return news
        if self._state in (self._begin, self._name):
            tail = self._raw + tail
        elif self._state == self._tagged and self._reader is not None:
            lost = self._reader.tail or self._reader.begun
            tail = "" if lost else self._raw + self._reader.raw
        if tail and (tail.strip() or self._written or not (self.count or self._begins)):
            news.append(Thought(tail) if self.thinking and self._split else tail)
        return news

    # The states. Each takes from the buffer what it knows of, and returns whether another one can go on.

    def _text(self, news: News) -> bool:
        buffer, tags = self._buffer, [*self._openings, *self._thoughts, *self._silent]
        if self._begins and not (buffer := buffer.lstrip()):
            return False
        self._buffer = buffer
        if not (self._marked or self._written or self.count):
            body = buffer.lstrip(" \t\r\n")
            if not body or any(tag.startswith(body) for tag in tags):
                return False
            if body[0] == ("[" if self._listed else "{") and not body.startswith(tuple(tags)):
                self._raw, self._buffer, self._state = buffer[: len(buffer) - len(body)], body, self._begin
                return True
        at, tag = self._first(tags)
        end = at + len(tag)
        if not tag:
            certain = buffer[:at] if self._form is None else buffer[:at].rstrip()
            self._buffer = buffer[len(certain) :]
            self._pass(certain, news)
            return False
        if tag in self._openings:
            before = buffer[:at].rstrip()
            self._pass(before, news)
            self._raw, self._buffer, self._state = buffer[len(before) : end], buffer[end:], self._begin
            if self._form is not None and not isinstance(self._form, JsonForm):
                self._reader, self._state = (
                    TaggedReader(self._form, self._schemas, self.count, self._most),
                    self._tagged,
                )
            return True
        if tag not in self._thoughts:  # it is left out; what comes may be a call, so spaces wait
            before = buffer[:at].rstrip()
            self._pass(before, news)
            self._buffer = buffer[len(before) : at] + buffer[end:]
            return True
        before = buffer[: at if self._split else end]
        self._pass(before if before.strip() or self._written or not self._split else "", news)
        self._buffer, self._begins, self._thought_end = buffer[end:], True, self._thoughts[tag]
        self._state = self._thought
        return True

    def _first(self, tags: Collection[str]) -> tuple[int, str]:
        """The place of the next tag, and the tag; "": of what may become one."""
        buffer, nearest = self._buffer, (len(self._buffer), "")
        for tag in tags:
            at = buffer.find(tag)
            if at >= 0 and (at, -len(tag)) < (nearest[0], -len(nearest[1])):
                nearest = at, tag
        if self._ended:
            return nearest
        at, tag = nearest
        if any(len(longer) > len(tag) and longer.startswith(buffer[at:]) for longer in tags if tag):
            return at, ""
        return nearest if tag else (len(buffer) - begun(buffer, [*tags]), "")

    def _thought(self, news: News) -> bool:
        buffer, closing = self._buffer, self._thought_end
        at = buffer.find(closing)
        if not self._split:
            end = len(buffer) - begun(buffer, [closing]) if at < 0 else at + len(closing)
            self._pass(buffer[:end], news)
            self._buffer = buffer[end:]
        else:
            if self._begins:
                body = buffer.lstrip()
                at = at - (len(buffer) - len(body)) if at >= 0 else at
                buffer = body
            text = (buffer[: len(buffer) - begun(buffer, [closing])] if at < 0 else buffer[:at]).rstrip()
            self._begins = self._begins and not text
            if text:
                news.append(Thought(text))
            self._buffer = buffer[len(text) if at < 0 else at + len(closing) :]
        if at >= 0:
            self._written, self._state = False, self._text  # the answer begins here
            self._begins = self._split
        return at >= 0

    def _tagged(self, news: News) -> bool:
        """Behind the opening tag of a form with tags."""
        reader = self._reader
        assert reader is not None
        reader.feed(self._buffer)
        self._buffer = ""
        for delta in reader.news:
            news.append(delta._replace(id=delta.id or self._id()) if delta.name is not None else delta)
        reader.news.clear()
        if reader.count > self.count:
            self.count, self._raw, self._written = reader.count, "", False
        if reader.over:
            self._buffer, self._state = reader.rest, self._text
        elif reader.failed:
            self._buffer = reader.raw
            self._fail(news)
        return reader.over or reader.failed

    def _begin(self, news: News) -> bool:
        """Before the first call, or the next one of a list."""
        body = self._buffer.lstrip()
        self._raw += self._buffer[: len(self._buffer) - len(body)]
        self._buffer = body
        if body.startswith("[") and self._listed and self._raw.strip() in ("", *self._openings):
            self._raw, self._buffer = self._raw + "[", body[1:]
            return True
        if body.startswith("{"):
            self._object, self._scan, self._state = "", Scan(0), self._name
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
            name, tail = read_json(head[1]), self._object[head.end() :]
            self._raw, self._buffer = self._raw[: len(self._raw) - len(tail)], tail + self._buffer
            if not self._known(name):
                return self._fail(news)
            news.append(CallDelta(self.count, self._id(), name, ""))
            self._scan, self._words, self._state = Scan(1), JsonWords(), self._arguments
            return True
        thoughts = [at for tag in self._special if (at := self._raw.find(tag)) >= 0]
        if thoughts:
            self._raw, self._buffer = self._raw[: min(thoughts)], self._raw[min(thoughts) :] + self._buffer
            return self._fail(news)
        if not complete:
            return False
        text = mended(self._object)
        call = read_json(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not self._known(name):
            return self._fail(news)
        keys = (self._key, "arguments", "parameters")
        key = next((key for key in keys if call.get(key) is not None), None)
        arguments = "{}" if key is None else _arguments(call[key], members(text)[key])
        news.append(CallDelta(self.count, self._id(), name, arguments))
        return self._end()

    def _arguments(self, news: News) -> bool:
        end = self._scan.until(1, self._buffer)
        piece = self._buffer if end < 0 else self._buffer[:end]
        self._buffer = self._buffer[len(piece) :]
        if certain := self._words.feed(piece):
            news.append(CallDelta(self.count, None, None, certain))
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
        mark, separator = "]" if self._listed else self._closing, self._between
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
            self._written, self._begins = True, False

    def _known(self, name: Any) -> bool:
        return isinstance(name, str) and bool(name) and (self._marked or name in self._schemas)

    def _id(self) -> str:
        if self._form == MISTRAL:  # whose template takes no other
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _arguments(arguments: Any, written: str) -> str:
    """Arguments as JSON, as they are written. Some models write them as text that is JSON already, or null for none.

    >>> _arguments({"a": 1.1}, '{"a": 1.10}'), _arguments("null", '"null"'), _arguments("Rome", '"Rome"')
    ('{"a": 1.10}', '{}', '"Rome"')
    """
    if not isinstance(arguments, str):
        return written
    as_json = mended(arguments)
    if read_json(as_json) is not None:
        return as_json
    return "{}" if arguments.strip() in ("", "null") else json.dumps(arguments, ensure_ascii=False)
