"""The client of the process that renders chat templates. The first chat starts it; it is kept, and replaced when it
ends."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("template_worker.py")
_MEMORY = 400 << 20  # bytes of the whole process; Python and jinja2 take about 50 MB of them
_SECONDS = 1.0  # seconds of CPU time
_WAIT = 30.0  # seconds of wall time, for a busy machine


class TemplateFault(Exception):
    """A template that did not render: the type and the message of its error."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)


class _Process:
    """One renderer. Calls are serialised."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, source: str, variables: dict[str, Any], maximum: int) -> str:
        """The text of a template, at most about `maximum` characters of it; `TemplateFault` if there is none."""
        request = pickle.dumps((source, variables, maximum), protocol=4)
        with self._lock:
            running = self._started()
            try:
                kind, text = self._exchange(running, request)
            except BaseException:
                # Its next answer would belong to this call.
                self._end()
                raise
            if kind == "MemoryError":
                self._end()  # its remaining memory may be fragmented
        if kind == "text":
            return text
        if kind == "MemoryError" and not text:
            text = f"more than {_MEMORY >> 20} MiB"
        raise TemplateFault(kind, text)

    def _started(self) -> subprocess.Popen[bytes]:
        # After a fork the pipes still belong to the parent, which keeps using them.
        if self._running is None or self._owner != os.getpid() or self._running.poll() is not None:
            command = [sys.executable, "-I", str(_WORKER), json.dumps(sys.path), str(_MEMORY), str(_SECONDS)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            environment = {name: os.environ[name] for name in ("SYSTEMROOT", "TZ") if name in os.environ}
            self._running, self._owner = subprocess.Popen(command, env=environment, **pipes), os.getpid()
            try:
                ready, _ = self._answer(self._running, time.monotonic() + _WAIT)
                if ready != "ready":
                    raise TemplateFault("OSError", "the process that renders templates did not start")
            except BaseException:
                self._end()
                raise
        return self._running

    def _exchange(self, running: subprocess.Popen[bytes], request: bytes) -> tuple[str, str]:
        assert running.stdin is not None
        try:
            running.stdin.write(len(request).to_bytes(8, "little"))
            running.stdin.write(request)
            running.stdin.flush()
        except BrokenPipeError:
            self._end()
            return "MemoryError", ""
        return self._answer(running, time.monotonic() + _WAIT)

    def _answer(self, running: subprocess.Popen[bytes], until: float) -> tuple[str, str]:
        assert running.stdout is not None
        content, size = bytearray(), 8
        while len(content) < size:
            remaining = until - time.monotonic()
            if remaining <= 0 or not select.select([running.stdout], [], [], remaining)[0]:
                self._end()
                return "TimeoutError", f"more than {_WAIT:.0f} s"
            chunk = os.read(running.stdout.fileno(), 1 << 16)
            if not chunk:
                self._end()
                late = running.returncode == -getattr(signal, "SIGPROF", 0)
                return ("TimeoutError", f"more than {_SECONDS:.0f} s of work") if late else ("MemoryError", "")
            content += chunk
            if size == 8 and len(content) >= 8:
                size = 8 + int.from_bytes(content[:8], "little")
        kind, text = json.loads(content[8:])
        return str(kind), str(text)

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None and self._owner == os.getpid():
            running.kill()
            running.wait()
            for pipe in (running.stdin, running.stdout):
                try:
                    pipe and pipe.close()
                except BrokenPipeError:
                    pass

    def close(self) -> None:
        with self._lock:
            self._end()


_PROCESS = _Process()
render = _PROCESS.render
atexit.register(_PROCESS.close)
# A fork while another thread renders copies a lock that nobody would release in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PROCESS.__init__)  # type: ignore[misc]
