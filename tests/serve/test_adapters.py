"""Adapters over HTTP: named as the model or in a field, listed, unknown ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding import Grammar, generate
from pdkernels.engine.pages import Memory
from pdkernels.models.text.chat import ChatTemplate
from tests.support.lora import random_adapter

pytest.importorskip("fastapi")
from tests.serve.clients import Chatting
from tests.serve.test_http_options import CODE, client_with


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    for seed, name in enumerate(("poems", "org/laws")):
        pd.models.load_adapter(
            model, name, random_adapter(model, tmp_path_factory.mktemp("adapter"), 8, seed, size=0.2)
        )
    with client_with(model, allow_unload=True) as made:
        made.served = model
        yield made


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({}, None),
        ({"model": "poems"}, "poems"),
        ({"adapter": "org/laws"}, "org/laws"),
        ({"model": "org/laws", "adapter": "org/laws", "method": "jacobi"}, "org/laws"),
    ],
)
def test_named_in_a_request(client: Any, fields: dict[str, Any], adapter: str | None) -> None:
    answer = client.post("/v1/completions", json=CODE | fields)
    assert answer.status_code == 200 and answer.json()["model"] == fields.get("model", "tiny")
    expected = generate(client.served, CODE["prompt"], adapter=adapter, max_new_tokens=8)
    assert answer.json()["choices"][0]["text"] == expected.text
    plain = generate(client.served, CODE["prompt"], max_new_tokens=8)
    assert (expected.text == plain.text) == (adapter is None)


def test_chats_and_other_routes(client: Any) -> None:
    messages = [{"role": "user", "content": "import os"}]
    limits = {"max_tokens": 8, "temperature": 0}
    texts = [
        client.post("/v1/chat/completions", json={"model": name, "messages": messages, **limits}).json()
        for name in ("tiny", "poems")
    ]
    first, second = (answer["choices"][0]["message"]["content"] for answer in texts)
    assert first != second
    answer = client.post("/v1/messages", json={"model": "poems", "messages": messages, **limits}).json()
    assert answer["model"] == "poems" and answer["content"][0]["text"] == second
    body = {"model": "poems", "input": "import os", "max_output_tokens": 8, "temperature": 0}
    answer = client.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == second
    assert client.post("/v1/tokenize", json={"model": "poems", "prompt": "a"}).json()["tokens"] == [97]


def test_listed(client: Any) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [
        ("tiny", None),
        ("poems", "tiny"),
        ("org/laws", "tiny"),
    ]
    assert client.get("/v1/models/org/laws").json() == listed[2]


@pytest.mark.parametrize(
    ("fields", "status", "parameter", "words"),
    [
        (
            {"model": "prose"},
            404,
            "model",
            "the model 'prose' is not served here; 'tiny' and 'poems' and 'org/laws' are",
        ),
        ({"adapter": "prose"}, 404, "adapter", "'prose' is not served here, 'poems' and 'org/laws' can be named"),
        ({"adapter": "/etc"}, 404, "adapter", "'/etc' is not served here"),
        ({"adapter": ["poems"]}, 400, "adapter", "must be a text"),
        ({"adapter": ""}, 400, "adapter", "at least 1 character"),
        ({"model": "poems", "adapter": "org/laws"}, 400, "adapter", "model and adapter name two adapters"),
    ],
)
def test_unknown_ones(client: Any, fields: dict[str, Any], status: int, parameter: str, words: str) -> None:
    answer = client.post("/v1/completions", json=CODE | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, parameter) and words in error["message"]
    assert error["code"] == ("model_not_found" if status == 404 else None)


def test_unloaded_while_it_is_served(client: Any, tmp_path: Path) -> None:
    engine = client.app.state.engine
    engine.load_adapter("brief", random_adapter(client.served, tmp_path / "brief", 4, 9))
    assert client.post("/v1/completions", json=CODE | {"model": "brief"}).status_code == 200
    engine.unload_adapter("brief")
    assert client.post("/v1/completions", json=CODE | {"model": "brief"}).status_code == 404
    assert client.get("/v1/models/brief").status_code == 404


def test_unloaded_while_the_grammar_of_a_request_is_compiled(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, works = client.app.state.engine, Grammar.regex
    engine.load_adapter("brief", random_adapter(client.served, tmp_path / "brief", 4, 9))

    def unloads(source: str) -> Any:
        engine.unload_adapter("brief")
        return works(source)

    monkeypatch.setattr(Grammar, "regex", unloads)
    answer = client.post("/v1/completions", json=CODE | {"model": "brief", "regex": "[a-z]{3}"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_not_unloaded_between_the_parts_of_an_answer(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thought has ended, and what goes on after its budget is not submitted yet."""
    engine, refusals = client.app.state.engine, list[int]()
    engine.load_adapter("brief", random_adapter(client.served, tmp_path / "brief", 4, 9))
    submit, template = engine.submit, ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' }}")

    def submitted(*arguments: Any, **options: Any) -> Any:
        if options.get("after") is not None:
            assert options["after"].done
            refusals.append(client.delete("/v1/models/brief").status_code)
        return submit(*arguments, **options)

    monkeypatch.setattr(engine, "submit", submitted)
    monkeypatch.setattr(client.served.tokenizer, "chat_template", template)
    body = {"model": "brief", "messages": [{"role": "user", "content": "import"}], "max_tokens": 30, "ignore_eos": True}
    answer = client.post("/v1/chat/completions", json=body | {"thinking_token_budget": 4})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 30, answer.text
    assert refusals == [409]
    assert client.delete("/v1/models/brief").status_code == 200


def test_unloaded_while_a_request_is_submitted(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prepare = client.app.state.engine, Memory.prepare
    engine.load_adapter("brief", random_adapter(client.served, tmp_path / "brief", 4, 9))

    def unloads(*arguments: Any) -> Any:
        engine.unload_adapter("brief")
        return prepare(*arguments)

    monkeypatch.setattr(Memory, "prepare", unloads)
    answer = client.post("/v1/completions", json=CODE | {"model": "brief"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_deleted_over_http(client: Any, tmp_path: Path) -> None:
    """Not while a request uses it, and not the model itself."""
    engine, path = client.app.state.engine, "/v1/models/org/brief"
    engine.load_adapter("org/brief", random_adapter(client.served, tmp_path / "brief", 4, 9))
    before = client.get("/v1/models").json()["data"]
    entered, released = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        entered.set()
        assert released.wait(60)

    handle = engine.submit(CODE["prompt"], adapter="org/brief", max_new_tokens=4, on_tokens=wait)
    assert entered.wait(60)
    answer = client.delete(path)
    released.set()
    assert answer.status_code == 409 and "requests use 'org/brief'" in answer.json()["error"]["message"]
    handle.result(60)
    answer = client.delete(path)
    assert answer.status_code == 200
    assert answer.json() == {"id": "org/brief", "object": "model", "deleted": True}
    assert client.get("/v1/models").json()["data"] == [one for one in before if one["id"] != "org/brief"]
    assert client.post("/v1/completions", json=CODE | {"model": "org/brief"}).status_code == 404
    assert client.delete(path).status_code == 404
    answer = client.delete("/v1/models/tiny")
    assert answer.status_code == 400 and "only its adapters can be deleted" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json=CODE).status_code == 200


def test_nobody_deletes_what_others_use_unless_the_server_says_so(client: Any) -> None:
    with client_with(client.served) as others:
        answer = others.delete("/v1/models/poems")
        assert answer.status_code == 403 and "--allow-unload" in answer.json()["error"]["message"]
        assert others.get("/v1/models/poems").status_code == 200


def test_a_model_is_not_called_like_an_adapter(client: Any) -> None:
    from pdkernels.serve import create_app

    with pytest.raises(ValueError, match="the model and an adapter are both called 'poems'"):
        create_app(client.app.state.engine, "poems")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--adapter", "poems"], "--adapter must be NAME=PATH, got 'poems'"),
        (["--adapter", "a=x", "--adapter", "a=y"], "--adapter must name each adapter once"),
        (["--adapter", "tiny-code=x"], "--adapter must not have the model's name"),
        (["--adapter", "a=./gone"], "adapter must be a folder that exists"),
        (["--option", "adapter=a"], "adapter"),
    ],
)
def test_the_command(arguments: list[str], words: str) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from pdkernels.cli import app

    result = CliRunner().invoke(app, ["serve", "--model", "tiny-code", "--port", "18237", *arguments])
    assert result.exit_code == 2 and words in " ".join(result.output.split())
