"""Calls of tools in an answer: how models write them.

Sources: the chat templates of Qwen 2.5 and 3 and of Hermes 2 (`<tool_call>`), of Mistral 7B v0.3 (`[TOOL_CALLS]`), and
of Llama 3.1 to 3.3; and those of `tagged`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from pdkernels.serve.tagged import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GLM,
    HARMONY_CALLS,
    KIMI,
    QWEN_CODER,
    CallDelta,
    TaggedForm,
)


class JsonForm(NamedTuple):
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

    @property
    def openings(self) -> tuple[str, ...]:
        """Tags before calls."""
        return (self.opening.strip(),) if self.opening else ()


CallForm = JsonForm | TaggedForm
HERMES = JsonForm("<tool_call>\n", True, False, True, "\n", "\n</tool_call>", "arguments")
MISTRAL = JsonForm("[TOOL_CALLS]", False, True, True, ", ", "", "arguments")
LLAMA = JsonForm("<|python_tag|>", False, False, False, "; ", "", "parameters")
PLAIN = JsonForm("", False, False, False, "", "", "arguments")
"""Of a model that is not known to write calls, and is made to write one."""


def form_of(template: str) -> CallForm | None:
    """The form of a chat template's calls; None: it is not known here.

    >>> form_of("{% for t in tools %}..{% endfor %} <tool_call>\\n{\\"name\\": .., \\"arguments\\": ..}") is HERMES
    True
    """
    if "<tool_call>" in template:
        if "<function=" in template:
            return QWEN_CODER
        if "<arg_key>" in template:
            return GLM
    for form in (DEEPSEEK_V3, KIMI, GEMMA4):
        if form.openings[0] in template:
            fenced = form is not DEEPSEEK_V3 or "```json" in template
            return form if fenced else DEEPSEEK_V31
    if "<|channel|>" in template and "functions." in template:
        return HARMONY_CALLS
    if "<tool_call>" in template and "arguments" in template:
        return HERMES
    if "[TOOL_CALLS]" in template and not re.search(r"\[ARGS\]|\[CALL_ID\]", template):
        return MISTRAL
    if '"parameters": ' in template and re.search(r"<\|python_tag\|>|ipython", template):
        return LLAMA
    return None


def several(form: CallForm) -> bool:
    """Whether an answer may have more than one call."""
    return form.several if isinstance(form, JsonForm) else form is not HARMONY_CALLS


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
