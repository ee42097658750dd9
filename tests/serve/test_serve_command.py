"""The command, as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")


def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """The process and its address, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pdkernels", "serve", "--model", "tiny-code", "--port", str(port), *arguments]
    process = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while True:
        try:
            httpx.get(f"{address}/health").raise_for_status()
            return process, address
        except httpx.HTTPError:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.05)


def test_a_server_that_is_told_to_stop_finishes_its_answers() -> None:
    process, address = start("--name", "code", "--method", "autoregressive", PDKERNELS_API_KEY="secret")
    try:
        assert httpx.get(f"{address}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{address}/v1/models", headers=headers).json()["data"][0]["id"] == "code"
        body = {"model": "code", "prompt": "x = [1, 2, 3]\nfor", "max_tokens": 100, "temperature": 0}
        expected = httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60).json()
        answers: list[Any] = []

        def ask() -> None:
            answers.append(httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60).json())

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        deadline = time.monotonic() + 60
        while not re.search(r"pdkernels_submitted_total 6\b", httpx.get(f"{address}/metrics", headers=headers).text):
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        for asker in askers:
            asker.join(60)
        assert [answer["choices"] for answer in answers] == [expected["choices"]] * 4
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        text = process.communicate()[0]
    assert "code by autoregressive on http://127.0.0.1:" in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "no_such"], "method must name a decoding method"),
        (["--option", "no_such=1"], "has no option 'no_such'"),
        (["--method", "llada"], "method must fit the model"),
        (["--max-new-tokens", "600"], "max_new_tokens must leave room for a prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_listens(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "pdkernels", "serve", "--model", "tiny-code", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and words in " ".join(run.stderr.split()) and "Traceback" not in run.stderr, run.stderr
