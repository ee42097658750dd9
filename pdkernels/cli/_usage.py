"""Reports wrong usage in one sentence, like all errors."""

from __future__ import annotations

import errno
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pdkernels._early_answers import LINE
from pdkernels.cli._terminal import FLAGS, RUNNING, report
from pdkernels.decoding.methods import METHODS

_OTHERS = {"name_or_path": "model", "rules": "ebnf", "method": "names"}
"""Arguments in Python which the command line names otherwise."""

# Typer brings a click of its own in some versions; this is the base of its public errors.
_ClickException: Any = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """The commands, with exit code 2 for refused usage."""

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        name, command, remaining = super().resolve_command(ctx, args)
        FLAGS.clear()
        RUNNING[:] = [name] if name else []
        for parameter in command.params if command is not None else ():
            is_option = parameter.param_type_name == "option"
            flags = (
                [flag for flag in parameter.opts if flag.startswith("--")] if is_option else [parameter.name.upper()]
            )
            FLAGS.update((parameter.name, flag) for flag in flags)
        if "option" in FLAGS:
            options = ["overflow", *(option for method in METHODS.values() for option in method.options)]
            FLAGS.update((option, f"--option {option}=") for option in options if option not in FLAGS)
        FLAGS.update((python, FLAGS[ours]) for python, ours in _OTHERS.items() if ours in FLAGS and python not in FLAGS)
        return name, command, remaining

    def main(self, args: Any = None, standalone_mode: bool = True, **keywords: Any) -> Any:  # type: ignore[override]  # by name
        try:
            code = super().main(args, standalone_mode=False, **keywords)
        except _ClickException as error:
            context = getattr(error, "ctx", None)
            text = error.format_message() if hasattr(error, "format_message") else str(error)
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                where = context.command_path if context is not None else " ".join(["pdkernels", *RUNNING])
                text = " ".join(text.split()).rstrip(".")
                end = "" if text.endswith("?") else "."
                report(ValueError(f"pdkernels: {text}{end} `{where} --help` lists what there is."))
            code = 2
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            report(OSError("pdkernels: the output cannot be written: no space is left."))
            code = 1
        except typer.Abort:
            code = 1
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


class Sectioned(TyperCommand):
    """A command whose help has a section for each panel of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            default_section = "Arguments" if parameter.param_type_name == "argument" else "Options"
            row = parameter.get_help_record(ctx)
            if row is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or default_section, []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def print_version(requested: bool) -> None:
    if requested:
        typer.echo(LINE)
        raise typer.Exit
