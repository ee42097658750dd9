"""``python -m pdkernels models``: the models that can be loaded by name, with their sizes and methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdkernels import decoding, models
from pdkernels.cli._terminal import errors_reported
from pdkernels.decoding.methods import METHODS
from pdkernels.models.checkpoints.packaged import PACKAGED, packaged
from pdkernels.models.checkpoints.zoo import WEIGHTS, checkpoint_of


class _Facts(NamedTuple):
    name: str
    parameters: int
    size: int
    """Of the file."""
    model: Any
    """Perhaps without its weights."""


def _facts() -> list[_Facts]:
    rows = []
    for name in models.available():
        model, file = models.load(name), WEIGHTS / f"{name}.safetensors"
        rows.append(_Facts(name, sum(each.numel() for each in model.parameters()), file.stat().st_size, model))
    for name in PACKAGED:
        try:
            path: Path = packaged(name)
            checkpoint = checkpoint_of(str(path), True, None)
        except ImportError:  # not installed, or no reader of its file
            continue
        with torch.device("meta"):  # no weights are read
            config: Any = checkpoint.config
            made = models.Transformer(config, mask_token=checkpoint.mask_token)
        rows.append(_Facts(name, sum(each.numel() for each in made.parameters()), path.stat().st_size, made))
    return rows


def list_models() -> None:
    """List the models that can be loaded by name.

    With their sizes and methods; the first method is the default.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("model", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("methods", overflow="fold")
    with errors_reported():
        for name, parameters, size, model in _facts():
            default = decoding.default_method(model, name=name)[0]
            methods = [
                method.name
                for method in METHODS.values()
                if method.supports(model) and (model.mask_token is not None or not method.needs_mask_token)
            ]
            names = ", ".join([default, *(method for method in methods if method != default)])
            table.add_row(Text(name, "bold"), f"{parameters / 1e6:.1f} M", f"{size / 1e6:.1f}", names)
    Console(highlight=False).print(table)
