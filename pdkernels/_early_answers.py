"""``pdkernels --version`` and ``pdkernels --help`` answer without loading torch, which takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pdkernels._version import __version__

LINE = f"pdkernels {__version__}"
SUMMARY = "Parallel decoding of language models."
VERSION_HELP = "Print the version."
# The first sentences of the commands, as far as lines are wide.
COMMANDS = {
    "generate": "Continue a prompt; show accepted drafts and the cost.",
    "batch": "Generate for all prompts of files. The same command resumes an interrupted run.",
    "chat": "Chat with a model. Accepted drafts are in colour; each answer ends with a line of figures.",
    "serve": "Serve a model over HTTP, for any client of OpenAI's interface.",
    "demo": "Answer questions in every lossless way; compare the cost.",
    "eval": "Compare methods: right answers, tokens per forward, speed.",
    "methods": "List the decoding methods, or the options of some of them.",
    "models": "List the models that can be loaded by name.",
    "doctor": "Show versions, what was compiled, and what each op uses.",
}


def is_command(command: Sequence[str]) -> bool:
    """Whether a Python's arguments start the command line, as a script or as a module.

    >>> is_command(["python", "/bin/pdkernels", "doctor"]), is_command(["python", "-m", "pdkernels", "doctor"])
    (True, True)
    >>> is_command(["python", "my.py", "pdkernels"]), is_command(["python", "-c", "import pdkernels"])
    (False, False)
    """
    return command[1:3] == ["-m", "pdkernels"] or (len(command) > 1 and _is_script(command[1]))


def _is_script(path: str) -> bool:
    return os.path.basename(path).removesuffix(".exe") == "pdkernels"


def question(command: Sequence[str]) -> str | None:
    """The one option of a command line that asks for the version or for help and for nothing else.

    >>> question(["python", "-m", "pdkernels", "--version"])
    '--version'
    >>> question(["python", "/bin/pdkernels", "--help"])
    '--help'
    >>> question(["python", "my.py", "pdkernels", "--version"]), question(["python", "/bin/pdkernels", "chat", "--help"])
    (None, None)
    """
    script = len(command) == 3 and _is_script(command[1])
    asks = script or list(command[-3:-1]) == ["-m", "pdkernels"]
    return command[-1] if asks and command[-1] in ("--version", "--help") else None


def print_help() -> None:
    """The help of `pdkernels.cli`, from commands that do nothing."""
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

    @app.callback(help=SUMMARY)
    def shared(version: bool = typer.Option(False, "--version", help=VERSION_HELP)) -> None: ...

    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(lambda: None)
    app(["--help"], prog_name="pdkernels")


def answer(command: Sequence[str]) -> None:
    """Answers such a command line and ends the process; returns after any other."""
    asked = question(command)
    if asked == "--version":
        print(LINE)
        sys.exit(0)
    if asked == "--help":
        try:
            print_help()
        except ModuleNotFoundError:  # the command line says what is missing
            return


answer(sys.orig_argv)
