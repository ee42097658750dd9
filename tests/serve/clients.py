"""Clients of a server of `tiny-code`, and a tokenizer with a chat template."""

from __future__ import annotations

from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.models.text.chat import ChatTemplate

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
PROMPTS = ["import os\n", "def f(x):\n    return", "class Node:", "x = [1, 2, 3]\nfor", "a", "print("]


def alone(prompt: Any, limit: int, method: str = "autoregressive", **options: Any) -> str:
    text = generate(pd.models.load("tiny-code"), prompt, method, max_new_tokens=limit, **options).text
    assert isinstance(text, str)
    return text


def client_of(address: str, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60, **options)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% if shout %}!{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Chatting:
    """The byte tokenizer with a chat template."""

    def __init__(self, inner: Any, template: str = TEMPLATE) -> None:
        self._inner, self.chat_template = inner, ChatTemplate(template)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode_chat(self, messages: Any, **variables: Any) -> list[int]:
        ids: list[int] = self._inner.encode(self.chat_template.render(messages, **variables))
        return ids
