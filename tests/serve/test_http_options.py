"""Options of methods over HTTP: none names a file or a model, drafters have the names that the operator gives them, errors speak of HTTP's fields."""

from __future__ import annotations

import builtins
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding import available, find, generate
from pdkernels.serve.errors import in_http_words

pytest.importorskip("fastapi")
from tests.serve.clients import Chatting

CODE: dict[str, Any] = {"model": "tiny", "prompt": "import os\n", "max_tokens": 8, "temperature": 0}


def client_with(model: Any, **options: Any) -> Any:
    from fastapi.testclient import TestClient

    from pdkernels.serve import create_app

    app = create_app(pd.Engine(model, max_new_tokens=64), "tiny", **options)
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A server that offers a drafter named "small"."""
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    with client_with(model, drafters={"small": pd.models.load("tiny-jacobi")}) as made:
        yield made


def test_no_option_of_any_method_names_a_file_or_a_model(client: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing is loaded or looked up, and an answer does not depend on what the disk holds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    touched, values = list[str](), ("./there", "./gone!")

    def watched(name: str, real: Any) -> Any:
        def look(path: Any, *arguments: Any, **more: Any) -> Any:
            if any(value in str(path) for value in values):
                touched.append(f"{name} {path}")
            return real(path, *arguments, **more)

        return look

    for owner, name in [
        (builtins, "open"),
        (Path, "open"),
        (Path, "is_file"),
        (Path, "is_dir"),
        (Path, "exists"),
        (Path, "stat"),
    ]:
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    for module in (pd.models, pd.decoding.causal.draft_model, pd.decoding.causal.eagle, pd.decoding.causal.dflash):
        for name in ("load", "load_drafter"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    walked, taken = 0, set()
    for method in available():
        for option, about in find(method).options.items():
            texts = set()
            routes = ("/v1/completions", "/replay") if option == "drafter" else ("/v1/completions",)
            for value, route in itertools.product(values, routes):
                body: dict[str, Any] = {"prompt": "a", "method": method, "options": {option: value}, "max_tokens": 1}
                answer = client.post(route, json=body | ({"model": "tiny"} if route != "/replay" else {}))
                assert answer.status_code == 400, (method, option, answer.text)
                texts.add(answer.json()["error"]["message"].replace(value, "VALUE"))
            assert len(texts) == 1, (method, option, texts)
            walked += 1
            if option != "drafter" and not re.search("has a field|by HTTP", "".join(texts)):
                taken.add(re.sub(r'Literal\[[^\]]*\]|"[^"]*"', "Literal", about.type))
    assert not touched and walked > 200
    plain = r"(int|float|bool|str|Literal|None|Sequence\[int\])"
    kinds = {kind for kind in taken if not re.fullmatch(rf"{plain}( \| {plain})*", kind)}
    assert kinds <= {"Literal | Callable[..., Any]"}  # of which HTTP has the words


def test_a_drafter_that_is_offered(client: Any) -> None:
    prompt = "import os\n"
    expected = generate(pd.models.load("tiny-code"), prompt, max_new_tokens=8).text
    body: dict[str, Any] = {**CODE, "method": "draft_model"}
    answer = client.post("/v1/completions", json={**body, "options": {"drafter": "small", "block_size": 3}})
    assert answer.json()["choices"][0]["text"] == expected
    assert (
        client.post(
            "/replay", json={"prompt": prompt, "method": "draft_model", "options": {"drafter": "small"}}
        ).status_code
        == 200
    )
    for method, value, words in [
        ("draft_model", "other", "options.drafter must be one of 'small' for method 'draft_model', got 'other'"),
        ("draft_model", ["small"], "options.drafter must be one of 'small' for method 'draft_model', got [\"small\"]"),
        ("draft_model", {"path": "small"}, "options.drafter must be one of 'small'"),
        ("eagle", "small", "options.drafter must be left out: none is offered here for method 'eagle', got 'small'"),
        ("mtp", 1, "none is offered here"),
        ("dflash", True, "none is offered here"),
        ("jacobi", "small", "'drafter' is no option of method 'jacobi'"),
    ]:
        answer = client.post("/v1/completions", json={**body, "method": method, "options": {"drafter": value}})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    none = client.post("/v1/completions", json={**body, "options": {"drafter": None}})
    assert none.status_code == 400 and "requires drafter" in none.json()["error"]["message"]


def test_the_models_own_drafter_needs_no_name() -> None:
    model = pd.models.load("tiny-code")
    model.drafters = {"draft_model": pd.models.load("tiny-jacobi")}
    with client_with(model, method="draft_model") as made:
        expected = generate(pd.models.load("tiny-code"), CODE["prompt"], max_new_tokens=8).text
        for options in ({}, {"drafter": None}):
            assert (
                made.post("/v1/completions", json={**CODE, "options": options}).json()["choices"][0]["text"] == expected
            )


INNER = re.compile(
    r"pdkernels|\b(ints?|floats?|str|bool|dict|tuple|None|NoneType|True|False|Tensor|Sequence|Any|Engine|generate|stop_strings|max_new_tokens|overflow|end_tokens)\b|[`=(]\)?$|Error\b"
)
VALUES: tuple[Any, ...] = ("x", -1, 1.5, 1e30, True, None, [1], ["x"], {"a": 1}, 10**30)


def test_errors_of_options_have_no_inner_names(client: Any) -> None:
    """With every kind of value for every option of the methods that a server runs."""
    errors, options = set(), dict[tuple[str, str], str]()
    for method in available():
        if find(method).steps is not None:
            options |= {(one.name, one.type): method for one in find(method).options.values()}
    for (option, _), method in options.items():
        for value in VALUES:
            body = {**CODE, "max_tokens": 1, "method": method, "options": {option: value}}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code in (200, 400), (method, option, value, answer.text)
            if answer.status_code == 400:
                errors.add(answer.json()["error"]["message"])
    found = {text for text in errors if INNER.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", text))}
    assert not found and len(errors) > 50


def test_errors_of_fields_have_no_inner_names(client: Any) -> None:
    """With every kind of value for every field, and for the fields inside them."""
    from pdkernels.serve import schema

    errors = set()
    inner = {"stream_options": "include_usage", "response_format": "json_schema", "logit_bias": "a", "metadata": "a"}
    for route, kind in (("/v1/completions", schema.CompletionRequest), ("/v1/chat/completions", schema.ChatRequest)):
        base = {
            "model": "tiny",
            **({"messages": [{"role": "user", "content": "a"}]} if "chat" in route else {"prompt": "a"}),
        }
        for field in kind.model_fields:
            for value in VALUES:
                for sent in (value, {inner[field]: value}) if field in inner else (value,):
                    answer = client.post(
                        route, json=({} if "max" in field else {"max_tokens": 1}) | base | {field: sent}
                    )
                    assert answer.status_code in (200, 400, 404), (field, value, answer.text)
                    if answer.status_code != 200:
                        error = answer.json()["error"]
                        errors.add(error["message"])
                        assert error["param"] is None or error["param"].startswith(
                            ("options", field, "messages", "tools")
                        )
    said = {text for text in errors if INNER.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", text)) or "instance of" in text}
    assert not said and len(errors) > 50


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"stop": ["\ufffd"]}, "stop must hold no U+FFFD"),
        ({"stop": ["\ud800"]}, "stop.0"),
        ({"prompt": "\ud800"}, "hold only Unicode characters"),
        ({"prompt": [-1]}, "prompt must hold ids"),
        ({"regex": "a{9}", "max_tokens": 3}, "within max_tokens (3)"),
        ({"logit_bias": {"300": 1}}, "logit_bias must"),
        ({"method": "llada"}, "method must fit the model"),
        ({"method": "jacobi_multiblock"}, "method must let requests join and leave a batch"),
        ({"method": "jakobi"}, "Did you mean 'jacobi'?"),
        ({"provisional": True, "stream": True}, "method must write provisional text"),
        ({"regex": "a", "method": "jacobi", "options": {"temperature": 1}}, "has a field of its own"),
    ],
)
def test_errors_name_the_fields_of_a_request(client: Any, body: Any, words: str) -> None:
    answer = client.post(
        "/v1/completions", content=json.dumps(CODE | body), headers={"Content-Type": "application/json"}
    )
    text = answer.json()["error"]["message"]
    assert ".decode" not in text  # advice for those who write Python
    assert answer.status_code == 400 and words in text, text
    assert not INNER.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", text)), text


def test_words_of_a_request() -> None:
    assert (
        in_http_words("pdkernels.Engine: stop_strings must be strings, got 'max_new_tokens'.")
        == "stop must be strings, got 'max_new_tokens'."
    )
    assert (
        in_http_words("pdkernels.x: a must be b, got None. Did you mean 'c'? Pass d=1.")
        == "a must be b, got null. Did you mean 'c'?"
    )
    assert in_http_words("the choice ['int'] is too long") == "the choice ['int'] is too long"
