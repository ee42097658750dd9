"""Grammars of requests are compiled aside: a slow one costs only those who ask for it, and nobody waits for one that nobody asks for."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding import Grammar
from pdkernels.grammar.budget import current

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from pdkernels.engine import EngineFull  # noqa: E402
from pdkernels.serve import compiling, create_app, run  # noqa: E402
from pdkernels.serve.compiling import GrammarPool  # noqa: E402
from pdkernels.serve.errors import Refused  # noqa: E402
from tests.serve.clients import Chatting  # noqa: E402
from tests.serve.test_serve_command import free_port  # noqa: E402


def slow(number: int) -> dict[str, Any]:
    """A harmless schema that is refused after a million steps; others have other numbers."""
    levels = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    return {
        "$defs": {**levels, "d40": {"type": "integer"}},
        "title": str(number),
        "type": ["integer", "string"],
        "not": {"$ref": "#/$defs/d0"},
    }


def endless() -> Grammar:
    """A compile that looks whether somebody still waits for it, and never ends."""
    budget = current()
    while True:
        budget.spend(1000)
        budget.steps = 0
        budget._next = 0


def quick() -> Grammar:
    return Grammar.choice(["yes", "no"])


def with_pool(test: Callable[[GrammarPool], Awaitable[None]], size: int = 1) -> None:
    """A test with a pool, which must have no thread at work at the end."""

    async def whole() -> None:
        pool = GrammarPool(lambda grammar: size, 60.0)
        try:
            await asyncio.wait_for(test(pool), 60)
            await idle(pool)
        finally:
            pool.close()

    asyncio.run(whole())


async def idle(pool: GrammarPool, running: int = 0, waiting: int = 0) -> None:
    while pool.counts != (running, waiting):
        await asyncio.sleep(0.005)


async def left(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_who_leaves_ends_the_compile() -> None:
    async def test(pool: GrammarPool) -> None:
        asking = asyncio.create_task(pool.get("a", endless, None))
        await idle(pool, 1)
        await left(asking)
        await idle(pool)
        with pytest.raises(Refused, match="within the request's 0.05 seconds") as caught:
            await pool.get("a", endless, 0.05)
        assert caught.value.status == 408
        assert (await pool.get("a", quick, None)).matches("yes")

    with_pool(test)


def test_requests_for_the_same_share_a_compile() -> None:
    async def test(pool: GrammarPool) -> None:
        go, made = threading.Event(), list[int]()

        def make() -> Grammar:
            made.append(1)
            assert go.wait(60)
            return quick()

        first, second, third = (asyncio.create_task(pool.get("a", make, None)) for _ in range(3))
        await idle(pool, 1)
        await left(first)
        go.set()
        assert await second is await third and await second is await pool.get("a", endless, None)
        assert made == [1]

    with_pool(test)


def test_a_free_thread_is_for_others() -> None:
    async def test(pool: GrammarPool) -> None:
        hog = asyncio.create_task(pool.get("a", endless, None))
        await idle(pool, 1)
        assert (await pool.get("b", quick, None)).matches("no")
        other = asyncio.create_task(pool.get("c", endless, None))
        await idle(pool, 2)
        waits = asyncio.create_task(pool.get("d", quick, None))
        await idle(pool, 2, 1)
        assert (await pool.get("b", endless, None)).matches("no")  # an earlier one waits for no thread
        await left(hog)
        assert (await waits).matches("no")
        await left(other)

    with_pool(test)


def test_the_queue_and_what_is_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_MAX_WAITING", 1)
    monkeypatch.setattr(compiling, "_MAX_KEPT", 10)

    async def test(pool: GrammarPool) -> None:
        hogs = [asyncio.create_task(pool.get(name, endless, None)) for name in "ab"]
        await idle(pool, 2)
        waits = asyncio.create_task(pool.get("c", quick, None))
        await idle(pool, 2, 1)
        with pytest.raises(EngineFull, match="1 grammars wait"):
            await pool.get("d", quick, None)
        for hog in hogs:
            await left(hog)
        first = await waits
        assert first is await pool.get("c", endless, None)
        await pool.get("d", quick, None)
        await pool.get("e", quick, None)
        assert first is not await pool.get("c", quick, None)  # 3 times 5 bytes are more than 10

    with_pool(test, size=4)


def test_errors_are_those_of_the_grammar() -> None:
    async def test(pool: GrammarPool) -> None:
        with pytest.raises(ValueError, match="no text satisfies"):
            await pool.get("a", lambda: Grammar.json_schema(False), None)
        assert (await pool.get("a", quick, None)).matches("no")

    with_pool(test)


def test_a_pool_that_is_closed_waits_for_nothing() -> None:
    async def test(pool: GrammarPool) -> None:
        asking = [asyncio.create_task(pool.get(name, endless, None)) for name in "abc"]
        await idle(pool, 2, 1)
        pool.close()
        for one in [*asking, asyncio.create_task(pool.get("d", quick, None))]:
            with pytest.raises(Refused, match="the server is stopping") as caught:
                await one
            assert caught.value.status == 503

    with_pool(test)


def test_stuck_threads() -> None:
    async def test(pool: GrammarPool) -> None:
        hogs = [asyncio.create_task(pool.get(name, endless, None)) for name in "ab"]
        await idle(pool, 2)
        pool._seconds = -1.0  # all compiles are late
        assert not pool.stuck
        waits = asyncio.create_task(pool.get("c", quick, None))
        await idle(pool, 2, 1)
        assert pool.stuck
        for hog in hogs:
            await left(hog)
        await waits
        assert not pool.stuck

    with_pool(test)


def serve_chats(port: int) -> None:
    """A server of a tiny model with a chat template, as a process runs it."""
    model: Any = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    with pd.Engine(model, max_new_tokens=64) as engine:
        run(create_app(engine, "tiny"), port=port)


def test_a_server_answers_others_and_stops_while_it_compiles() -> None:
    """Eight slow schemas, of which two are compiled at a time."""
    port = free_port()
    command = [sys.executable, "-c", f"from tests.serve.test_compiling import serve_chats; serve_chats({port})"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    address, message = f"http://127.0.0.1:{port}", {"role": "user", "content": "x"}
    body = {"model": "tiny", "messages": [message], "max_tokens": 4, "temperature": 0}

    def ask(number: int, patience: float = 60, **more: Any) -> Any:
        form = {"type": "json_schema", "json_schema": {"name": "slow", "schema": slow(number)}}
        asked = {**body, "response_format": form, **more}
        return httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=patience)

    def health() -> str:
        return str(httpx.get(f"{address}/health", timeout=60).text)

    try:
        while True:
            assert process.poll() is None
            with suppress(httpx.TransportError):
                health()
                break
            time.sleep(0.05)
        late = ask(0, 60, timeout=0.2)
        assert late.status_code == 408 and "within the request's" in late.json()["error"]["message"]
        with pytest.raises(httpx.ReadTimeout):
            ask(1, 0.2)
        while health() != "ok\n":  # both have left the threads
            pass
        with ThreadPoolExecutor(8) as threads:
            slow_ones = [threads.submit(ask, number) for number in range(2, 10)]
            while "2 compiling, 6 waiting" not in health():
                assert not any(one.done() for one in slow_ones)
            for _ in range(3):
                answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
                assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
            process.send_signal(signal.SIGTERM)
            answers = [one.result() for one in slow_ones]
        assert {answer.status_code for answer in answers} <= {400, 503}
        assert sum(answer.status_code == 503 for answer in answers) >= 2
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        text = process.communicate()[0]
    assert "Traceback" not in text, text
