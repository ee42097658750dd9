"""Tokens of texts and chats by HTTP."""

from __future__ import annotations

from typing import Any

import pytest

import pdkernels as pd
from tests.serve.clients import Chatting

pytest.importorskip("fastapi")
ASKED: Any = [{"role": "user", "content": "Hé"}, {"role": "assistant", "content": "So"}]


@pytest.fixture(scope="module")
def client() -> Any:
    from fastapi.testclient import TestClient

    from pdkernels.engine import Engine
    from pdkernels.serve import create_app

    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    with TestClient(create_app(Engine(model, max_new_tokens=64), "tiny")) as one:
        yield one


@pytest.mark.parametrize("route", ["", "/v1"])
def test_texts_and_chats(client: Any, route: str) -> None:
    def tokens(**body: Any) -> Any:
        return client.post(f"{route}/tokenize", json=body).json()

    text = tokens(prompt="né", model="tiny", return_token_strs=True)
    assert text == {"count": 3, "max_model_len": 512, "tokens": [110, 195, 169], "token_strs": ["n", "\\xc3", "\\xa9"]}
    chats = [
        (tokens(messages=ASKED), "<user>Hé<assistant>So<assistant>"),
        (tokens(messages=ASKED, add_generation_prompt=False), "<user>Hé<assistant>So"),
        (tokens(messages=ASKED[:1], chat_template_kwargs={"shout": True}), "<user>Hé!<assistant>"),
        (tokens(messages=ASKED, continue_final_message=True), "<user>Hé<assistant>So"),
        (tokens(messages=ASKED[:1], tools=[{"type": "function", "function": {"name": "get"}}]), "<user>Hé[get]<assistant>"),
    ]  # fmt: skip
    for found, shown in chats:
        assert found["tokens"] == list(shown.encode()) and found["count"] == len(found["tokens"])
        assert client.post(f"{route}/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": shown}


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("tokenize", {}, 400, "either prompt or messages must be given"),
        ("tokenize", {"prompt": "a", "messages": ASKED}, 400, "either prompt or messages must be given"),
        ("tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template is not supported here"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "'other' is not served here"),
        ("tokenize", {"messages": ASKED, "add_special_tokens": True}, 400, "the chat template writes them itself"),
        ("tokenize", {"messages": [{"content": "a"}]}, 400, "messages.0.role must be text"),
        ("detokenize", {"tokens": [999999]}, 400, "tokens must be below"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens.0"),
    ],
)
def test_what_is_refused(client: Any, route: str, body: Any, status: int, words: str) -> None:
    answer = client.post(f"/v1/{route}", json=body)
    assert answer.status_code == status and words in answer.json()["error"]["message"], answer.json()
