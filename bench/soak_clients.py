"""The server and the clients of `bench.server_soak`."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

import pdkernels as pd
from pdkernels.decoding import Grammar, generate

PROMPTS = ["import os\n", "def f(x):\n    return", "class Node:", "x = [1, 2, 3]\nfor", "a", "print("]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "method": "jacobi"},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.1, "seed": 4, "top_k": 5},
    {"temperature": 0.9, "seed": 5, "top_p": 0.8, "method": "jacobi"},
    {"temperature": 0, "regex": "[a-z ]{8,20}"},
    {"temperature": 1.0, "seed": 6, "regex": "[0-9]+(, [0-9]+)*"},
]
LIMIT = 24


class Server:
    """The command with its log in a file: nobody reads a pipe while it runs."""

    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "pdkernels", "serve", "--model", "tiny-code", "--port", str(self.port)]
        command += ["--method", "autoregressive", "--max-running", "8", "--max-waiting", "32"]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        self.address, deadline = f"http://127.0.0.1:{self.port}", time.monotonic() + 300
        while True:
            try:
                httpx.get(f"{self.address}/health").raise_for_status()
                return
            except httpx.HTTPError:
                assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)

    def counters(self) -> dict[str, int]:
        text = httpx.get(f"{self.address}/metrics", timeout=60).text
        found = re.findall(r'^pdkernels_(\w+?)(?:\{reason="(\w+)"\})? (\d+)$', text, re.M)
        return {f"{name} {reason}".strip(): int(value) for name, reason, value in found}

    def held(self) -> tuple[float, int, int]:
        """Resident MB, open files, threads."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        resident, threads = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) for name in ("VmRSS", "Threads"))
        return resident / 1024, len(os.listdir(f"/proc/{self.process.pid}/fd")), threads


def expected() -> dict[tuple[str, int], Any]:
    """What each prompt gives alone, with each of the settings."""
    model = pd.models.load("tiny-code")
    texts = {}
    for prompt in PROMPTS:
        for number, settings in enumerate(SETTINGS):
            options = {name: value for name, value in settings.items() if name not in ("method", "regex")}
            if "regex" in settings:
                options["grammar"] = Grammar.regex(settings["regex"])
            method = settings.get("method", "autoregressive")
            texts[prompt, number] = generate(model, prompt, method, max_new_tokens=LIMIT, **options).text
    return texts


class Clients:
    """Clients that go on until a time. `counts` says how often each kind of behaviour was seen to its end."""

    def __init__(self, server: Server, until: float) -> None:
        self.server, self.until, self.texts = server, until, expected()
        self.counts: dict[str, int] = {}
        self.slowest = 0.0
        self._lock = threading.Lock()

    def run(self, number: int) -> None:
        chance = random.Random(number)
        kinds = ["whole", "stream", "stream", "slow", "vanish", "drop", "bad", "unknown"]
        with httpx.Client(timeout=300) as client:
            while time.monotonic() < self.until:
                kind, prompt = chance.choice(kinds), chance.choice(PROMPTS)
                setting = chance.randrange(len(SETTINGS))
                body = {"model": "tiny-code", "prompt": prompt, "max_tokens": LIMIT, **SETTINGS[setting]}
                start = time.monotonic()
                done = getattr(self, kind)(client, body, self.texts[prompt, setting])
                with self._lock:
                    name = kind if done else "full"
                    self.counts[name] = self.counts.get(name, 0) + 1
                    self.slowest = max(self.slowest, time.monotonic() - start)
                if not done:
                    time.sleep(1)  # as Retry-After says

    def whole(self, client: Any, body: dict[str, Any], text: str) -> bool:
        answer = client.post(f"{self.server.address}/v1/completions", json=body)
        if answer.status_code == 429:
            return False
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text
        return True

    def stream(self, client: Any, body: dict[str, Any], text: str, wait: float = 0.0, leave: bool = False) -> bool:
        got = ""
        with client.stream("POST", f"{self.server.address}/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code == 429:
                return False
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    got += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    time.sleep(wait)
                if leave and got:
                    break
        assert text.startswith(got) if leave else got == text
        return True

    def slow(self, client: Any, body: dict[str, Any], text: str) -> bool:
        return self.stream(client, body, text, wait=0.05)

    def vanish(self, client: Any, body: dict[str, Any], text: str) -> bool:
        return self.stream(client, body, text, leave=True)

    def drop(self, client: Any, body: dict[str, Any], text: str) -> bool:
        """Sends a request, or a part of one, and closes the connection."""
        content = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.server.port)) as connection:
            connection.sendall((head % len(content) + content)[: random.Random(text).randint(20, 300)])
        return True

    def bad(self, client: Any, body: dict[str, Any], text: str) -> bool:
        content = json.dumps(body).encode()[:-3]
        answer = client.post(
            f"{self.server.address}/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        return True

    def unknown(self, client: Any, body: dict[str, Any], text: str) -> bool:
        answer = client.post(f"{self.server.address}/v1/completions", json=body | {"no_such": 1})
        assert answer.status_code == 400 and "no_such is not supported here" in answer.text
        return True


def ended(counters: dict[str, int]) -> int:
    """Requests that have, for whatever reason."""
    return sum(value for name, value in counters.items() if name.startswith("finished_total"))


def soak(log: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Figures of a soak, after which the server is told to stop while it answers.

    Raises:
        AssertionError: a wrong text or status, a request that does not end, an error in the log.
    """
    server = Server(log)
    try:
        asking, seen = Clients(server, time.monotonic() + seconds), []
        with ThreadPoolExecutor(clients) as pool:
            running = [pool.submit(asking.run, number) for number in range(clients)]
            while not all(one.done() for one in running):
                time.sleep(min(5.0, seconds / 40))
                seen.append(server.held())
            for one in running:
                one.result()
        deadline = time.monotonic() + 60
        while ended(counters := server.counters()) < counters["submitted_total"]:
            assert time.monotonic() < deadline, counters
            time.sleep(0.1)
        assert "finished_total error" not in counters and not counters["running"] + counters["waiting"]
        with ThreadPoolExecutor(8) as pool:
            with httpx.Client(timeout=300) as client:
                body = {"model": "tiny-code", "prompt": "class Node:", "max_tokens": LIMIT, "temperature": 0}
                last = [pool.submit(asking.whole, client, body, asking.texts["class Node:", 0]) for _ in range(8)]
                while server.counters()["submitted_total"] < counters["submitted_total"] + 8:
                    time.sleep(0.005)
                server.process.send_signal(signal.SIGTERM)
                assert all(one.result() for one in last)
        assert server.process.wait(60) in (0, -signal.SIGTERM)
    finally:
        server.process.kill()
        server.process.wait()
    assert "Traceback" not in log.read_text()
    quarters = [seen[len(seen) * part // 4 : len(seen) * (part + 1) // 4] for part in range(4)]
    maxima = [[max(one[what] for one in quarter) for quarter in quarters] for what in range(3)]
    held = dict(zip(("resident_mb", "files", "threads"), maxima, strict=True))
    series = [round(one[0], 1) for one in seen]
    facts = {"clients": clients, "seconds": seconds, "counts": asking.counts, "slowest": asking.slowest}
    return {**facts, "counters": counters, "held": held, "resident_mb": series}
