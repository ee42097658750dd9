"""The settings of sampling that a checkpoint's generation_config.json suggests, as options of the command line."""

from __future__ import annotations

from pathlib import Path

from pdkernels.models.folder import read_fields

FILE = "generation_config.json"
_TOP_K = 50  # of transformers, where the file has none


def suggested(model: str) -> str:
    """The options with which the checkpoint in the folder `model` samples as its authors had it; empty for greedy decoding or no file.

    >>> suggested("tiny-code")
    ''
    """
    folder = Path(model)
    fields = read_fields(folder, FILE) if folder.is_dir() else None
    if fields is None or not fields.flag("do_sample", False):
        return ""
    options = {
        "temperature": fields.number("temperature", 1.0, above=0),
        "top-k": fields.integer("top_k", _TOP_K, minimum=0),
        "top-p": fields.number("top_p", 1.0, minimum=0),
        "min-p": fields.number("min_p", 0.0, minimum=0),
        "repetition-penalty": fields.number("repetition_penalty", 1.0, above=0),
    }
    off = {"top-k": 0, "top-p": 1, "min-p": 0, "repetition-penalty": 1}
    return " ".join(f"--{name} {value:g}" for name, value in options.items() if off.get(name) != value)


def advice(model: str, temperature: float | None) -> str:
    """A line for someone who has not chosen a temperature; empty if there is nothing to suggest."""
    options = suggested(model)
    return (
        f"{FILE} suggests {options}; without a temperature decoding is greedy."
        if options and temperature is None
        else ""
    )
