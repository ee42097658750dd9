"""Chats as text: the template of a checkpoint, rendered by the optional library `jinja2` in a sandbox.

A template is a program by whoever made the checkpoint. In the sandbox it can reach neither files nor Python internals, changes
nothing, and a text that grows too long is refused; like any program it can still take time and memory.

Source of what templates may use: `utils/chat_template_utils.py` of github.com/huggingface/transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from pdkernels._validation import check, check_type, fail
from pdkernels.models.fields import OP, shown
from pdkernels.models.folder import read_fields, read_text

Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Sequence[Message]

_JINJA, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_MOST = 1 << 22  # characters of a template, and of what it writes
_OP = "ChatTemplate.render"


class ChatTemplate:
    """A template with the special `tokens` that it may name. Errors mention `where`.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}", {"eos_token": "."})
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<user>Hi.'
    """

    def __init__(self, source: str, tokens: Mapping[str, str] = {}, where: str = "chat template") -> None:
        check_type(isinstance(source, str), OP, where, "be text", type(source).__name__)
        check(len(source) <= _MOST, OP, where, f"have at most {_MOST} characters", len(source))
        self.source, self.tokens, self.where = source, dict(tokens), where

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.tokens, self.where)

    def render(self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a chat.

        Args:
            messages: in order, each with a "role" and usually a "content".
            add_generation_prompt: end with the beginning of the model's answer.
            variables: further variables of the template, such as `enable_thinking` or `tools`.

        Raises:
            ValueError: a template that is faulty, refuses these messages, or writes too much.
            TypeError: something that is not a list of messages.
            ImportError: without jinja2.
        """
        check_messages(_OP, "messages", messages)
        known = {**self.tokens, "tools": None, "documents": None, **variables}
        known |= {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        parts, length = [], 0
        try:
            for part in self._compiled.generate(**known):
                parts.append(part)
                length += len(part)
                if length > _MOST:
                    break
        except ImportError:
            raise
        except Exception as error:
            self._fault(error)
        check(length <= _MOST, OP, self.where, f"write at most {_MOST} characters", "more")
        return "".join(parts)

    @cached_property
    def _compiled(self) -> Any:
        try:
            return _environment().from_string(self.source)
        except ImportError as error:
            raise ImportError(
                f"pdkernels.{OP}: {self.where} needs the optional library `jinja2`. "
                "Install it with `pip install 'pdkernels[text]'`, or render the chat yourself and give its text."
            ) from error

    def _fault(self, error: Exception) -> NoReturn:
        words = " ".join(str(error).split()).rstrip(".")
        words = words if len(words) <= 200 else words[:197] + "..."
        fail(OP, self.where, "render the messages", f"{type(error).__name__} ({words})")


def check_messages(op: str, argument: str, messages: Any) -> None:
    """TypeError or ValueError for what is not a list of messages."""
    listed = isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)
    check_type(listed, op, argument, "be a list of messages", type(messages).__name__)
    check(len(messages) > 0, op, argument, "hold at least one message", "an empty list")
    for message in messages:
        words = "hold a 'role' and a 'content'"
        check(isinstance(message.get("role"), str), op, argument, words, f"a message with {sorted(map(str, message))}")


def folder_template(folder: Path) -> ChatTemplate | None:
    """The template of a checkpoint's folder: ``chat_template.jinja``, or that of ``tokenizer_config.json``."""
    fields = read_fields(folder, _CONFIG)
    source, where = read_text(folder, _JINJA), _JINJA
    values = {} if fields is None else fields.values
    if source is None:
        source, where = values.get("chat_template"), f"{_CONFIG}: chat_template"
    if isinstance(source, list):
        # Several named ones; the others are for tools and documents.
        named = {str(item.get("name")): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if source is None:
        return None
    check(isinstance(source, str), OP, where, "be text", shown(source))
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = values.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return ChatTemplate(source, tokens, where)


def _environment() -> Any:
    """The environment of transformers, for which templates are written."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``: marks what a model wrote, for training."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(words: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(words)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
