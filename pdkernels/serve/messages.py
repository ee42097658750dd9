"""Messages of OpenAI's interface as templates of checkpoints know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdkernels.serve.errors import Refused


def plain(messages: Sequence[Mapping[str, Any]], template: Any) -> list[dict[str, Any]]:
    """Messages with texts for contents: parts of text are joined, since templates differ in whether they take them.

    The role "developer" becomes "system", which it has replaced in OpenAI's interface, unless the template knows it.
    """
    knows = "developer" in str(getattr(template, "source", template))
    found = []
    for place, message in enumerate(messages):
        role, content = message.get("role"), _text(message, f"messages.{place}.content")
        if not isinstance(role, str):
            raise Refused(f"messages.{place}.role must be text", 400, f"messages.{place}.role")
        found.append({**message, "role": "system" if role == "developer" and not knows else role, "content": content})
    return found


def _text(message: Mapping[str, Any], place: str) -> str:
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return ""  # calls have no text beside them
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{place} must be text or a list of parts", 400, place)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Refused(f"{place}: a part of type {kind!r} is not supported; only text is", 400, place)
        texts.append(part["text"])
    return "".join(texts)
