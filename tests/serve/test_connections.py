"""What clients do with a connection: odd targets and lengths, what is no HTTP, too much at once, and leaving early."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

import pdkernels as pd

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
from starlette.requests import Request  # noqa: E402
from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: E402

from pdkernels.serve import Limits, create_app, frontend, replays, tokenizing  # noqa: E402
from pdkernels.serve.errors import FAILED  # noqa: E402
from pdkernels.serve.run import MAX_HEAD, fair  # noqa: E402
from tests.serve.clients import Chatting  # noqa: E402
from tests.serve.conftest import serving  # noqa: E402
from tests.serve.test_serve_command import start  # noqa: E402

JSON = "Content-Type: application/json\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "import", "max_tokens": 2, "temperature": 0})


class Slow:
    """A tokenizer that takes its time with one text."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.entered, self.seconds = inner, False, 0.5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _wait(self, text: str) -> None:
        if "slowly" in text:
            self.entered = True
            time.sleep(self.seconds)

    def encode(self, text: str) -> list[int]:
        self._wait(text)
        ids: list[int] = self._inner.encode(text)
        return ids

    def encode_chat(self, messages: Any, **variables: Any) -> list[int]:
        self._wait(str(messages))
        ids: list[int] = self._inner.encode_chat(messages, **variables)
        return ids


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    """The address of a server whose connections are those of `pdkernels serve`, and its engine."""
    model = pd.models.load("tiny-code")
    model.tokenizer = Slow(Chatting(model.tokenizer))
    with pd.Engine(model, max_new_tokens=400, max_prompt_tokens=64) as engine:
        app = create_app(engine, "tiny")
        with serving(app, http=fair(H11Protocol, 30.0), h11_max_incomplete_event_size=MAX_HEAD) as address:
            yield address, engine


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def exchanged(address: str, sent: bytes) -> bytes:
    """All that comes until the server closes."""
    with connected(address) as connection:
        connection.sendall(sent)
        answer = b""
        with suppress(ConnectionResetError):  # of bytes that nobody read
            while piece := connection.recv(1 << 16):
                answer += piece
    return answer


def request(target: str, host: str = "localhost", more: str = "Connection: close\r\n", body: str = "") -> bytes:
    head = f"{'POST' if body else 'GET'} {target} HTTP/1.1\r\nHost: {host}\r\n{more}"
    return f"{head}{JSON}Content-Length: {len(body)}\r\n\r\n{body}".encode() if body else f"{head}\r\n".encode()


def error_of(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_a_target_may_be_a_whole_url(server: Any) -> None:
    """Servers must take it, and its host is that of the request: RFC 9112, 3.2.2."""
    address, _ = server
    for url in (f"{address}/health", "HTTP://localhost:80/health?a=http://b/c", "https://[::1]/v1/models"):
        answer = exchanged(address, request(url, host="example.org"))
        assert answer.startswith(b"HTTP/1.1 200"), answer
    assert exchanged(address, request("http://localhost")).startswith(b"HTTP/1.1 200")  # the page at /
    completion = exchanged(address, request(f"{address}/v1/completions", body=BODY))
    assert completion.startswith(b"HTTP/1.1 200") and b"text_completion" in completion
    for url in ("http://example.org/health", "http://a@localhost/health", "http:///health"):
        status, words = error_of(exchanged(address, request(url)))
        assert status == 403 and "is not served here" in words
    status, words = error_of(exchanged(address, request(f"{address}/no/such")))
    assert status == 404 and words == "there is no /no/such here"


@pytest.mark.parametrize(
    ("version", "more"),
    [("1.1", f"Content-Length: {len(BODY)}\r\nTransfer-Encoding: chunked\r\n"), ("1.0", "Transfer-Encoding: chunked\r\n")],
)  # fmt: skip
def test_a_body_of_two_lengths_is_refused(server: Any, version: str, more: str) -> None:
    """A proxy before the server may see the other one, and the next request elsewhere: RFC 9112, 6.1."""
    address, _ = server
    chunks = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
    sent = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n{JSON}{more}\r\n{chunks}".encode()
    answer = exchanged(address, sent)
    status, words = error_of(answer)
    assert status == 400 and "Transfer-Encoding" in words and b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00" + b"\x01" * 5000,
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["tls", "hosts", "target", "head", "chunk", "coding", "lengths", "negative"],
)  # fmt: skip
def test_what_is_no_http_is_told_so_in_the_form_of_all_errors(server: Any, sent: bytes, caplog: Any) -> None:
    address, _ = server
    with caplog.at_level(logging.ERROR):
        answer = exchanged(address, sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and b"application/json" in head and b"connection: close" in head.lower()
    assert json.loads(body)["error"]["type"] == "invalid_request_error" and not caplog.records


def test_an_empty_line_before_a_request_is_passed_over(server: Any) -> None:
    """RFC 9112, 2.2; some clients send one behind a body."""
    address, _ = server
    with connected(address) as connection:
        connection.sendall(b"\r\n" + request("/health", more=""))
        answer = b""
        while b"ok" not in answer:
            answer += connection.recv(1 << 16)
        connection.sendall(b"\r\n\r\n" + request("/health"))
        while piece := connection.recv(1 << 16):
            answer += piece
    assert answer.count(b"HTTP/1.1 200") == 2


def test_a_head_as_proxies_send_them(server: Any) -> None:
    address, _ = server
    answer = exchanged(address, request("/health", more=f"Cookie: {'x' * 40_000}\r\nConnection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_client_that_waits_is_refused_before_its_body(server: Any) -> None:
    """With `Expect` nothing of a body has been sent when the head is refused."""
    address, _ = server
    more = "Expect: 100-continue\r\nContent-Length: 100\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: example.org\r\n{JSON}{more}\r\n".encode()
    answer = exchanged(address, head)
    assert (
        answer.startswith(b"HTTP/1.1 403") and b"connection: close" in answer.lower() and b"100 Continue" not in answer
    )


def test_a_refused_request_leaves_its_connection_usable(server: Any) -> None:
    """Its body has been read: the next request of a connection begins behind it."""
    address, _ = server
    wrong = request("/v1/completions", host="example.org", more="", body=BODY * 100)
    with connected(address) as connection:
        connection.sendall(wrong)
        answer = b""
        while b"is not served here" not in answer:
            answer += connection.recv(1 << 16)
        connection.sendall(request("/health"))
        while piece := connection.recv(1 << 16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 403") and answer.count(b"HTTP/1.1 200") == 1


def test_reading_waits_for_what_is_not_parsed_yet() -> None:
    """A client that sends faster than its bytes are parsed would have them pile up."""

    class Whole:
        cycle, conn = None, SimpleNamespace(their_state=None)

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            pass

    class Transport(asyncio.Transport):
        paused = False

        def pause_reading(self) -> None:
            self.paused = True

        def resume_reading(self) -> None:
            self.paused = False

    async def received() -> list[bool]:
        connection, transport = fair(Whole, 60.0)(), Transport()
        connection.loop, connection.flow = asyncio.get_running_loop(), type("Flow", (), {"read_paused": False})()
        connection.connection_made(transport)
        connection.data_received(b"x" * 5000)
        paused = [transport.paused]
        for _ in range(3):
            await asyncio.sleep(0)
        paused.append(transport.paused)
        connection.flow.read_paused = transport.paused = True  # by the application, which has not read the body yet
        connection.data_received(b"x")
        return [*paused, transport.paused]

    assert asyncio.run(received()) == [True, False, True]


def test_requests_behind_a_running_one_do_not_pile_up() -> None:
    """Some may follow; a client that sends megabytes of them is cut off."""
    gone: list[bool] = []

    async def polling(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        asked, deadline = Request(scope, receive), time.monotonic() + 3
        while time.monotonic() < deadline and not await asked.is_disconnected():
            await asyncio.sleep(0.005)
        gone.append(time.monotonic() < deadline)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    one = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(polling, http=fair(H11Protocol, 60.0), lifespan="off") as address, connected(address) as connection:
        connection.sendall(one)
        with pytest.raises(ConnectionError):
            for _ in range(400):
                connection.sendall(one * 1000)
    assert gone[0]


def test_two_requests_at_once_have_their_answers_in_order(server: Any) -> None:
    address, _ = server
    two = request("/v1/completions", more="", body=BODY) + request("/health")
    answer = exchanged(address, two)
    assert answer.count(b"HTTP/1.1 200") == 2 and answer.index(b"text_completion") < answer.index(b"ok\n")


ROUTES = {
    "/v1/completions": {"prompt": "slowly", "max_tokens": 400, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "slowly"}], "max_tokens": 400, "n": 3},
    "/v1/responses": {"input": "slowly", "max_output_tokens": 400},
    "/v1/messages": {"messages": [{"role": "user", "content": "slowly"}], "max_tokens": 400},
    "/replay": {"prompt": "slowly", "max_tokens": 400},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_leaves_before_its_answer_begins_ends_it(server: Any, route: str, stream: bool) -> None:
    """While its prompt is still read: nobody has begun to read the stream that would end it."""
    address, engine = server
    slow, before = engine.model.tokenizer, engine.metrics()
    fields = {
        "stream": stream,
        **ROUTES[route],
        **({} if route == "/replay" else {"model": "tiny", "ignore_eos": True}),
    }
    slow.entered = False
    with connected(address) as connection:
        connection.sendall(request(route, more="", body=json.dumps(fields)))
        deadline = time.monotonic() + 30
        while not slow.entered:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    count = fields.get("n", 1)
    while sum((finished := engine.metrics().finished).values()) < sum(before.finished.values()) + count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert finished.get("cancelled", 0) == before.finished.get("cancelled", 0) + count, finished


def test_an_answer_of_http_1_0_ends_with_its_connection(server: Any) -> None:
    address, _ = server
    for stream in ("false", "true"):
        body = BODY.replace("{", f'{{"stream": {stream}, ', 1)
        head = f"POST /v1/completions HTTP/1.0\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
        answer = exchanged(address, (head + body).encode())
        assert answer.startswith(b"HTTP/1.1 200") and b"chunked" not in answer.lower()
        assert answer.endswith(b"data: [DONE]\n\n" if stream == "true" else b"}")


def test_what_can_be_read_can_be_asked_for_its_head(server: Any) -> None:
    address, _ = server
    made = httpx.post(f"{address}/v1/responses", json={"model": "tiny", "input": "Hi", "max_output_tokens": 1}).json()
    for path in (f"/v1/responses/{made['id']}", "/v1/models/tiny", "/openapi.json", "/health"):
        whole, head = httpx.get(address + path), httpx.head(address + path)
        assert head.status_code == whole.status_code == 200 and head.content == b"", path
        assert head.headers["content-length"] == whole.headers["content-length"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_replay_that_has_no_time_to_begin_says_so(serve: Any, stream: bool) -> None:
    address, _ = serve(limits=Limits(seconds=1e-9))
    answer = httpx.post(f"{address}/replay", json={"prompt": "import", "max_tokens": 3, "stream": stream})
    assert answer.status_code == (200 if stream else 503)
    assert "ended before it began" in json.loads(answer.text.splitlines()[-1])["error"]["message"]


def test_a_replay_that_fails_in_a_stream_is_in_the_log(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fails(*_: Any) -> str:
        raise OSError("no room")

    monkeypatch.setattr(replays, "replay_page", fails)
    address, _ = serve()
    with caplog.at_level(logging.ERROR):
        answer = httpx.post(f"{address}/replay", json={"prompt": "import", "max_tokens": 3, "stream": True})
    assert FAILED in answer.text and "OSError: no room" in caplog.text


def test_too_many_prompts_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch, serve: Any) -> None:
    """Each takes the time of a tokenizer."""
    times: list[Any] = []

    def noted(*arguments: Any) -> Any:
        times.append(arguments)
        return [0], []

    monkeypatch.setattr(frontend, "infilled", noted)
    address, _ = serve()
    body = {"model": "tiny", "prompt": ["a"] * 1000, "suffix": "b", "max_tokens": 1}
    answer = httpx.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == 400 and "at most 16 choices" in answer.json()["error"]["message"] and not times


def test_tokens_are_named_beside_the_loop(monkeypatch: pytest.MonkeyPatch, serve: Any) -> None:
    """Half a million of them take a while, in which other answers go on."""
    threads: list[str] = []
    named = tokenizing.token_texts

    def noted(*arguments: Any) -> list[str]:
        threads.append(threading.current_thread().name)
        return named(*arguments)

    monkeypatch.setattr(tokenizing, "token_texts", noted)
    address, _ = serve()
    answer = httpx.post(f"{address}/tokenize", json={"prompt": "ab", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["a", "b"] and threads[0].startswith("asyncio_")


@pytest.mark.parametrize("raises", [True, False])
def test_a_stream_that_cannot_begin_is_cancelled(server: Any, raises: bool) -> None:
    """Servers of ASGI 2.4 raise where a client has gone, before the first event is read; uvicorn 0.30 says 2.4 and does not."""
    _, engine = server
    app, before = create_app(engine, "tiny"), engine.metrics().finished.get("cancelled", 0)
    body = json.dumps(json.loads(BODY) | {"stream": True, "max_tokens": 400, "ignore_eos": True}).encode()
    scope: Any = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9),
        "headers": [(b"content-type", b"application/json")], "asgi": {"spec_version": "2.4"}, "http_version": "1.1", "scheme": "http",
    }  # fmt: skip

    read = False

    async def receive() -> Any:
        nonlocal read
        if read:
            await asyncio.sleep(30 if raises else 0)
            return {"type": "http.disconnect"}
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(_message: Any) -> None:
        if raises:
            raise OSError

    asyncio.run(app(scope, receive, send))
    deadline = time.monotonic() + 30
    while (seen := engine.metrics()).finished.get("cancelled", 0) == before:
        # Between two lists a request neither waits nor runs.
        assert time.monotonic() < deadline and seen.submitted > sum(seen.finished.values())
        time.sleep(0.01)


def test_a_body_that_is_too_large_is_told_so_after_it_was_sent(server: Any) -> None:
    """Not by a reset connection, for clients that read when they have sent all; the largest are not waited for."""
    address, _ = server
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}"
    for size in (2 << 20, 7 << 20):
        body = b"x" * size
        chunks = b"".join(b"%x\r\n%b\r\n" % (1 << 16, body[: 1 << 16]) for _ in range(size >> 16)) + b"0\r\n\r\n"
        for more, sent in ((f"Content-Length: {size}", body), ("Transfer-Encoding: chunked", chunks)):
            status, words = error_of(exchanged(address, f"{head}{more}\r\n\r\n".encode() + sent))
            assert status == 413 and "at most 1048576 bytes" in words
    expecting = exchanged(address, f"{head}Content-Length: {2 << 20}\r\nExpect: 100-continue\r\n\r\n".encode())
    assert expecting.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"echo": True, "truncate_prompt_tokens": 1}])
@pytest.mark.parametrize("token", [-1, 257, 1 << 31, 1 << 70])
def test_tokens_that_are_none_are_refused_by_their_field(server: Any, extra: Any, token: int) -> None:
    """Whether or not they are shown before the answer."""
    address, _ = server
    if extra.get("truncate_prompt_tokens"):
        extra = {**extra, "prompt": [token, 1]}
    body = json.loads(BODY) | {"prompt": [1, token]} | extra
    error = httpx.post(f"{address}/v1/completions", json=body).json()["error"]
    assert error["param"] == "prompt" and "prompt must hold ids in 0 .. 256" in error["message"]


def test_no_variable_of_a_template_is_called_self(server: Any) -> None:
    address, _ = server
    fields = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    for route, body in (
        ("/v1/chat/completions", fields),
        ("/v1/messages", fields),
        ("/v1/responses", {"model": "tiny", "input": "a"}),
        ("/tokenize", {"messages": fields["messages"]}),
    ):
        error = httpx.post(address + route, json=body | {"chat_template_kwargs": {"self": 1}}).json()["error"]
        assert error["message"] == "chat_template_kwargs: 'self' is no variable of a template", route
        assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("prompt", ["a", [5]], ids=["texts", "ids"])
def test_many_thousand_prompts_are_refused_by_their_number(server: Any, prompt: Any) -> None:
    """Looking at each of them holds up all other requests."""
    address, _ = server
    body = {"model": "tiny", "prompt": [prompt] * 5000, "max_tokens": 1}
    error = httpx.post(f"{address}/v1/completions", json=body).json()["error"]
    assert error["param"] == "prompt" and "a list of at most 4096 texts or lists of ids" in error["message"]


def test_connections_without_a_request_make_room_for_others() -> None:
    """The one that has been without a request for longest goes; those with one stay, however old they are."""
    ending = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/long":
            while not ending.is_set():
                await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def ask(connection: socket.socket, path: str) -> None:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def answer(connection: socket.socket) -> bytes:
        answered = b""
        while not answered.endswith(b"ok") and (piece := connection.recv(4096)):
            answered += piece
        return answered[-2:]

    with serving(app, http=fair(H11Protocol, 60.0, 60.0, 8), lifespan="off") as address, ExitStack() as stack:
        long, used, *others = [stack.enter_context(connected(address)) for _ in range(8)]
        ask(long, "/long")
        for connection in (used, *others, used):
            ask(connection, "/")
            assert answer(connection) == b"ok"
        more = [stack.enter_context(connected(address)) for _ in range(6)]
        assert [connection.recv(1) for connection in others] == [b""] * 6
        for connection in (used, *more):
            ask(connection, "/")
            assert answer(connection) == b"ok"
        ending.set()
        assert answer(long) == b"ok"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="counts files as Linux does")
@pytest.mark.parametrize(
    ("soft", "hard", "most"), [(256, 256, 64), (1024, 4096, 3648), (600, 600, 152), (256, 9000, 8552)]
)
def test_how_many_connections_there_may_be(soft: int, hard: int, most: int) -> None:
    """A limit of few files is raised; of fewer, a quarter is for connections."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"
    code += "; from pdkernels.serve.run import most_connections as most; print(most(), most())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == [str(most)] * 2


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="counts files as Linux does")
def test_more_connections_than_files_keep_nobody_from_an_answer() -> None:
    """And the log has no lines of them."""
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600)); from pdkernels.cli import app; app()"
    )
    process, address = start(command=[sys.executable, "-c", limited, "serve"])
    try:
        with ExitStack() as stack:
            for _ in range(900):
                stack.enter_context(connected(address))
            for _ in range(3):
                answer = httpx.post(
                    f"{address}/v1/completions", json=json.loads(BODY) | {"model": "tiny-code"}, timeout=60
                )
                assert answer.status_code == 200
    finally:
        process.terminate()
        output = process.communicate(timeout=60)[0]
    assert "Too many open files" not in output
