"""One slice of `bench.server_load`: a server in a process of its own, and clients that ask it what a seed draws.

    python -m bench.load_clients '{"engine": "pdkernels", "command": [..], "port": 8123, "seed": 0, "rate": 4.0, ..}'

prints a line of JSON. It knows all servers by OpenAI's `/v1/chat/completions` alone, over plain sockets: a client's own work
takes the servers' cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CLIENTS = 64
_QUARTERS, _LOOKS = 4, 8
"""Of a slice, and looks at memory in each."""
SHORTEST, LONGEST = 50, 2000  # tokens of a prompt
KINDS = {"greedy": 40, "sampled": 20, "lookup": 10, "schema": 10, "adapter": 10, "cancelled": 10}
"""Of 100 requests; "lookup" names another method where a server has some."""
WORDS = (
    "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word but not what all were "
    "we when your can said there use an each which she do how their if will up other about out many then them these so some her would make "
    "like him into time has look two more write go see number no way could people my than first water been call who oil its now find long"
).split()
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["person", "place", "thing"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "certain": {"type": "boolean"},
    },
    "required": ["name", "kind", "count", "certain"],
    "additionalProperties": False,
}


def drawn(seed: int, rate: float, seconds: float) -> list[dict[str, Any]]:
    """The requests that arrive in a slice: when, of what kind, and what they ask.

    >>> one = drawn(0, 2.0, 10.0)
    >>> one == drawn(0, 2.0, 10.0), all(request["at"] < 10 for request in one)
    (True, True)
    """
    chance, at, requests = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        words = round(SHORTEST * (LONGEST / SHORTEST) ** chance.random())
        text = " ".join(chance.choices(WORDS, k=max(1, words - 35)))  # a template and the question take about 35
        question = "Say what this is about, as JSON." if kind == "schema" else "Go on with this text."
        requests.append(
            {
                "at": at, "kind": kind, "seed": chance.randrange(1 << 30), "text": f"{question} {text}",
                "most": round(16 * 8 ** chance.random()), "leaves": chance.randrange(1, 16),
            }
        )  # fmt: skip
    return requests


def body_of(request: dict[str, Any], engine: str) -> dict[str, Any]:
    """What a client sends. All take OpenAI's fields; adapters and methods have names of their own."""
    kind, ours = request["kind"], engine == "pdkernels"
    body: dict[str, Any] = {
        "model": "load", "messages": [{"role": "user", "content": request["text"]}], "max_tokens": request["most"],
        "temperature": 0.8 if kind == "sampled" else 0, "seed": request["seed"], "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if kind == "schema":
        body |= {
            "max_tokens": 96,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
        }
    else:
        body["ignore_eos"] = True
    if kind == "adapter":
        body |= {"lora": [{"id": 0, "scale": 1.0}]} if engine == "llama.cpp" else {"model": "style"}
    if kind == "lookup" and ours:
        body |= {"method": "jacobi", "options": {"draft": "lookup"}}
    return body


async def _events(reader: asyncio.StreamReader) -> Any:
    """The events of a chunked answer."""
    rest = b""
    while (size := int(await reader.readline(), 16)) > 0:
        rest += (await reader.readexactly(size + 2))[:-2]
        *whole, rest = rest.split(b"\n")
        for line in whole:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def ask(port: int, request: dict[str, Any], engine: str, start: float, seen: dict[str, Any]) -> None:
    """Asks once, and writes down when each piece of text came, in seconds after the start."""
    seen |= {"times": [], "texts": [], "ended": None, "usage": None, "error": None}
    content = json.dumps(body_of(request, engine)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        status = (await reader.readline()).decode()
        while (await reader.readline()).strip():
            pass
        if " 200 " not in status:
            seen["error"] = f"{status.strip()} {(await reader.read(400)).decode()}"
            return
        async for event in _events(reader):
            if "error" in event:
                seen["error"] = json.dumps(event["error"])
                return
            seen["usage"] = event.get("usage") or seen["usage"]
            text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices") or [])
            if text:
                seen["times"].append(time.perf_counter() - start)
                seen["texts"].append(text)
            if request["kind"] == "cancelled" and len(seen["texts"]) >= request["leaves"]:
                break
        seen["ended"] = time.perf_counter() - start
    except (OSError, EOFError, ValueError) as error:  # the server has closed the connection
        seen["error"] = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()


async def load(
    port: int, engine: str, requests: list[dict[str, Any]], seconds: float, clients: int
) -> list[dict[str, Any]]:
    """Asks everything when it arrives, or when one of the clients is free again; what has not ended in time is left."""
    free, start = asyncio.Semaphore(clients), time.perf_counter()
    seen: list[dict[str, Any]] = [{} for _ in requests]

    async def one(request: dict[str, Any], found: dict[str, Any]) -> None:
        await asyncio.sleep(request["at"] - (time.perf_counter() - start))
        async with free:
            await ask(port, request, engine, start, found)

    tasks = [asyncio.create_task(one(*pair)) for pair in zip(requests, seen, strict=True)]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(found, Exception):
            raise found
    return [{**request, **found} for request, found in zip(requests, seen, strict=True)]


def held(process: int) -> float:
    """Resident MB of a process and of those that it has started."""
    parents, pages, found = dict[int, int](), dict[int, int](), 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                pages[int(folder.name)] = int((folder / "statm").read_text().split()[1])
            except OSError:  # it has ended
                continue
    for one in parents:
        above = one
        while above not in (process, 0):
            above = parents.get(above, 0)
        found += pages.get(one, 0) if above == process else 0
    return found * os.sysconf("SC_PAGE_SIZE") / 1e6


async def watch(process: int, seconds: float) -> list[float]:
    """The most that it held in each quarter of the time, MB."""
    begun, most = time.perf_counter(), [0.0] * _QUARTERS
    try:
        while True:
            quarter = int(_QUARTERS * (time.perf_counter() - begun) / seconds)
            most[min(quarter, _QUARTERS - 1)] = max(most[min(quarter, _QUARTERS - 1)], held(process))
            await asyncio.sleep(seconds / _QUARTERS / _LOOKS)
    except asyncio.CancelledError:
        return most


def slice_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Starts the server, loads it, and stops it."""
    requests = drawn(spec["seed"], spec["rate"], spec["seconds"])
    address = f"http://127.0.0.1:{spec['port']}/health"
    with open(spec["log"], "w") as log:
        server = subprocess.Popen(
            spec["command"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec["env"]},
            start_new_session=True,
        )
    try:
        late = time.monotonic() + spec["start"]
        while True:
            try:
                urlopen(address, timeout=1).close()
                break
            except OSError:
                ended = server.poll() is not None or time.monotonic() > late
                assert not ended, Path(spec["log"]).read_text()[-2000:]
                time.sleep(0.1)

        async def loaded() -> tuple[list[dict[str, Any]], list[float]]:
            watching = asyncio.create_task(watch(server.pid, spec["seconds"]))
            found = await load(spec["port"], spec["engine"], requests, spec["seconds"], spec["clients"])
            watching.cancel()
            return found, await watching

        warm = [{**one, "at": 0.0, "most": 8} for one in drawn(1 << 20, 4.0, 4.0)]
        asyncio.run(load(spec["port"], spec["engine"], warm[:4], spec["warm"], 4))
        found, resident = asyncio.run(loaded())
        return {"requests": found, "resident_mb": resident, "load": os.getloadavg()[0]}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # with the processes that it has started
        server.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server, which has a session of its own, ends too
    print(json.dumps(slice_of(json.loads(sys.argv[1]))))
