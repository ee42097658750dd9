"""A server on loopback in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import pdkernels as pd

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")


@contextmanager
def serving(app: Any, **config: Any) -> Iterator[str]:
    """The address of a server that runs `app`."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, **config))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
    assert not thread.is_alive()


Serve = Callable[..., Any]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A function that starts a server for a model: ``(address, engine)``."""
    from contextlib import ExitStack

    from pdkernels.engine import Engine
    from pdkernels.serve import create_app

    with ExitStack() as stack:

        def start(
            name: str = "tiny-code", engine: dict[str, Any] | None = None, model: Any = None, **options: Any
        ) -> Any:
            made = Engine(model or pd.models.load(name), **({"max_new_tokens": 64} | (engine or {})))
            stack.callback(made.close, finish=False)
            return stack.enter_context(serving(create_app(made, "tiny", **options))), made

        yield start
