"""The settings of sampling that a checkpoint's generation_config.json suggests, as options of the command line."""

from __future__ import annotations

from pathlib import Path

from pdkernels.models.files.folder import read_fields

FILE = "generation_config.json"
_TOP_K = 50  # of transformers, where the file has none


def settings(model: str) -> dict[str, float]:
    """The settings with which the checkpoint `model` samples as its authors had it, without those that change nothing.

    Empty for greedy decoding or no file.

    >>> settings("tiny-code")
    {}
    """
    folder = Path(model)
    fields = read_fields(folder, FILE) if folder.is_dir() else None
    if fields is None or not fields.flag("do_sample", False):
        return {}
    found = {
        "temperature": fields.number("temperature", 1.0, above=0),
        "top_k": fields.integer("top_k", _TOP_K, minimum=0),
        "top_p": fields.number("top_p", 1.0, minimum=0),
        "min_p": fields.number("min_p", 0.0, minimum=0),
        "repetition_penalty": fields.number("repetition_penalty", 1.0, above=0),
    }
    off = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    return {name: value for name, value in found.items() if off.get(name) != value}


def suggested(model: str) -> str:
    """`settings` as options of the command line.

    >>> suggested("tiny-code")
    ''
    """
    return as_flags(settings(model))


def as_flags(values: dict[str, float]) -> str:
    """Settings as options of the command line.

    >>> as_flags({"temperature": 0.2, "top_p": 0.9})
    '--temperature 0.2 --top-p 0.9'
    """
    return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in values.items())


def advice(model: str, temperature: float | None) -> str:
    """A line for someone who has not chosen a temperature; empty if there is nothing to suggest."""
    options = suggested(model)
    return (
        f"The model's authors suggest {options}; without a temperature decoding is greedy."
        if options and temperature is None
        else ""
    )
