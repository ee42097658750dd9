"""An engine in a process of its own, told by a line of JSON each what to do: what bench/cpu_engines.py starts.

    PYTHON bench/cpu_workers.py '{"engine": "llama.cpp", "file": "FILE.gguf", "threads": 1, "setting": {"flash_attention": false}}'

It runs in any Python that has the engine, and imports nothing else. Answers are lines of JSON: `{"found": ...}` or `{"error": ...}`.
Times are in ms: CPU time with one thread, which other work on the machine disturbs little, wall-clock time with several.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ENGINES = {
    "pdkernels": "ours:Ours",
    "llama.cpp": "llama:LlamaCpp",
    "llama.cpp's diffusion example": "llama_diffusion:LlamaDiffusion",
    "ik_llama.cpp": "ik_llama:IkLlama",
    "transformers": "peers:Transformers",
    "OpenVINO": "peers:OpenVino",
    "torchao": "peers:TorchAo",
    "onnxruntime": "peers:OnnxRuntime",
    "vLLM": "peers:Vllm",
}
"""The module of bench/workers and the class."""
METHODS = (
    "about",
    "choices",
    "begin",
    "forward",
    "prompt",
    "answer",
    "drafted",
    "in_pieces",
    "other_cache",
    "clients",
    "memory",
    "canvas",
    "denoise",
)


def new(spec: dict[str, Any]) -> Any:
    module, name = ENGINES[spec["engine"]].split(":")
    return getattr(importlib.import_module(f"bench.workers.{module}"), name)(spec)


def main() -> None:
    # The Python's own packages come before those of this project, and the files beside this one are no packages.
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]
    spec = json.loads(sys.argv[1])
    # Engines print. What they print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Any = None

    def said(run: Callable[[], Any]) -> None:
        try:
            answers.write(json.dumps({"found": run()}) + "\n")
        except Exception as error:  # of any library
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}".split("\n")[0]}) + "\n")
        answers.flush()

    def started() -> None:
        nonlocal engine
        engine = new(spec)

    said(started)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name not in METHODS:
            raise SystemExit(f"no method {name}")
        said(partial(getattr(engine, name), *arguments))


if __name__ == "__main__":
    main()
