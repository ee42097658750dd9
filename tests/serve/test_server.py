"""The server as clients see it: OpenAI's own, and clients that do everything wrong."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.models.text.chat import ChatTemplate
from pdkernels.serve.messages import plain
from pdkernels.serve.stops import StopCut

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

PROMPTS = ["import os\n", "def f(x):\n    return", "class Node:", "x = [1, 2, 3]\nfor", "a", "print("]


def alone(prompt: Any, limit: int, method: str = "autoregressive", **options: Any) -> str:
    text = generate(pd.models.load("tiny-code"), prompt, method, max_new_tokens=limit, **options).text
    assert isinstance(text, str)
    return text


def client_of(address: str, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60, **options)


def test_completions_of_the_openai_client(serve: Any) -> None:
    address, _ = serve(method="jacobi")
    client = client_of(address)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    for prompt in PROMPTS:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        expected = generate(pd.models.load("tiny-code"), prompt, "jacobi", max_new_tokens=12)
        assert answer.choices[0].text == expected.text
        assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == len(expected.tokens)
        assert answer.choices[0].finish_reason == ("length" if len(expected.tokens) == 12 else "stop")
        pieces = list(client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == expected.text
    several = client.completions.create(model="tiny", prompt=PROMPTS[:3], max_tokens=8, temperature=0, echo=True)
    assert [choice.text for choice in several.choices] == [text + alone(text, 8) for text in PROMPTS[:3]]
    ids = client.completions.create(model="tiny", prompt=list(b"import os\n"), max_tokens=8, temperature=0)
    assert ids.choices[0].text == alone("import os\n", 8)


def test_sampling_and_filters_reach_the_method(serve: Any) -> None:
    address, _ = serve()
    client = client_of(address)
    more = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2}
    answer = client.completions.create(
        model="tiny", prompt="import", max_tokens=16, temperature=0.8, top_p=0.9, seed=5, frequency_penalty=0.5,
        presence_penalty=0.25, logit_bias={"10": -100}, extra_body=more,
    )  # fmt: skip
    expected = alone(
        "import", 16, temperature=0.8, top_p=0.9, seed=5, frequency_penalty=0.5, presence_penalty=0.25,
        logit_bias={10: -100.0}, **more,
    )  # fmt: skip
    assert answer.choices[0].text == expected
    several = client.completions.create(model="tiny", prompt="import", max_tokens=8, temperature=1, n=3, seed=9)
    seeds = [pd.decoding.sequence_seed(9, number) for number in range(3)]
    assert [choice.text for choice in several.choices] == [
        alone("import", 8, temperature=1.0, seed=seed) for seed in seeds
    ]
    other = client.completions.create(
        model="tiny",
        prompt="import",
        max_tokens=8,
        temperature=0,
        extra_body={"method": "jacobi", "options": {"block_size": 4}},
    )
    assert other.choices[0].text == alone("import", 8)
    free = [
        client.completions.create(model="tiny", prompt="a", max_tokens=12, temperature=1).choices[0].text
        for _ in range(4)
    ]
    assert len(set(free)) > 1  # without a seed each is drawn anew


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


def test_chats_of_the_openai_client(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    client = client_of(address)
    messages: Any = [
        {"role": "system", "content": "import os"},
        {"role": "user", "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "f("}]},
    ]
    prompt = "<system>import os<user>def f(<assistant>"
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=10, temperature=0)
    assert answer.choices[0].message.content == alone(prompt, 10) and answer.usage.prompt_tokens == len(prompt)
    tools: Any = [{"type": "function", "function": {"name": "look"}}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=10, temperature=0, tools=tools,
        extra_body={"chat_template_kwargs": {"shout": True}},
    )  # fmt: skip
    assert answer.choices[0].message.content == alone("<system>import os<user>def f([look]!<assistant>", 10)
    pieces = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=10,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == alone(prompt, 10)
    assert pieces[-2].choices[0].finish_reason in ("length", "stop") and pieces[-1].usage.completion_tokens == 10
    with pytest.raises(openai.BadRequestError, match="a part of type 'image_url' is not supported"):
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        client.chat.completions.create(model="tiny", messages=image)


def test_answers_of_a_form(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    client = client_of(address)
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    messages: Any = [{"role": "user", "content": "def f("}]
    for method in ("autoregressive", "jacobi"):
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=60,
            temperature=1,
            seed=3,
            response_format=form,
            extra_body={"method": method},
        )
        found = json.loads(answer.choices[0].message.content)
        assert isinstance(found["age"], int) and isinstance(found["ok"], bool)
    one = client.completions.create(
        model="tiny", prompt="def ", max_tokens=9, temperature=1, extra_body={"choice": ["red", "blue"]}
    )
    assert one.choices[0].text in ("red", "blue") and one.choices[0].finish_reason == "stop"
    two = client.completions.create(
        model="tiny", prompt="def ", max_tokens=9, temperature=1, extra_body={"regex": "[0-9]{3}"}
    )
    assert re.fullmatch("[0-9]{3}", two.choices[0].text)


def test_log_probabilities_of_the_openai_client(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    client = client_of(address)
    answer = client.completions.create(
        model="tiny", prompt="import os", max_tokens=5, temperature=0, logprobs=2
    ).choices[0]
    expected = generate(pd.models.load("tiny-code"), "import os", max_new_tokens=5, logprobs=2)
    assert answer.logprobs.token_logprobs == expected.logprobs.tokens.tolist()
    assert "".join(answer.logprobs.tokens) == answer.text
    assert [max(top.values()) for top in answer.logprobs.top_logprobs] == expected.logprobs.top[:, 0].tolist()
    messages: Any = [{"role": "user", "content": "def f("}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert "".join(one.token for one in chat.logprobs.content) == chat.message.content
    assert all(
        len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob for one in chat.logprobs.content
    )


def test_log_probabilities_are_of_the_text(serve: Any) -> None:
    """Without an end token, without what a stop string cuts off, with the bytes of tokens that are parts of characters."""
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    client = client_of(address)
    options: Any = {"model": "tiny", "prompt": "def ", "max_tokens": 12, "temperature": 0, "logprobs": 1}

    def both(**more: Any) -> Any:
        whole = client.completions.create(**options, **more).choices[0]
        pieces = list(client.completions.create(**options, stream=True, **more))
        assert "".join(piece.choices[0].text for piece in pieces) == whole.text
        assert pieces[-1].choices[0].logprobs == whole.logprobs and pieces[-1].choices[0].finish_reason
        assert all(piece.choices[0].logprobs is None for piece in pieces[:-1])
        assert len(whole.logprobs.tokens) == len(whole.logprobs.token_logprobs) == len(whole.logprobs.top_logprobs)
        return whole

    named = both(extra_body={"choice": ["nä", "nö"]})
    letter = named.text[1]
    first, second = letter.encode()
    assert named.logprobs.tokens == ["n", f"bytes:\\x{first:02x}", f"bytes:\\x{second:02x}"]
    assert named.logprobs.text_offset == [0, 1, 1]
    text = alone("def ", 12)
    cut = both(stop=[text[5:7]])
    assert "".join(cut.logprobs.tokens) == cut.text == text[: text.index(text[5:7])]
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=12, temperature=0, logprobs=True,
        top_logprobs=1, extra_body={"choice": ["nä", "nö"]}, stream=True,
    )  # fmt: skip
    content = [
        one for piece in chat for one in (piece.choices[0].logprobs.content if piece.choices[0].logprobs else [])
    ]
    assert bytes(byte for one in content for byte in one.bytes).decode() in ("nä", "nö")
    assert content[1].token == f"\\x{content[1].bytes[0]:02x}"


def test_a_field_of_a_request_wins_over_the_servers_options(serve: Any) -> None:
    served = {
        "options": {"temperature": 0.9, "top_p": 0.5},
        "sampling": {"temperature": 0.2, "top_k": 3, "repetition_penalty": 1.3},
    }
    address, _ = serve(**served)
    client = client_of(address)

    def text(**fields: Any) -> str:
        made: str = (
            client.completions.create(model="tiny", prompt="import", max_tokens=16, seed=4, **fields).choices[0].text
        )
        return made

    same = {"repetition_penalty": 1.3, "seed": 4}
    assert text() == alone("import", 16, temperature=0.9, top_p=0.5, top_k=3, **same)
    assert text(temperature=2.0) == alone("import", 16, temperature=2.0, top_p=0.5, top_k=3, **same)
    off = {"extra_body": {"top_k": 0, "repetition_penalty": 1.0}}
    assert text(top_p=1.0, **off) == alone("import", 16, temperature=0.9, seed=4)
    assert text(temperature=0.0) == alone("import", 16, repetition_penalty=1.3)
    # Another method has the suggested settings, but not the options of the server's.
    other = alone("import", 16, temperature=0.2, top_k=3, **same)
    assert text(extra_body={"method": "jacobi"}) == other


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_provisional_text_of_a_method_that_fills_positions_in_any_order(serve: Any, chat: bool) -> None:
    model = pd.models.load("tiny-masked")
    prompt = "482 + 967 = ?"
    expected = generate(model, "<user>" + prompt if chat else prompt, "llada", max_new_tokens=12).text
    model.tokenizer = Chatting(model.tokenizer, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    address, _ = serve(model=model, method="llada")
    client = client_of(address)
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "stream": True, "extra_body": {"provisional": True}}
    if chat:
        pieces = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
        news = [piece.choices[0].delta for piece in pieces]
        texts = [new.content for new in news]
    else:
        news = [piece.choices[0] for piece in client.completions.create(prompt=prompt, **options)]
        texts = [new.text for new in news]
    assert "".join(text or "" for text in texts) == expected
    at, shown = 0, 0
    for text, new in zip(texts, news, strict=True):
        at += len(text or "")
        standing = (new.model_extra or {}).get("provisional")
        if standing is not None:
            assert not text
            # A character is a token here, so what stands at a position is what comes there, or nothing.
            written = "".join("\0" if one is None else one for one in standing)
            assert all(one in ("\0", final) for one, final in zip(written, expected[at:], strict=False))
            shown += 1
    assert shown > 0
    several = client.completions.create(prompt=prompt, n=2, seed=1, **options)
    both = ["", ""]
    for piece in several:
        both[piece.choices[0].index] += piece.choices[0].text
    assert both == [
        generate(model, prompt, "llada", max_new_tokens=12, seed=pd.decoding.sequence_seed(1, number)).text
        for number in range(2)
    ]


def test_stop_strings_are_left_out(serve: Any) -> None:
    address, _ = serve()
    client = client_of(address)
    whole = alone("class Node:", 60, end_tokens=())
    stop = whole[20:23]
    expected = whole[: whole.index(stop)]
    options: dict[str, Any] = {"model": "tiny", "prompt": "class Node:", "max_tokens": 60, "temperature": 0}
    answer = client.completions.create(stop=[stop, "no such text"], **options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    pieces = list(client.completions.create(stop=stop, stream=True, **options))
    assert "".join(piece.choices[0].text for piece in pieces) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_is_that_of_the_whole_text(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        text = "".join(chance.choice("ab") for _ in range(chance.randint(0, 12)))
        stops = ["".join(chance.choice("ab") for _ in range(chance.randint(1, 4))) for _ in range(chance.randint(0, 3))]
        ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
        expected = (
            text if not ends else text[: min(text[: ends[0]].find(stop) for stop in stops if stop in text[: ends[0]])]
        )
        cut, at, got = StopCut(stops), 0, ""
        while at < len(text):
            size = chance.randint(1, 3)
            got, at = got + cut.feed(text[at : at + size]), at + size
        assert got + cut.flush() == expected


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
        ({"suffix": "x"}, 400, "suffix is not supported here"),
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
    long = app_client.post("/replay", json={"prompt": "x" * 449, "max_tokens": 6})
    assert long.status_code == 400 and "the prompt has 449 tokens" in long.json()["error"]["message"]
    chat = app_client.post("/replay", json={"prompt": "import os", "chat": True})
    assert chat.status_code == 400 and chat.json()["error"]["param"] == "chat"
    headers = {"Content-Type": "application/json"}
    for content, given, words in [
        (b'{"model": ', headers, "the body is not JSON: Expecting value, at character 10"),
        (b"[" * 9999, headers, "error parsing the body"),
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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_whose_time_is_over_before_it_begins_is_empty(serve: Any, stream: bool) -> None:
    address, _ = serve()
    options: Any = {
        "model": "tiny",
        "prompt": "import",
        "max_tokens": 3,
        "logprobs": 1,
        "extra_body": {"timeout": 1e-9},
    }
    found = client_of(address).completions.create(stream=stream, **options)
    last = (list(found) if stream else [found])[-1].choices[0]
    assert (last.text, last.finish_reason, last.logprobs) == ("", "timeout", None)


def test_fields_that_ask_for_nothing_change_nothing(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    create, options = client_of(address).chat.completions.create, {"model": "tiny", "max_tokens": 10, "temperature": 0}
    messages: Any = [{"role": "user", "content": "def f("}]
    nothing: Any = {
        "user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "metadata": {"d": "e"}, "store": False,
        "service_tier": "auto", "modalities": ["text"], "parallel_tool_calls": True,
    }  # fmt: skip
    answer = create(messages=messages, **options, **nothing)
    assert answer.choices[0].message.content == alone("<user>def f(<assistant>", 10)
    # A probability mass of 0 is that of the likeliest token.
    answer = create(messages=messages, top_p=0, seed=3, **options | {"temperature": 1.5})
    assert answer.choices[0].message.content == alone("<user>def f(<assistant>", 10)


def test_messages_as_openai_has_them(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, TEMPLATE + "{# tool_calls #}")
    address, _ = serve(model=model)
    client = client_of(address)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, temperature=0)
    assert answer.choices[0].message.content == alone("<system>short<user><assistant><tool>4<assistant>", 10)
    for message in ({"content": "a"}, {"role": "user"}, {"role": "user", "content": 5}, {"role": 5, "content": "a"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=[messages[0], message])
        assert refused.value.param == f"messages.1.{'content' if message.get('role') == 'user' else 'role'}"
    knowing = Chatting(pd.models.load("tiny-code").tokenizer, TEMPLATE + "{# developer #}").chat_template
    assert plain(messages[:1], knowing.source)[0]["role"] == "developer"


def test_an_answer_without_a_limit_ends_where_the_model_does(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}")
    most = model.config.max_positions
    address, _ = serve(model=model, engine={"max_new_tokens": 64, "max_prompt_tokens": most})
    create = client_of(address).chat.completions.create
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x" * (most - 5)}], "temperature": 0}
    usage = create(**body, extra_body={"options": {}}).usage
    assert usage.completion_tokens <= 5 and usage.prompt_tokens == most - 5
    with pytest.raises(
        openai.BadRequestError, match=f"takes {most} tokens; the prompt has {most - 5}, and 6 more"
    ) as over:
        create(**body, max_tokens=6)
    assert over.value.code == "context_length_exceeded" and over.value.param == "messages"


def test_many_clients_get_their_own_texts(serve: Any) -> None:
    many(*serve(engine={"max_running": 6, "prompt_tokens_per_step": 8}), clients=8, rounds=3)


def many(address: str, engine: Any, clients: int, rounds: int) -> None:
    """Clients of which some vanish in the middle of a stream, and some read slowly; every text is that of `generate`."""
    expected = {prompt: alone(prompt, 24, end_tokens=None) for prompt in PROMPTS}

    def one(number: int) -> None:
        chance, client = random.Random(number), client_of(address)
        for _ in range(rounds):
            prompt = chance.choice(PROMPTS)
            options: dict[str, Any] = {
                "model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0,
                "extra_body": {"method": chance.choice(["autoregressive", "jacobi"])},
            }  # fmt: skip
            kind = chance.choice(["whole", "stream", "slow", "vanish"])
            if kind == "whole":
                assert client.completions.create(**options).choices[0].text == expected[prompt]
                continue
            got = ""
            for piece in (stream := client.completions.create(stream=True, **options)):
                got += piece.choices[0].text
                if kind == "slow":
                    time.sleep(0.01)
                if kind == "vanish" and got:
                    stream.close()
                    break
            assert expected[prompt].startswith(got) and (kind == "vanish" or got == expected[prompt])

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))
    deadline = time.monotonic() + 30
    while sum((metrics := engine.metrics()).finished.values()) < metrics.submitted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sum(metrics.finished.values()) == metrics.submitted and "error" not in metrics.finished


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of 10 ms."""
    kind = type(pd.models.load("tiny-code"))
    forward = kind.forward

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(kind, "forward", slow)


@pytest.mark.usefixtures("slowly")
def test_a_client_that_hangs_up_ends_its_request(serve: Any) -> None:
    address, engine = serve(engine={"max_new_tokens": 400, "max_prompt_tokens": 64})
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"model": "tiny", "prompt": "import os\n", "max_tokens": 400, "temperature": 0}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        deadline = time.monotonic() + 30
        while engine.metrics().running == 0:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    while not engine.metrics().finished:  # a request leaves its row a moment before it is counted
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert engine.metrics().finished == {"cancelled": 1}


@pytest.mark.usefixtures("slowly")
def test_too_many_requests_and_late_answers(serve: Any) -> None:
    address, engine = serve(engine={"max_running": 1, "max_waiting": 1, "max_new_tokens": 400, "max_prompt_tokens": 64})
    gate = threading.Event()
    first = engine.submit("import", max_new_tokens=3, on_tokens=lambda *_: gate.wait(60))
    while first.joined is None:
        time.sleep(0.001)
    second = engine.submit("import", max_new_tokens=3)
    body = {"model": "tiny", "prompt": "import", "max_tokens": 3}
    full = httpx.post(f"{address}/v1/completions", json=body)
    assert full.status_code == 429 and full.headers["retry-after"] == "1"
    gate.set()
    second.result(60)
    late = httpx.post(
        f"{address}/v1/completions", json=body | {"max_tokens": 400, "timeout": 0.3, "temperature": 0}, timeout=60
    )
    choice = late.json()["choices"][0]
    assert choice["finish_reason"] == "timeout" and 0 < late.json()["usage"]["completion_tokens"] < 60
    assert late.status_code == 200
