"""Processes with torch loaded and nothing of ours: forks of one process, since loading torch takes longer than most of what they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

# Each line on its input asks for a process. OMP_NUM_THREADS, LC_ALL and the like are those of the first one.
_PARENT = """
import json, os, signal, sys, traceback
import torch
for line in sys.stdin:
    code, arguments, environment, cwd, out, err = json.loads(line)
    if (child := os.fork()) == 0:
        signal.alarm(300)  # ends a process that hangs
        for path, number in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY), number)
        status = 1
        try:
            os.chdir(cwd)
            os.environ.update(environment)
            sys.argv = ["-c", *arguments]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _parent() -> subprocess.Popen[str]:
    """It ends with its input, when this process does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        cwd="/",
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def forked(
    code: str, *arguments: object, environment: dict[str, str] | None = None, cwd: Path | str = "/"
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -c code *arguments`` in a fork and returns what `subprocess.run` would; `environment` is added to that of the tests."""
    parent, given = _parent(), [str(argument) for argument in arguments]
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        print(json.dumps([code, given, environment or {}, str(cwd), out.name, err.name]), file=parent.stdin, flush=True)
        assert parent.stdout is not None
        status = int(parent.stdout.readline())
        return subprocess.CompletedProcess(["-c", *given], status, out.read(), err.read())
