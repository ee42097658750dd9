"""Many clients at once, clients that hang up, and answers that are late."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import pdkernels as pd

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
from tests.serve.clients import PROMPTS, alone, client_of  # noqa: E402


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
