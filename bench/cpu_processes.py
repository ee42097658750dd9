"""Engines in processes of their own (bench/cpu_workers.py), and the Pythons that have them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "pdkernels": "pdkernels",
    "llama.cpp": "llama_cpp",
    "transformers": "transformers",
    "torchao": "torchao",
    "OpenVINO": "openvino_genai",
    "onnxruntime": "onnxruntime_genai",
    "vLLM": "vllm",
}


def package(build: str) -> str:
    """An engine and its version, by the name of its package.

    >>> package("onnxruntime 0.18.0"), package("llama.cpp 0.3.36")
    ('onnxruntime-genai 0.18.0', 'llama.cpp 0.3.36')
    """
    return re.sub(r"^onnxruntime(?= )", "onnxruntime-genai", build)


class Worker:
    """An engine in its process. `begun` is what its cache was last told to hold."""

    def __init__(self, python: str, spec: dict[str, Any]) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": str(spec["threads"]), "PYTHONPATH": _path(python)}
        self.process = subprocess.Popen(
            [python, str(ROOT / "bench/cpu_workers.py"), json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables,
        )  # fmt: skip
        self.begun: list[Any] | None = None
        self._answer()

    def __call__(self, *told: Any) -> Any:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # that it has ended is told below
            self.process.stdin.write(json.dumps(told) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        """Raises Refused with the engine's words, or Ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Ended(f"its process ended with {self.process.wait()}")
        found = json.loads(line)
        if "error" in found:
            raise Refused(found["error"])
        return found["found"]

    def end(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # of a process that has ended, the last question is still to be written
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Refused(Exception):
    """An engine cannot do it."""


class Ended(Refused):
    """The engine's process is no more, for want of memory or by a fault."""


def _path(python: str) -> str:
    """Where a Python finds this project: ours does, and others must not find our packages."""
    given = os.environ.get("PYTHONPATH", "")
    return f"{ROOT}{os.pathsep}{given}" if python == sys.executable else given


def pythons(peers: list[str], ik_llama: Path | None = None) -> dict[str, str]:
    """The Python of each engine that is installed. ik_llama.cpp needs one with NumPy, and the folder it was built in."""
    found: dict[str, str] = {"pdkernels": sys.executable}
    for python in [sys.executable, *peers]:
        program = (
            f"from importlib.util import find_spec; print(*[n for n in {sorted(MODULES.values())} if find_spec(n)])"
        )
        done = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": _path(python)}
        )
        for engine, module in MODULES.items():
            if module in done.stdout.split():
                found.setdefault(engine, python)
    if ik_llama is not None:
        found["ik_llama.cpp"] = sys.executable
    return found
