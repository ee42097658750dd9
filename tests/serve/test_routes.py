"""What a server refuses, its routes, keys and pages of other hosts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import pdkernels as pd

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
from tests.serve.clients import client_of  # noqa: E402


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "other"}, 404, "'other' is not served here; 'tiny' is"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt must not be empty"),
        ({"prompt": [999999]}, 400, "hold ids in 0"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 65}, 400, "max_tokens must be at most 64 here, got 65"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "NaN"}, 400, "temperature"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"logprobs": 3, "echo": True}, 400, "those of the prompt too, which are not computed"),
        ({"top_p": -0.1}, 400, "top_p"),
        ({"store": True}, 400, "store"),
        ({"prompt": [[]]}, 400, "prompt must not be empty"),
        ({"regex": "(a", "max_tokens": 9}, 400, "regular expression"),
        ({"regex": "a", "choice": ["b"]}, 400, "exclude each other"),
        ({"regex": "(a{1000}){1000}"}, 400, "unfolds to more than"),
        ({"choice": ["a much longer text"]}, 400, "cannot be completed within max_tokens (3)"),
        ({"suffix": "x"}, 400, "this model has no tokens to fill in the middle"),
        ({"prompt": ["a", 1]}, 400, "prompt: must be a text, a list of token ids"),
        ({"prompt": [True]}, 400, "prompt: must be a text, a list of token ids"),
        ({"prompt": [1.0]}, 400, "prompt: must be a text, a list of token ids"),
        ({"no_such": 1}, 400, "no_such is not supported here"),
        ({"n": 1000}, 400, "n"),
        ({"n": 17}, 400, "at most 16 choices"),
        ({"best_of": 3}, 400, "best_of must be n"),
        ({"stop": [""]}, 400, "stop"),
        ({"method": "no_such"}, 400, "method must name a decoding method"),
        ({"method": "llada"}, 400, "fit the model"),
        ({"options": {"block_size": 3}}, 400, "'block_size' is no option of method 'autoregressive'"),
        ({"options": {"temperature": 0.5}}, 400, "'temperature' has a field of its own"),
        ({"options": {"max_new_tokens": 3}}, 400, "'max_new_tokens' is no option of method"),
        ({"options": {"overflow": "warn"}}, 400, "'overflow' is no option of method"),
        ({"logit_bias": {"99999": 1.0}}, 400, "logit_bias"),
        ({"seed": 2**63}, 400, "seed"),
        ({"service_tier": "flex"}, 400, "service_tier: Input should be 'auto' or 'default'"),
        ({"prediction": {}}, 400, "prediction is not supported here"),
        ({"provisional": True}, 400, "provisional text comes in a stream"),
        ({"provisional": True, "stream": True}, 400, "write provisional text, got autoregressive"),
        ({"prompt": "x" * 449, "max_tokens": 1}, 400, "the prompt has 449 tokens; at most 448 are taken here"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_by_name(app_client: Any, body: dict[str, Any], status: int, words: str) -> None:
    answer = app_client.post("/v1/completions", json={"model": "tiny", "prompt": "import", "max_tokens": 3} | body)
    error = answer.json()["error"]
    codes = {"the model": "model_not_found", "the prompt has": "context_length_exceeded"}
    code = next((code for words, code in codes.items() if error["message"].startswith(words)), None)
    assert answer.status_code == status and words in error["message"] and error["code"] == code, error
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.fixture(scope="module")
def app_client() -> Any:
    from fastapi.testclient import TestClient

    from pdkernels.engine import Engine
    from pdkernels.serve import Limits, create_app

    engine = Engine(pd.models.load("tiny-code"), max_new_tokens=64)
    with TestClient(create_app(engine, "tiny", limits=Limits(body=20_000)), raise_server_exceptions=False) as client:
        yield client
    assert not engine.running


def test_counters_in_the_form_of_prometheus(app_client: Any) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    app_client.post("/v1/completions", json={"model": "tiny", "prompt": "import", "max_tokens": 3, "temperature": 0})
    families = {one.name: one for one in parser.text_string_to_metric_families(app_client.get("/metrics").text)}
    assert all(one.documentation and one.type in ("counter", "gauge") for one in families.values())
    values = {sample.name: sample.value for one in families.values() for sample in one.samples}
    assert values["pdkernels_new_tokens_total"] >= 3 and values["pdkernels_running"] == 0
    reasons = {sample.labels["reason"] for sample in families["pdkernels_finished"].samples}
    assert reasons <= {"stop", "length", "cancelled", "timeout", "error"} and "length" in reasons


def test_other_routes(app_client: Any) -> None:
    assert app_client.get("/health").text == "ok\n"
    app_client.post("/v1/completions", json={"model": "tiny", "prompt": "import", "max_tokens": 3, "temperature": 0})
    text = app_client.get("/metrics").text
    assert "pdkernels_new_tokens_total" in text and 'pdkernels_finished_total{reason="length"}' in text
    nothing = {"stop": None, "functions": None, "max_tokens": None, "logprobs": None}  # as some clients write it
    answer = app_client.post("/v1/completions", json={"model": "tiny", "prompt": "import", **nothing})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 16
    assert app_client.get("/v1/models/other").status_code == 404
    shown = app_client.get("/").text
    facts = json.loads(re.search(r'id="facts">(.+?)</script>', shown)[1])
    assert facts["method"] == "autoregressive" and "jacobi" in facts["methods"] and "llada" not in facts["methods"]
    assert (facts["most"], facts["chat"], facts["key"]) == (64, False, False) and "{{" not in shown
    page = app_client.post("/replay", json={"prompt": "import os", "method": "jacobi", "max_tokens": 6})
    assert page.status_code == 200 and page.text.startswith("<!doctype html>")
    asked = {"prompt": "import os", "method": "jacobi", "max_tokens": 6, "stream": True}
    lines = [json.loads(line) for line in app_client.post("/replay", json=asked).text.splitlines()]
    plain = {"model": "tiny", "prompt": "import os", "method": "jacobi", "max_tokens": 6, "temperature": 0}
    expected = app_client.post("/v1/completions", json=plain).json()["choices"][0]["text"]
    assert lines[-1]["page"].startswith("<!doctype html>") and lines[-2] == {"text": expected, "after": []}
    long = app_client.post("/replay", json={"prompt": "x" * 449, "max_tokens": 6})
    assert long.status_code == 400 and "the prompt has 449 tokens" in long.json()["error"]["message"]
    chat = app_client.post("/replay", json={"prompt": "import os", "chat": True})
    assert chat.status_code == 400 and chat.json()["error"]["param"] == "chat"
    headers = {"Content-Type": "application/json"}
    for content, given, words in [
        (b'{"model": ', headers, "the body is not JSON: Expecting value, at character 10"),
        (b"[" * 9999, headers, "it is too deep"),
        (b"[1]", headers, "the body must be a JSON object"),
        (b"", headers, "the body must be a JSON object"),
        (b'{"model": "tiny"}', {"Content-Type": "text/plain"}, "sent with Content-Type: application/json"),
    ]:
        answer = app_client.post("/v1/completions", content=content, headers=given)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] is None
    nowhere, other = app_client.get("/v1/no/such"), app_client.get("/v1/completions")
    assert nowhere.status_code == 404 and nowhere.json()["error"]["message"] == "there is no /v1/no/such here"
    assert other.status_code == 405 and other.json()["error"]["code"] == "method_not_supported"
    assert other.headers["allow"] == "POST"
    assert [app_client.head(path).status_code for path in ("/", "/health", "/v1/models", "/metrics")] == [200] * 4
    packed = app_client.post("/v1/completions", content=b"x", headers=headers | {"Content-Encoding": "gzip"})
    assert packed.status_code == 415 and "Content-Encoding 'gzip'" in packed.json()["error"]["message"]
    assert len(app_client.get("/" + "a" * 9000).text) < 400
    assert (
        app_client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        ).status_code
        == 400
    )
    large = app_client.post("/v1/completions", content=b"x" * 20_001)
    assert large.status_code == 413 and "at most 20000 bytes" in large.json()["error"]["message"]

    def chunks() -> Any:
        for _ in range(30):
            yield b"x" * 1000

    assert app_client.post("/v1/completions", content=chunks()).status_code == 413


def test_a_key_is_asked_for(serve: Any) -> None:
    address, _ = serve(api_key="geheim")
    assert httpx.get(f"{address}/v1/models").status_code == 401
    assert httpx.get(f"{address}/metrics").status_code == 401
    assert httpx.get(f"{address}/health").status_code == 200
    good = openai.OpenAI(base_url=f"{address}/v1", api_key="geheim")
    assert [model.id for model in good.models.list()] == ["tiny"]
    with pytest.raises(openai.AuthenticationError, match="the API key is wrong") as wrong:
        client_of(address).models.list()
    assert wrong.value.code == "invalid_api_key" and wrong.value.response.headers["www-authenticate"] == "Bearer"
    for header, status in [("bearer geheim", 200), ("geheim", 401), ("Basic geheim", 401), ("Bearer", 401), ("", 401)]:
        assert httpx.get(f"{address}/v1/models", headers={"Authorization": header}).status_code == status


def test_pages_of_other_hosts_may_ask_if_they_are_named(serve: Any) -> None:
    """A browser asks first, without the key, whether it may send it."""
    site, name = "http://localhost:3000", "access-control-allow-origin"
    asked = {"Origin": site, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    address, _ = serve(api_key="geheim", origins=[site])
    before = httpx.options(f"{address}/v1/chat/completions", headers=asked)
    assert before.status_code == 200 and before.headers[name] == site
    assert "authorization" in before.headers["access-control-allow-headers"]
    for key, status in (("geheim", 200), ("other", 401)):  # a page may read an error, too
        answer = httpx.get(f"{address}/v1/models", headers={"Origin": site, "Authorization": f"Bearer {key}"})
        assert answer.status_code == status and answer.headers[name] == site
    assert httpx.options(f"{address}/v1/models", headers=asked | {"Origin": "http://elsewhere"}).status_code == 400
    other, _ = serve()
    assert httpx.options(f"{other}/v1/models", headers=asked).status_code == 405
    assert name not in httpx.get(f"{other}/v1/models", headers={"Origin": site}).headers
