"""Chats as text: the templates of a checkpoint, rendered by the optional library `jinja2` in a sandbox.

A template is a program written by whoever made the checkpoint. The sandbox denies it access to files and Python
internals, and it cannot change anything. It runs in a separate process with limits on time and memory.

Source of the functions that templates may use: `utils/chat_template_utils.py` of github.com/huggingface/transformers.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from pdkernels._json import parsed_json
from pdkernels._validation import check, check_type, fail, refuse, sentence
from pdkernels.models.files.fields import OP, shown, some
from pdkernels.models.text import template_process

Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Sequence[Message]

_MAX = 1 << 22  # characters of a template, and of its output
_OP = "ChatTemplate.render"
_JINJA = (3, 1, 6)  # templates get out of the sandbox of earlier ones
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
_CONTENT_IS_NONE = re.compile(r"""content\b['"]?\]?\)?\s*(is\s+(not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE)


class ChatTemplate:
    """One template, or several by name, with the special `tokens` that they may name. Errors mention `where`.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}", {"eos_token": "."})
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<user>Hi.'
    """

    def __init__(
        self, source: str | Mapping[str, str], tokens: Mapping[str, str] = {}, where: str = "chat template"
    ) -> None:
        self.named = dict(source) if isinstance(source, Mapping) else None
        sources: dict[str, Any] = {"": source} if self.named is None else self.named
        for name, text in sources.items():
            label = f"{where} {name!r}" if name else where
            check_type(isinstance(text, str), OP, label, "be text", type(text).__name__)
            check(len(text) <= _MAX, OP, label, f"have at most {_MAX} characters", len(text))
        self.source, self.tokens, self.where = source, dict(tokens), where

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.tokens, self.where)

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a chat. All arguments are those of transformers' `apply_chat_template`.

        Templates differ in whether the arguments of a call are an object or JSON text: where one form fails, the other
        is tried.

        Args:
            messages: in order, each with a "role" and usually a "content".
            add_generation_prompt: end with the beginning of the model's answer. None: unless the last message is
                continued.
            continue_final_message: end within the last message, after its content or after the field of this name.
            chat_template: the name of one of several templates. None: with `tools` the one called "tool_use", else
                "default".
            variables: further variables of the template, such as `enable_thinking`, `tools` or `documents`.

        Raises:
            ValueError: a template that is faulty, refuses these messages, or takes too much time or memory.
            TypeError: something that is not a list of messages; tools or documents that are not objects.
            ImportError: without jinja2, or with one before 3.1.6.
        """
        check_messages(_OP, "messages", messages)
        for name in ("tools", "documents"):
            value = variables.setdefault(name, None)
            valid = value is None or (isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value))
            check_type(valid, _OP, name, "be a list of JSON objects", shown(value))
        source = self.chosen(chat_template, variables["tools"])
        continued = "content" if continue_final_message is True else continue_final_message
        prompt = not continued if add_generation_prompt is None else bool(add_generation_prompt)
        check(not (prompt and continued), _OP, "add_generation_prompt", "be False with continue_final_message", True)
        try:
            chat = [_with_reasoning(_plain(_without_none(item, source))) for item in messages]
            context = _plain({**self.tokens, **variables})
        except RecursionError:
            fail(_OP, "messages", "be plain data", "lists or objects too deep inside each other")
        ending = _mark_final(chat[-1], str(continued), source) if continued else None
        self._check_library()
        variables = {**context, "add_generation_prompt": prompt}
        try:
            text = template_process.render(source, {**variables, "messages": chat}, _MAX)
        except template_process.TemplateFault as error:
            if (other := _with_other_arguments(chat)) is None:
                self._fault(error)
            try:
                text = template_process.render(source, {**variables, "messages": other}, _MAX)
            except template_process.TemplateFault:
                self._fault(error)
        check(len(text) <= _MAX, OP, self.where, f"write at most {_MAX} characters", "more")
        return text if ending is None else _cut(text, ending)

    def chosen(self, name: str | None = None, tools: Any = None) -> str:
        """The source of the template of this name, or of the default one for these tools."""
        if self.named is None:
            check(name is None, _OP, "chat_template", "be None where a checkpoint has one template", shown(name))
            return str(self.source)
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.named else "default"
        expectation = f"be one of {some(sorted(self.named), 60)}"
        check(name in self.named, _OP, "chat_template", expectation, shown(name))
        return self.named[name]

    def _check_library(self) -> None:
        how = "Install it with `pip install 'jinja2>=3.1.6'`, or render the chat yourself and give its text."
        try:
            import jinja2
        except ImportError as error:
            raise ImportError(f"pdkernels.{OP}: {self.where} needs the optional library `jinja2`. {how}") from error
        version = tuple(int(number) if number.isdigit() else 0 for number in jinja2.__version__.split(".")[:3])
        if version < _JINJA:
            minimum = ".".join(map(str, _JINJA))
            raise ImportError(
                f"pdkernels.{OP}: {self.where} needs jinja2 {minimum} or newer, since templates get out of the sandbox of "
                f"{jinja2.__version__}. {how}"
            )

    def _fault(self, error: Exception) -> NoReturn:
        reason = " ".join(str(error).split()).rstrip(".")
        reason = reason if len(reason) <= 240 else reason[:237] + "..."
        fail(OP, self.where, "render the messages", reason)


def check_messages(op: str, argument: str, messages: Any) -> None:
    """Raises TypeError or ValueError if this is not a list of messages."""
    are_messages = isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)
    check_type(are_messages, op, argument, "be a list of messages", type(messages).__name__)
    check(len(messages) > 0, op, argument, "hold at least one message", "an empty list")
    for message in messages:
        expectation = "hold a 'role' and a 'content'"
        check(
            isinstance(message.get("role"), str),
            op,
            argument,
            expectation,
            f"a message with {sorted(map(str, message))}",
        )


def _plain(value: Any) -> Any:
    """The value as plain JSON types. An object of another type could give a template more access than it may have."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def asks_for_content(source: str) -> bool:
    """Whether a template asks whether a message's content is none, as those of DeepSeek do where a message has
    calls."""
    return _CONTENT_IS_NONE.search(source) is not None


def _without_none(message: Message, source: str) -> dict[str, Any]:
    """The fields that are not None, as in transformers since 5.23. Beside calls a template that asks for it sees
    `content` as None, as in older versions, for which it was written: it would lose the calls."""
    tested = bool(message.get("tool_calls")) and asks_for_content(source)
    return {name: value for name, value in message.items() if value is not None or (tested and name == "content")}


def _with_other_arguments(chat: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The chat with the arguments of calls as JSON text where they are objects, and as objects where they are text;
    None: it has none. Text with a number that JSON does not have stays text."""
    other, changed = copy.deepcopy(chat), False
    for message in other:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, (list, tuple)) else ():
            function: Any = call.get("function", call) if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, dict):
                function["arguments"], changed = json.dumps(arguments, ensure_ascii=False), True
            elif isinstance(arguments, str):
                try:
                    decoded = parsed_json(arguments)
                except (ValueError, RecursionError):
                    continue
                if isinstance(decoded, dict):
                    function["arguments"], changed = decoded, True
    return other if changed else None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copies reasoning to the usual field names, whichever name the message uses."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_final(message: dict[str, Any], field: str, source: str) -> str:
    """Appends a marker to the text of the last message and returns that text."""
    op, label = _OP, "continue_final_message"
    text: Any = message.get(field)
    check(text is not None, op, label, "name a field of the last message", shown(field))
    fields = [name for name in _REASONING if message.get(name) == text] if field in _REASONING else [field]
    check(any(name in source for name in fields), op, label, "name a field that the template reads", shown(field))
    if isinstance(text, (list, tuple)):
        block = next(
            (
                text_block
                for text_block in reversed(text)
                if isinstance(text_block, dict) and isinstance(text_block.get("text"), str)
            ),
            None,
        )
        if block is None:
            raise ValueError(sentence(op, f"{label} needs a last message with text"))
        text, block["text"] = block["text"], block["text"] + _CONTINUED
        return str(text)
    check_type(isinstance(text, str), op, label, "name a field with text", shown(text))
    message.update(dict.fromkeys(fields, text + _CONTINUED))
    return str(text)


def _cut(text: str, ending: str) -> str:
    """The rendered text up to the marker."""
    mark = _CONTINUED.strip()
    there = ending.strip() in text and mark in text
    refuse(not there, _OP, "continue_final_message needs a template that writes the last message")
    at = text.rindex(mark)
    # A template that strips messages also strips the space at the end of the marker.
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()
