"""The command, as a process of its own."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pdkernels as pd
from pdkernels.cli import _serve, app

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
from pdkernels import serve  # noqa: E402
from pdkernels.serve.run import listeners, most_connections  # noqa: E402


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


SERVE = (sys.executable, "-m", "pdkernels", "serve")


def start(*arguments: str, command: Sequence[str] = SERVE, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """The process and its address, once it answers."""
    port = free_port()
    process = subprocess.Popen(
        [*command, "--model", "tiny-code", "--port", str(port), *arguments],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while True:
        try:
            httpx.get(f"{address}/health").raise_for_status()
            return process, address
        except httpx.HTTPError:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.05)


def test_a_server_has_the_limits_of_its_application(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        import_module("pdkernels.serve.run"), "fair", lambda protocol, *seconds: seen.append(seconds) or protocol
    )
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: seen.append(server.config))
    limits = serve.Limits(shutdown=3.0, body_seconds=2.0, unread_seconds=5.0)
    with pd.Engine(pd.models.load("tiny-code")) as engine:
        serve.run(serve.create_app(engine, "tiny", limits=limits), port=free_port())
    (seconds, config) = seen
    assert seconds == (2.0, 5.0, most_connections()) and config.timeout_graceful_shutdown == 13


def test_what_is_loaded_is_not_collected_while_a_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **options: seen.append(gc.get_freeze_count()))
    with pd.Engine(pd.models.load("tiny-code")) as engine:
        serve.run(serve.create_app(engine, "tiny"), port=free_port())
    assert seen[0] > 10_000 and gc.get_freeze_count() == 0


def test_a_server_that_is_told_to_stop_finishes_its_answers() -> None:
    drafters = ("--drafter", "small=tiny-jacobi", "--drafter", "other=tiny-code")
    process, address = start("--name", "code", "--method", "autoregressive", *drafters, PDKERNELS_API_KEY="secret")
    try:
        assert httpx.get(f"{address}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{address}/v1/models", headers=headers).json()["data"][0]["id"] == "code"
        body = {"model": "code", "prompt": "x = [1, 2, 3]\nfor", "max_tokens": 100, "temperature": 0}
        expected = httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60).json()
        for options in ({"drafter": "small"}, {"drafter": "other"}, {}):  # without a name it is the first
            drafted = body | {"method": "draft_model", "options": options}
            answer = httpx.post(f"{address}/v1/completions", json=drafted, headers=headers, timeout=60).json()
            assert answer["choices"] == expected["choices"]
        wrong = body | {"method": "draft_model", "options": {"drafter": "tiny-code"}}
        refused = httpx.post(f"{address}/v1/completions", json=wrong, headers=headers).json()["error"]["message"]
        assert "must be one of 'small', 'other'" in refused
        answers: list[Any] = []

        def ask() -> None:
            answers.append(httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60).json())

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        deadline = time.monotonic() + 60
        while not re.search(r"pdkernels_submitted_total 11\b", httpx.get(f"{address}/metrics", headers=headers).text):
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


def test_a_server_that_starts_again_goes_on_with_a_text(tmp_path: Path) -> None:
    text, words = "import os\n" * 20, ("--prefix-dir", str(tmp_path), "--method", "autoregressive")
    for known in (0, 199):
        process, address = start(*words)
        try:
            body = {"model": "tiny-code", "prompt": text, "max_tokens": 8, "temperature": 0}
            text += httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
            metrics = httpx.get(f"{address}/metrics").text
            assert int(re.search(r"^pdkernels_restored_tokens_total (\d+)", metrics, re.M)[1]) >= known  # type: ignore[index]
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
            log = process.communicate()[0]
        assert "Traceback" not in log, log


@pytest.mark.slow
def test_answers_that_take_too_long_end_with_what_they_have() -> None:
    process, address = start("--shutdown-timeout", "0.05", "--max-new-tokens", "400", "--method", "autoregressive")
    try:
        body = {"model": "tiny-code", "prompt": "import", "max_tokens": 400, "temperature": 1, "n": 8, "stream": True}
        reasons, texts, ended = [""] * 8, [""] * 8, False
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line:
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    if not any(texts):
                        process.send_signal(signal.SIGTERM)
                    texts[choice["index"]] += choice["text"]
                    reasons[choice["index"]] = choice["finish_reason"] or ""
        assert ended and all(reasons) and "cancelled" in reasons and any(texts)
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        text = process.communicate()[0]
    assert "Traceback" not in text, text


def test_a_port_that_is_taken_is_named_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = CliRunner().invoke(app, ["serve", "--model", "no_such_model", "--port", str(port)])
        words = f"cannot listen on port {port} of 127.0.0.1: it is taken"
        assert run.exit_code == 1 and words in " ".join(run.stderr.split())
    run = CliRunner().invoke(app, ["serve", "--model", "no_such_model", "--port", str(port)])
    assert run.exit_code == 2 and "no_such_model" in run.stderr
    with pytest.raises(OSError, match=r"'no such host' is no address"):
        listeners("no such host", port)
    made = listeners("localhost", port)
    assert {one.getsockname()[1] for one in made} == {port}
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "no_such"], "method must name a decoding method"),
        pytest.param(["--option", "no_such=1"], "has no option 'no_such'", marks=pytest.mark.slow),
        (["--method", "llada"], "method must fit the model"),
        (["--drafter", "a=tiny-masked"], "drafter must be causal"),
        (["--drafter", "tiny-jacobi"], "--drafter must be NAME=PATH, got 'tiny-jacobi'"),
        (["--drafter", "a=tiny-jacobi", "--drafter", "a=tiny-code"], "--drafter must name each drafter once"),
        pytest.param(
            ["--max-new-tokens", "600"], "--max-new-tokens must leave room for a prompt", marks=pytest.mark.slow
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_listens(arguments: list[str], words: str) -> None:
    run = CliRunner().invoke(app, ["serve", "--model", "tiny-code", "--port", str(free_port()), *arguments])
    assert run.exit_code == 2 and words in " ".join(run.stderr.split()), run.stderr


def test_requests_sample_as_the_authors_suggest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they or the server's options choose a draw: small models repeat themselves when they decode greedily."""
    taken: list[Any] = []
    monkeypatch.setattr(_serve, "settings", lambda model: {"temperature": 0.2, "top_p": 0.9})
    monkeypatch.setattr(serve, "create_app", lambda *_, **options: taken.append(options["sampling"]))
    monkeypatch.setattr(serve, "run", lambda *_, **__: None)
    arguments = ["serve", "--model", "tiny-code", "--port", str(free_port())]
    said = CliRunner().invoke(app, arguments).stderr
    assert (
        "sample as the model's authors suggest: temperature 0.2, top_p 0.9." in said
        and "A page to try it: http" in said
    )
    assert taken == [{"temperature": 0.2, "top_p": 0.9}]
    assert "suggest" not in CliRunner().invoke(app, [*arguments, "--option", "top_k=40"]).stderr and taken[1] == {}


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    arguments = ["serve", "--model", "tiny-code", "--port", str(free_port()), "--prefix-dir", str(tmp_path / name)]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code in (1, 2) and isinstance(run.exception, SystemExit), run.exception
    assert ("cannot be written to" if name != "file" else "is a file") in " ".join(run.stderr.split()), run.stderr


def test_the_sizes_of_a_server_reach_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max_running": 3, "max_waiting": 5, "max_prompt_tokens": 70, "max_new_tokens": 9}
    sizes |= {"prompt_tokens_per_step": 32, "cache_tokens": 640, "prefix_dir_bytes": 1000}
    asked: list[Any] = []

    def made(model: Any, **options: Any) -> Any:
        asked.append({name: options[name] for name in sizes})
        raise ValueError("pdkernels.Engine: enough")

    monkeypatch.setattr(_serve, "Engine", made)
    flags = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(app, ["serve", "--model", "tiny-code", "--port", str(free_port()), *flags])
    assert "enough" in result.output, result.output
    assert asked == [sizes]
