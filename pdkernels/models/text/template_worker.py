"""Renders chat templates in a separate process, whose memory and time are limited by the operating system.

`template_process` runs this file as a script, which imports nothing of this package: the process holds only Python,
jinja2 and a chat. A single expression of a template can take any amount of time and memory (`'a' * 10**9`), which no
check inside the user's process could stop. A message is its length in 8 bytes, followed by its bytes. Requests are
pickled; answers are JSON, because they come from untrusted code.
"""

from __future__ import annotations

import json
import pickle
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn


def environment() -> Any:
    """The environment of transformers, for which templates are written."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``: marks what a model wrote, for training."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            # A separate block, as in transformers: variables that are set inside stay inside.
            return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

        def _written(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """``namespace()`` without names that begin with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, values = args[0], dict(*args[1:], **kwargs)
            for name in values:
                Namespace._check(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace._check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def _check(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")

    class Dict:
        """``dict()`` and ``dict.fromkeys()``."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args, **kwargs)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    jinja.filters["tojson"] = tojson
    jinja.globals |= {"raise_exception": raise_exception, "dict": Dict(), "namespace": Namespace}
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja


def render(compiled: Any, variables: dict[str, Any], maximum: int) -> str:
    """The text, or the first `maximum` + 1 characters of it."""
    pieces, length = [], 0
    for piece in compiled.generate(**variables):
        pieces.append(piece)
        length += len(piece)
        if length > maximum:
            break
    return "".join(pieces)[: maximum + 1]


def main(path: list[str], memory: int, seconds: float) -> None:
    """Answers requests until the stream ends. The first answer is an empty list, which means that the process is
    ready."""
    sys.path[:] = path
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    jinja, limit_time = environment(), _limits(memory)
    compiled = lru_cache(16)(jinja.from_string)

    def answer(kind: str, text: str) -> None:
        content = json.dumps([kind, text]).encode()
        answers.write(len(content).to_bytes(8, "little") + content)
        answers.flush()

    answer("ready", "")
    while True:
        size = int.from_bytes(requests.read(8), "little")
        if not size:
            return
        limit_time(0.0)  # unpickling is the user's own data
        source, variables, maximum = pickle.loads(requests.read(size))
        limit_time(seconds)
        try:
            answer("text", render(compiled(source), variables, maximum))
        except Exception as error:
            kind = type(error).__name__
            variables.clear()
            answer(kind, " ".join(str(error)[:1000].split()))
        limit_time(0.0)


def _limits(memory: int) -> Any:
    """Limits the memory of this process in bytes. Returns a function that limits its further CPU time in seconds."""
    try:
        import resource
        import signal
    except ImportError:  # Windows: only the reader's timeout applies
        return lambda seconds: None
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The default action of the signal ends the process even inside C code.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    return lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
