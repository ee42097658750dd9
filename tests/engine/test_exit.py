"""A program ends as it was told to, whatever the library's threads do then; and a forked child knows that it has none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import Stream, SuffixPool, generate, stream
from pdkernels.engine import Engine

# The model spends its time in C++, without the interpreter's lock: there a thread must not be when the interpreter goes down.
START = """
import asyncio, multiprocessing, os, signal, sys, threading, time
import torch, pdkernels as pd
from pdkernels import _threads
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a test that runs in the background would ignore
torch.set_num_threads(1)
model, busy = pd.models.load("tiny-code"), torch.ones(400, 400)
forward = type(model).forward
type(model).forward = lambda *a, **k: (busy @ busy, forward(*a, **k))[1]
long = {"max_new_tokens": 400, "end_tokens": (), "overflow": "warn"}
"""
STREAM = "pieces = pd.decoding.stream(model, 'def f(', **long)\n"
ENGINE = "engine = pd.Engine(model, max_new_tokens=400); handle = engine.submit('def f(', **long)\n"
FORK = "pid = os.fork()\nif pid: assert os.waitpid(pid, 0)[1] == 0\n"

PROGRAMS: dict[str, tuple[int, str]] = {
    "a stream": (0, STREAM + "for _ in pieces: break"),
    "a request, an error": (1, ENGINE + "for _ in handle: raise ValueError"),
    "Ctrl-C": (-signal.SIGINT, ENGINE + "for _ in handle: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"),
    "Ctrl-C, and again while it ends": (
        -signal.SIGINT,
        ENGINE
        + "engine.submit('a', on_tokens=lambda *_: time.sleep(0.05) or os.kill(os.getpid(), signal.SIGINT), **long)\n"
        "time.sleep(9)",
    ),
    "a fork": (0, STREAM + ENGINE + "next(pieces); next(iter(handle))\n" + FORK),
    "a callback that never returns": (
        0,
        "_threads._PATIENCE, told = 0.2, threading.Event()\n"
        "engine = pd.Engine(model); engine.submit('a', on_tokens=lambda *_: told.set() or threading.Event().wait())\n"
        "told.wait()",
    ),
}
MORE: dict[str, tuple[int, str]] = {
    "a stream that nobody reads": (0, STREAM),
    "a stream in a cycle": (0, STREAM + "class A: pass\na = A(); a.a, a.b = a, pieces; del a, pieces"),
    "a generator that has stopped": (0, "def f():\n  " + STREAM + "  yield from pieces\nit = f(); next(it)"),
    "sys.exit": (3, STREAM + "for _ in pieces: sys.exit(3)"),
    "os._exit": (5, ENGINE + "for _ in handle: os._exit(5)"),
    "SIGTERM": (-signal.SIGTERM, ENGINE + "for _ in handle: os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"),
    "an engine that is dropped": (0, ENGINE + "next(iter(handle)); del engine"),
    "many requests": (0, ENGINE + "for m in ['jacobi', 'autoregressive'] * 4: engine.submit('a', m, **long)"),
    "an interactive session": (
        0,
        STREAM + "import code\ncode.InteractiveConsole(globals()).runcode('for _ in pieces: raise ValueError')",
    ),
    "a reader in a daemon": (0, ENGINE + "threading.Thread(target=lambda: list(handle), daemon=True).start()"),
    "a reader in a thread": (0, ENGINE + "threading.Thread(target=lambda: list(handle)).start()"),
    "asyncio": (0, ENGINE + "async def f():\n  async for _ in handle: break\nasyncio.run(f())"),
    "an executor": (
        0,
        ENGINE + "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1).submit(handle.result)",
    ),
    "a child that streams": (0, FORK + "else:\n  " + STREAM + "  next(pieces); sys.exit(0)"),
}


def check_ends(name: str) -> None:
    code, program = (PROGRAMS | MORE)[name]
    done = subprocess.run([sys.executable, "-c", START + program], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends(name: str) -> None:
    check_ends(name)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("name", [*PROGRAMS, *MORE])
def test_programs_end_every_time(name: str, number: int) -> None:
    check_ends(name)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_that_multiprocessing_starts_ends(method: str, tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    child = "".join(f"    {line}\n" for line in (START + STREAM + "next(pieces)").strip().splitlines())
    start = f"p = multiprocessing.get_context({method!r}).Process(target=child); p.start(); p.join()"
    program.write_text(
        f"import multiprocessing\ndef child():\n    global pieces\n{child}\n"
        f"if __name__ == '__main__':\n    {start}\n    assert p.exitcode == 0, p.exitcode\n"
    )
    subprocess.run([sys.executable, program], check=True, timeout=300)


def in_child(work: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        torch.set_num_threads(1)  # OpenMP's threads stay in the parent
        try:
            work()
            os._exit(0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_has_no_engine() -> None:
    """Also if another thread holds the locks that the child's copies have then."""
    model, told, held = pd.models.load("tiny-code"), threading.Event(), threading.Event()
    expected = generate(model, "def f(", max_new_tokens=8, end_tokens=()).tokens
    engine = Engine(model, max_running=1, max_new_tokens=8)
    ended = engine.submit("def f(", max_new_tokens=2)
    ended.result(60)
    handles = [
        engine.submit("def f(", max_new_tokens=8, end_tokens=(), on_tokens=lambda *_: told.wait(60)) for _ in range(2)
    ]
    pieces = stream(model, "def f(", max_new_tokens=8, end_tokens=(), stopping_criteria=lambda *_: not told.wait(60))
    pool = SuffixPool()

    def holds() -> None:
        with engine._lock, handles[0]._changed, handles[1]._changed, ended._changed, pool.lock:
            held.set()
            told.wait(60)

    holder = threading.Thread(target=holds)
    holder.start()
    held.wait(60)

    def work() -> None:
        words = "runs in the process of which this one is a fork. Make an engine in this process"
        calls: list[Callable[[], Any]] = [lambda: engine.submit("a")]
        calls += [handles[0].result, handles[1].result, lambda: list(handles[0])]
        for call in calls:
            with pytest.raises(RuntimeError, match=words):
                call()
        with pytest.raises(RuntimeError, match="a fork of the one that generates"):
            next(pieces)
        with pytest.raises(StopIteration):
            next(pieces)
        pieces.close()
        handles[0].cancel()
        assert not engine.running and engine.failure is not None and all(handle.done for handle in handles)
        assert ended.result().stats.tokens == 2 and [piece.ids for piece in ended.pieces]
        assert engine.close() and engine.metrics().waiting == 0
        pool.add([1, 2, 3])
        with Engine(model, max_new_tokens=8) as own:
            assert own.submit("def f(", max_new_tokens=8, end_tokens=()).result(30).tokens.equal(expected)

    in_child(work)
    told.set()
    holder.join()
    assert all(handle.result(60).tokens.equal(expected) for handle in handles)
    assert [token for piece in pieces for token in piece.ids] == expected.tolist()
    assert engine.close(timeout=60)


def test_forks_while_an_engine_steps() -> None:
    model = pd.models.load("tiny-code")
    with Engine(model, max_new_tokens=200) as engine:
        handle = engine.submit("def f(", max_new_tokens=200, end_tokens=())

        def work() -> None:
            with pytest.raises(RuntimeError, match="is a fork"):
                handle.result(30)
                raise RuntimeError("which is a fork")  # it had ended
            generate(model, "def f(", max_new_tokens=2)

        for _ in range(5):
            in_child(work)
        handle.result(60)


@pytest.mark.parametrize("name", ["__next__", "close"])
def test_a_hook_must_not_read_the_stream_that_waits_for_it(name: str) -> None:
    pieces, told = list[Stream](), threading.Event()

    def hook(*_: Any) -> None:
        told.wait(60)
        getattr(pieces[0], name)()

    pieces.append(stream(pd.models.load("tiny-code"), "a", max_new_tokens=4, stopping_criteria=hook))
    told.set()
    with pytest.raises(RuntimeError, match="a hook must not read or close the stream that waits for it"):
        list(pieces[0])
