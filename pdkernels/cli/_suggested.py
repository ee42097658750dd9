"""The settings of sampling that a checkpoint's generation_config.json suggests, as options of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdkernels.generation.generation_config import FILE
from pdkernels.generation.params import SETTINGS, names_of
from pdkernels.models.files.folder import read_fields

DRAWS = [name for name in names_of("draw") if SETTINGS[name].transformers]
"""Settings that a file suggests together: one that is chosen stands for all. Its filters and stops are followed in any
case (`generation_config.py`)."""
_DEFAULTS = {"temperature": 1.0, "top_k": 50}
"""Transformers' own, where the file has none; others change nothing."""
_CARDS = {"smollm2-135m-instruct": {"temperature": 0.2, "top_p": 0.9}}
"""What model cards say, for packaged models without a generation_config.json."""


def settings(model: str) -> dict[str, float]:
    """The settings with which the checkpoint `model` samples as its authors had it, without those that change nothing.

    Empty for greedy decoding or no file.

    >>> settings("tiny-code"), settings("smollm2-135m-instruct")
    ({}, {'temperature': 0.2, 'top_p': 0.9})
    """
    if model in _CARDS:
        return dict(_CARDS[model])
    folder = Path(model)
    fields = read_fields(folder, FILE) if folder.is_dir() else None
    if fields is None or not fields.flag("do_sample", False):
        return {}
    values: dict[str, float] = {}
    for setting in (SETTINGS[name] for name in DRAWS):
        name, default = setting.transformers, _DEFAULTS.get(setting.name, setting.neutral[-1])
        limit: dict[str, Any] = {"minimum" if setting.default is None else "above": 0}
        value = (fields.integer if setting.kind == "integer" else fields.number)(name, default, **limit)
        if setting.changes(value):
            values[setting.name] = value
    return values


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
