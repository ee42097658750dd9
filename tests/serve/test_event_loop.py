"""What takes longer for a large request or a long answer does not run on the event loop, where all others wait for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.serve.json_text import parsed_json, written_json
from tests.serve.clients import Chatting
from tests.serve.test_fields import CHAT, MESSAGES, RESPONSES, TEMPLATE, TEXT, TOKENIZE

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from pdkernels.serve import create_app

ASKED: Any = [{"role": "user", "content": "def "}]
TOOLS: Any = {"tools": [{"type": "function", "name": "get"}], "tool_choice": "none"}
LIKELY: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
FUNCTIONS = {
    "frontend": ("infilled", "plain"),
    "responses": ("messages_of", "written_json", "_dumped"),
    "messages_api": ("chat_messages",),
    "log_probs": ("written", "offsets_of"),
    "tokenizing": ("token_texts",),
    "gate": ("written_json",),
    "answers": ("written_json",),
}


class Watched:
    """A tokenizer that remembers what of it runs on an event loop."""

    def __init__(self, inner: Any, seen: dict[str, bool]) -> None:
        self._inner, self._seen = inner, seen

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return value if name == "incremental" or not callable(value) else watched(value, name, self._seen)


def watched(function: Any, name: str, seen: dict[str, bool]) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            asyncio.get_running_loop()
            on_loop = True
        except RuntimeError:
            on_loop = False
        seen[name] = seen.get(name, False) or on_loop
        return function(*arguments, **options)

    return call


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (TEXT, {"prompt": "def ", "max_tokens": 4, "logprobs": 2}),
        (TEXT, {"prompt": [100, 101], "max_tokens": 4, "echo": True}),
        (TEXT, {"prompt": "def ", "max_tokens": 4, "logprobs": 2, "stream": True}),
        (CHAT, {"messages": ASKED, "max_tokens": 4, **LIKELY}),
        (CHAT, {"messages": ASKED, "max_tokens": 4, **LIKELY, "stream": True}),
        (RESPONSES, {"input": ASKED, "max_output_tokens": 4}),
        (RESPONSES, {"input": ASKED, "max_output_tokens": 4, "stream": True, "store": False, **TOOLS}),
        (MESSAGES, {"messages": ASKED, "max_tokens": 4}),
        (f"{MESSAGES}/count_tokens", {"messages": ASKED}),
        (TOKENIZE, {"prompt": "def ", "return_token_strs": True}),
        (TOKENIZE, {"messages": ASKED}),
        ("/detokenize", {"tokens": [100, 101]}),
    ],
)
def test_what_runs_beside_the_event_loop(route: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dict[str, bool]()
    model = pd.models.load("tiny-code")
    model.tokenizer = Watched(Chatting(model.tokenizer, TEMPLATE), seen)
    for module, names in FUNCTIONS.items():
        for name in names:
            place = f"pdkernels.serve.{module}"
            function = getattr(__import__(place, fromlist=[name]), name)
            monkeypatch.setattr(f"{place}.{name}", watched(function, name, seen))
    with TestClient(create_app(pd.Engine(model, max_new_tokens=8), "tiny")) as client:
        answer = client.post(route, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
    assert seen and not any(seen.values()), seen


def test_a_long_body_is_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dict[str, bool]()
    monkeypatch.setattr("pdkernels.serve.bodies.parsed_json", watched(parsed_json, "parsed_json", seen))
    with TestClient(create_app(pd.Engine(pd.models.load("tiny-code"), max_new_tokens=8), "tiny")) as client:
        assert client.post(TEXT, json={"model": "tiny", "prompt": [100] * 9000}).status_code == 400
    assert seen == {"parsed_json": False}


def test_metrics_wait_for_the_engine_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock may be held for a while."""
    seen, engine = dict[str, bool](), pd.Engine(pd.models.load("tiny-code"), max_new_tokens=8)
    monkeypatch.setattr(engine, "metrics", watched(engine.metrics, "metrics", seen))
    with TestClient(create_app(engine, "tiny")) as client:
        assert "pdkernels_running" in client.get("/metrics").text
    assert seen == {"metrics": False}


@pytest.mark.parametrize(
    "value",
    [
        {}, [], None, "é\ud83d", [{}], {"a": []}, {"a": {"b": [[1, 2.5], {"c": None}]}, "d": True}, [*range(200)],
        [{"a": [*range(130)], "b": [{"c": [1]}] * 70}], (1, (2, 3)), {1: "a", None: {2: 3}}, [[[[[[[[1]]]]]]]],
    ],
)  # fmt: skip
def test_json_in_pieces_is_the_same(value: Any) -> None:
    assert written_json(value) == json.dumps(value, separators=(",", ":"))


def test_what_is_no_json_is_refused_in_pieces_too() -> None:
    for value in ([1.0] * 100 + [float("nan")], {"a": [{"b": float("inf")}]}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            written_json(value)
