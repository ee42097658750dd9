"""What may come through the gate: hosts, origins, kinds of bodies, their sizes and times; and what becomes of failures."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

import pdkernels as pd

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
from pdkernels.serve import Limits, create_app  # noqa: E402
from pdkernels.serve.errors import FAILED  # noqa: E402
from pdkernels.serve.gate import Gate  # noqa: E402
from pdkernels.serve.run import fair  # noqa: E402
from tests.serve.conftest import serving  # noqa: E402

JSON = {"content-type": "application/json"}


def sent(
    headers: dict[str, str] = JSON,
    server: Any = ("127.0.0.1", 8000),
    method: str = "POST",
    pieces: Any = (b"{}",),
    app: Any = None,
    seconds: float = 60.0,
    **gate: Any,
) -> tuple[int, str, bytes]:
    """The status, the error's message, and the body that the application got, of a request through a gate."""
    got, answers, parts = b"", list[dict[str, Any]](), iter(pieces)

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        nonlocal got
        got = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Any:
        for part in parts:
            return {"type": "http.request", "body": part, "more_body": True}
        if seconds < 1:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        answers.append(message)

    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": "/v1/completions", "headers": fields, "server": server}
    asyncio.run(Gate(app or echo, **{"body": 1000, "seconds": seconds} | gate)(scope, receive, send))
    body = json.loads(b"".join(answer.get("body", b"") for answer in answers))
    return answers[0]["status"], body.get("error", {}).get("message", ""), got


HERE, LAN = ("127.0.0.1", 8000), ("192.168.0.5", 8000)


@pytest.mark.parametrize(
    ("server", "host", "allowed", "status"),
    [
        *((HERE, host, (), 200) for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:9", "[::1]:80", "a.localhost", "localhost.")),
        (("::1", 8000), "[::1]:8000", (), 200),
        (HERE, f"{socket.gethostname()}:8000", (), 200),
        (("::ffff:127.0.0.1", 8000), "example.org", (), 403),
        *((HERE, host, (), 403) for host in ("example.org", "example.org:8000", "192.168.0.5", "localhost.example.org", "", "a@localhost", "[::2]")),
        (("::1", 8000), "example.org", (), 403),
        (LAN, "example.org", (), 200),
        (HERE, "api.example.org:443", ("API.example.org",), 200),
        (HERE, "api.example.org:443", ("api.example.org:443",), 200),
        (HERE, "api.example.org:80", ("api.example.org:443",), 403),
        (HERE, "localhost:8000", ("api.example.org",), 200),
        (LAN, "other.example.org", ("api.example.org",), 403),
        (LAN, "localhost", ("api.example.org",), 403),
        (HERE, "example.org", ("*",), 200),
        (("/run/socket", None), "example.org", (), 200),
        (None, "example.org", (), 200),
    ],
)  # fmt: skip
def test_the_host_of_a_request(server: Any, host: str, allowed: Any, status: int) -> None:
    """At a loopback address it is this machine's, or one that is allowed; by no other name can a page's script get there."""
    code, text, _ = sent({**JSON, "host": host}, server, hosts=allowed)
    assert code == status and (code == 200 or f"the host {host!r} is not served here" in text)
    assert sent({**JSON, "host": host}, server, method="GET", hosts=allowed)[0] == status


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "status"),
    [
        ("http://localhost:8000", "localhost:8000", (), 200),
        ("http://[::1]:8000", "[::1]:8000", (), 200),
        ("http://127.0.0.1", "127.0.0.1:80", (), 200),
        ("https://localhost", "localhost", (), 200),
        ("http://localhost:3000", "localhost:8000", (), 403),
        ("http://127.0.0.1:8000", "localhost:8000", (), 403),
        ("https://example.org", "localhost:8000", (), 403),
        ("null", "localhost:8000", (), 403),
        ("http://localhost:port", "localhost:8000", (), 403),
        ("http://localhost:3000", "localhost:8000", ("http://localhost:3000",), 200),
        ("http://localhost:3001", "localhost:8000", ("http://localhost:3000",), 403),
        ("https://example.org", "localhost:8000", ("*",), 200),
    ],
)
def test_the_origin_of_a_request(origin: str, host: str, allowed: Any, status: int) -> None:
    """A page's script may send requests to the server that the page is from, or if its site is allowed."""
    code, text, _ = sent({**JSON, "host": host, "origin": origin}, origins=allowed)
    assert code == status and (code == 200 or f"pages of {origin!r} may not send requests here" in text)
    assert sent({"host": host, "origin": origin}, method="GET", origins=allowed)[0] == 200  # which changes nothing


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("application/problem+json", 200), ("", 400),
        ("text/plain", 400), ("text/plain; application/json", 400), ("application/x-www-form-urlencoded", 400), ("multipart/form-data", 400),
    ],
)  # fmt: skip
def test_only_json_is_taken(kind: str, status: int) -> None:
    """A browser sends other kinds without asking the server first."""
    code, text, _ = sent({"content-type": kind} if kind else {})
    assert code == status and (code == 200 or "sent with Content-Type: application/json" in text)


def test_a_simple_request_of_another_site_is_refused(serve: Any) -> None:
    """By a server on loopback, whatever version of FastAPI there is; its own page may send."""
    address, _ = serve()
    body = json.dumps({"model": "tiny", "prompt": "import", "max_tokens": 1})
    plain, port = {"Content-Type": "text/plain"}, address.rpartition(":")[2]

    def status(**headers: str) -> int:
        return int(httpx.post(f"{address}/v1/completions", content=body, headers=headers).status_code)

    assert status(**plain) == 400 and status(**plain, Origin="https://example.org") == 403
    assert status(**JSON, Origin="https://example.org") == 403 and status(**JSON, Host="example.org") == 403
    assert status(**JSON) == 200 and status(**JSON, Origin=address) == 200
    assert status(**JSON, Host=f"localhost:{port}", Origin=f"http://localhost:{port}") == 200
    assert httpx.get(f"{address}/v1/models", headers={"Host": "example.org"}).status_code == 403
    other, _ = serve(hosts=["example.org"], origins=["https://example.org"])
    named = {"Host": "example.org", "Origin": "https://example.org"}
    assert httpx.post(f"{other}/v1/completions", content=body, headers={**JSON, **named}).status_code == 200


class Piece(bytes):
    """Counts what a sum copies."""

    copied = 0

    def __radd__(self, before: Any) -> bytes:
        Piece.copied += len(before)
        return bytes(before) + bytes(self)


def test_a_body_in_single_bytes_is_copied_once() -> None:
    code, _, got = sent(pieces=[Piece(b"x")] * 999)
    assert (code, got, Piece.copied) == (200, b"x" * 999, 0)
    assert sent(pieces=[b"x"] * 1001)[0] == 413 and sent({**JSON, "content-length": "1001"}, pieces=[])[0] == 413


def test_a_body_that_does_not_arrive_is_not_waited_for(serve: Any) -> None:
    code, text, _ = sent(seconds=0.01)
    assert code == 408 and text == "the body must arrive within 0.01 seconds"
    address, _ = serve(limits=Limits(body_seconds=0.05))
    host, port = address.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head)
        answer = b""
        while piece := connection.recv(4096):  # until the server closes
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer.lower()


def test_a_client_that_sends_much_at_once_lets_others_in_between() -> None:
    steps: list[int] = []

    class Whole:
        cycle, conn = None, SimpleNamespace(their_state=None)

        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            steps.append(len(data))
            self.loop.call_soon(steps.append, 0)  # another one's turn

    async def received() -> None:
        connection = fair(Whole, 60.0)()
        connection.flow = type("Flow", (), {"read_paused": True})
        connection.connection_made(type("Transport", (asyncio.Transport,), {"pause_reading": lambda _: None})())
        connection.data_received(b"x" * 5000)
        connection.data_received(b"x" * 3000)
        for _ in range(9):
            await asyncio.sleep(0)

    asyncio.run(received())
    assert steps == [2048, 0, 2048, 0, 2048, 0, 1856, 0]


def test_the_head_of_a_request_is_not_waited_for() -> None:
    """Neither the first of a connection nor a later one; a request that has come may take its time."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await asyncio.sleep(0.2)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    with serving(slow, http=fair(H11Protocol, 0.1), lifespan="off") as address:
        host, port = address.removeprefix("http://").split(":")
        for before in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(before)
                if before.endswith(b"\r\n\r\n"):
                    answer = b""
                    while not answer.endswith(b"ok"):
                        answer += connection.recv(4096)
                    connection.sendall(b"GET / HT")
                assert connection.recv(4096) == b""


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system does not close such connections")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_nobody_reads_is_not_kept(stream: bool) -> None:
    """Its connection is closed, and the application hears that the client has gone. A slow reader gets all of it."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    size, pieces, gone = 1 << 24, 1 << 8, threading.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(pieces if stream else 1):
            await send(
                {"type": "http.response.body", "body": b"x" * (size // (pieces if stream else 1)), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b""})
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    with serving(large, http=fair(H11Protocol, 60.0, 0.3), lifespan="off") as address:
        host, port = address.removeprefix("http://").split(":")
        for reads in (True, False):
            gone.clear()
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                received = 0
                while reads and (piece := connection.recv(1 << 20)):
                    received += len(piece)
                    time.sleep(0.02)
                assert received > size or not reads
                assert gone.wait(30)
                with suppress(ConnectionError):  # what the client's own buffers hold
                    while not reads and (piece := connection.recv(1 << 20)):
                        received += len(piece)
                assert reads or received < size


def test_a_body_is_parsed_once(monkeypatch: pytest.MonkeyPatch, app_client: Any) -> None:
    times, loads = list[Any](), json.loads

    def counted(text: Any, **options: Any) -> Any:
        times.append(text)
        return loads(text, **options)

    monkeypatch.setattr(json, "loads", counted)
    content = json.dumps({"model": "tiny", "prompt": "import", "max_tokens": 1}).encode()
    assert app_client.post("/v1/completions", content=content, headers=JSON).status_code == 200
    assert [bytes(text) for text in times if not isinstance(text, str)] == [content]


class Panic(BaseException):
    """What a library in Rust raises when it panics is no Exception either."""


class Failing:
    def __init__(self, inner: Any, error: BaseException) -> None:
        self._inner, self._error = inner, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str) -> list[int]:
        if "fail" in text:
            raise self._error
        encoded: list[int] = self._inner.encode(text)
        return encoded


@pytest.mark.parametrize(
    "error", [Panic("called `Option::unwrap()`\non a `None` value"), RuntimeError("no /secret/file"), KeyError("a"), MemoryError("x" * 9000)], ids=repr
)  # fmt: skip
def test_a_failure_costs_a_line_of_the_log(serve: Any, error: BaseException, caplog: Any, capfd: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Failing(model.tokenizer, error)
    address, _ = serve(model=model)
    body = {"model": "tiny", "prompt": "fail", "max_tokens": 2}
    with caplog.at_level(logging.ERROR):
        answer = httpx.post(f"{address}/v1/completions", json=body)
        assert httpx.post(f"{address}/v1/completions", json={**body, "prompt": "import"}).status_code == 200
    assert answer.status_code == 500 and answer.json()["error"]["message"] == FAILED
    (record,) = caplog.records
    line = record.getMessage()
    assert "\n" not in line and len(line) < 800 and record.exc_info is None
    assert line.startswith(f"POST /v1/completions failed: {type(error).__name__}") and "test_gate.py:" in line
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def app_client() -> Iterator[Any]:
    from fastapi.testclient import TestClient

    from tests.serve.clients import Chatting

    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    with TestClient(create_app(pd.Engine(model, max_new_tokens=64), "tiny"), raise_server_exceptions=False) as client:
        yield client


LONG = "n" * 500_000
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", LONG: 1}}}


@pytest.mark.parametrize(
    "body",
    [
        {LONG: 1}, {"model": LONG}, {"method": LONG}, {"options": {LONG: 1}}, {"options": {"block_size": LONG}, "method": "jacobi"},
        {"stream_options": {LONG: 1}}, {"metadata": {LONG: 1}}, {"logit_bias": {LONG: 1}}, {"user": [LONG]}, {"regex": f"({LONG}"},
        {"choice": [LONG]}, {"tool_choice": LONG}, {"tools": [{LONG: 1}]}, {"tools": [{"type": LONG}]}, {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": LONG}}}, {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
        {"messages": [{LONG: "user"}]}, {"chat_template_kwargs": {"chat_template": LONG}}, {"response_format": {"type": LONG}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": LONG}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": LONG}}}},
        {"chat_template_kwargs": {"tools": LONG}}, {"stop": [LONG]}, {"service_tier": LONG}, {"prompt": [LONG, 1]},
    ],
    ids=lambda body: json.dumps(body).replace(LONG, "LONG")[:60],
)  # fmt: skip
def test_no_error_repeats_a_long_text(app_client: Any, body: dict[str, Any]) -> None:
    route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = app_client.post(route, json=({"model": "tiny"} if "prompt" in body else asked) | body)
    assert answer.status_code in (400, 404) and len(answer.content) < 1500
