"""What a request's template, grammar or hook raises ends it alone; a model that computes nothing ends all, and says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.generation.grammar_rows import GrammarRows
from tests.serve.clients import Chatting

httpx = pytest.importorskip("httpx")
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "import os\n", "max_tokens": 40, "temperature": 0}


def chatting(name: str = "tiny-code", template: str = CHAT) -> Any:
    model = pd.models.load(name)
    model.tokenizer = Chatting(model.tokenizer, template)
    return model


class Beside:
    """Another request, which is under way meanwhile and has its answer."""

    def __init__(self, address: str) -> None:
        self._address, self._answers = address, list[Any]()
        self.expected = self._ask()

    def _ask(self) -> Any:
        return httpx.post(f"{self._address}/v1/completions", json=BODY, timeout=60).json()["choices"]

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=lambda: self._answers.append(self._ask()))
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._thread.join(60)
        assert self._answers == [self.expected] and self._ask() == self.expected


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content.nothing.at.all }}", "{{ 1 // 0 }}", "{% for m in messages %}{{ raise_exception('no') }}{% endfor %}",
     "{{ messages[0].content * 999999999999 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% for a in range(10 ** 12) %}x{% endfor %}"],
)  # fmt: skip
def test_a_template_that_fails_ends_its_request_alone(serve: Any, template: str) -> None:
    address, engine = serve(model=chatting(template=template))
    with Beside(address):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert "template" in answer.json()["error"]["message"]
    assert engine.running


@pytest.mark.parametrize("kind", [KeyError, MemoryError, StopIteration])
@pytest.mark.parametrize("place", ["encode_chat", "encode"])
def test_a_tokenizer_that_fails_ends_its_request_alone(
    serve: Any, kind: type[Exception], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, engine = serve(model=chatting())
    with Beside(address):
        path, body = "completions", {"model": "tiny", "prompt": "a", "max_tokens": 4}
        if place == "encode_chat":
            path, body = "chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        works = getattr(engine.model.tokenizer, place)

        def fails(text: Any, **variables: Any) -> Any:
            if text in ("a", body.get("messages")):
                raise kind("from the tokenizer")
            return works(text, **variables)

        with monkeypatch.context() as patch:
            patch.setattr(engine.model.tokenizer, place, fails, raising=False)
            answer = httpx.post(f"{address}/v1/{path}", json=body, timeout=60)
        assert answer.status_code == 500 and "its log says why" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("at", [0, 3])
def test_a_grammar_that_fails_ends_its_request_alone(serve: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    address, engine = serve(model=chatting())
    draft, calls = GrammarRows.draft, list[None]()

    def fails(self: GrammarRows, *arguments: Any) -> None:
        calls.append(None)
        if len(calls) > at:
            raise OSError("from the grammar")
        draft(self, *arguments)

    monkeypatch.setattr(GrammarRows, "draft", fails)
    with Beside(address):
        answer = httpx.post(f"{address}/v1/completions", json=BODY | {"regex": "[a-z]{20}"}, timeout=60)
        assert answer.status_code == 500 and "its log says why" in answer.json()["error"]["message"], answer.text
    assert engine.running and len(calls) == at + 1


def test_a_model_that_computes_nothing_ends_all_and_health_says_so(serve: Any) -> None:
    model = chatting("tiny-trimode")
    with torch.no_grad():
        model.layers[0].attention_norm.fill_(torch.nan)
    address, _ = serve(model=model)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "17 + 25"}], "max_tokens": 4}
    for path, body in (("chat/completions", chat), ("completions", BODY), ("messages", chat)):
        answer = httpx.post(f"{address}/v1/{path}", json=body, timeout=60)
        assert answer.status_code == 500, answer.text
        assert "the model's logits are NaN whatever the text is" in answer.json()["error"]["message"]
    health = httpx.get(f"{address}/health")
    assert health.status_code == 503 and health.text.startswith("failed: the model's logits are NaN")
