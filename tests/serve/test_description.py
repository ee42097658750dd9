"""What the server says of itself at `/openapi.json`; `make fuzz-http` asks it everything that it says there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.clients import httpx

jsonschema = pytest.importorskip("jsonschema")
STREAMING = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}


@pytest.fixture
def asked(serve: Any) -> Any:
    address, _ = serve()
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


def test_every_route_is_described(asked: Any) -> None:
    found = asked.get("/openapi.json").json()
    for path in (
        *STREAMING,
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/models",
        "/health",
        "/metrics",
        "/",
    ):
        assert path in found["paths"]
    names = [operation["operationId"] for operations in found["paths"].values() for operation in operations.values()]
    assert len(set(names)) == len(names)
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"] and "default" in operation["responses"]
            assert ("text/event-stream" in operation["responses"]["200"]["content"]) == (path in STREAMING)


def test_models_are_those_that_are_served(asked: Any) -> None:
    schemas = asked.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == ["tiny"]
    assert schemas["TokenizeRequest"]["properties"]["model"]["enum"] == ["tiny", None]


@pytest.mark.parametrize(
    "body", [{"model": "tiny"}, {"model": "other", "prompt": "a"}, {"model": "tiny", "prompt": "a", "no_such": 1}]
)
def test_errors_have_the_form_that_is_described(asked: Any, body: dict[str, Any]) -> None:
    schemas = asked.get("/openapi.json").json()["components"]["schemas"]
    answer = asked.post("/v1/completions", json=body)
    assert answer.status_code in (400, 404)
    jsonschema.Draft202012Validator(schemas["Error"]).validate(answer.json())


def test_unknown_fields_are_null_as_described(asked: Any) -> None:
    schema = asked.get("/openapi.json").json()["components"]["schemas"]["DetokenizeRequest"]
    for value, status in ((None, 200), (1, 400)):
        body = {"tokens": [97], "no_such": value}
        assert asked.post("/v1/detokenize", json=body).status_code == status
        assert jsonschema.Draft202012Validator(schema).is_valid(body) == (status == 200)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/", {"GET", "HEAD"}),
        ("PUT", "/v1/responses/resp_1", {"GET", "HEAD", "DELETE"}),
        ("GET", "/v1/completions", {"POST"}),
    ],
)
def test_methods_that_a_route_takes_are_named(asked: Any, method: str, path: str, allowed: set[str]) -> None:
    answer = asked.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed


def test_a_body_that_is_no_json_is_still_refused(asked: Any) -> None:
    for content, kind in ((b"{}", "text/plain"), (b"{}", ""), (b"", "text/plain")):
        answer = asked.post("/v1/completions", content=content, headers={"Content-Type": kind} if kind else {})
        assert answer.status_code == 400 and "Content-Type" in answer.json()["error"]["message"]
    assert asked.post("/v1/completions").status_code == 400
