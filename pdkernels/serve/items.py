"""Items of OpenAI's `/v1/responses` as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkernels.serve.errors import Refused, shown
from pdkernels.serve.messages import CACHED, arguments_of, check_fields, part

_ITEMS = {
    "message": ("role", "content", "phase"),
    "reasoning": ("summary", "content"),
    "function_call": ("call_id", "name", "arguments", "caller"),
    "function_call_output": ("call_id", "name", "output", "caller"),
}
"""Fields of items. A phase says which part of an answer a message was, and changes no text, nor does who has called."""
_EVERYWHERE = ("type", "id", "status", "internal_chat_message_metadata_passthrough")
"""Fields of every item; the last one is Codex's own."""
_PARTS: dict[str, tuple[str, ...]] = {
    "input_text": CACHED,
    "text": CACHED,
    "output_text": ("annotations", "logprobs"),
    "reasoning_text": (),
    "summary_text": (),
}
"""Fields of parts beside their text, which change none."""


def messages_of(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat from the items of an input. What the model has thought, said and called becomes one
    message.

    >>> call = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"}
    >>> [message["role"] for message in messages_of([{"role": "user", "content": "Hi"}, call])]
    ['user', 'assistant']

    Raises:
        Refused: items of a kind that is not known here.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages = list[dict[str, Any]]()
    for place, item in enumerate(items):
        where, kind = f"input.{place}", item.get("type", "message")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if isinstance(kind, str) and kind in _ITEMS:
            check_fields(item, (*_EVERYWHERE, *_ITEMS[kind]), where)
        if kind == "message":
            content, role = _content(item.get("content"), f"{where}.content"), part(item, "role", where, str)
            if role == "assistant" and last is not None and last.keys() <= {"role", "reasoning_content"}:
                last["content"] = content
            else:
                messages.append({"role": role, "content": content})
        elif kind == "reasoning":
            field = "summary" if item.get("content") in (None, []) else "content"
            contents = [] if item.get(field) is None else item[field]
            messages.append({"role": "assistant", "reasoning_content": _content(contents, f"{where}.{field}")})
        elif kind == "function_call":
            function = {"name": part(item, "name", where, str), "arguments": part(item, "arguments", where, str, "{}")}
            arguments_of(function["arguments"], f"{where}.arguments")
            if last is None:
                last = {"role": "assistant"}
                messages.append(last)
            call = {"id": part(item, "call_id", where, str), "type": "function", "function": function}
            last.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{where}.output")
            call_id = part(item, "call_id", where, str)
            name = part(item, "name", where, str, "")
            messages.append(
                {"role": "tool", "tool_call_id": call_id, "content": content, **({"name": name} if name else {})}
            )
        else:
            raise Refused(f"{where}: an item of type {shown(kind)} is not supported here", 400, where)
    for message in messages:
        if message["role"] == "assistant" and "content" not in message:
            message["content"] = None if message.get("tool_calls") else ""
    return messages


def _content(content: Any, place: str) -> str:
    """The text of an item."""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for number, block in enumerate(content if isinstance(content, list) else [content]):
        kind, text = (block.get("type"), block.get("text")) if isinstance(block, Mapping) else (None, None)
        if not isinstance(kind, str) or kind not in _PARTS or not isinstance(text, str):
            raise Refused(f"{place}: a part of type {shown(kind)} is not supported; only text is", 400, place)
        check_fields(block, ("type", "text", *_PARTS[kind]), f"{place}.{number}")
        texts.append(text)
    return "".join(texts)
