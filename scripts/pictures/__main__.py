"""Draws the pictures of the docs: `python -m scripts.pictures`, or some of them by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType

from bench.papers import plot_losses, plot_theory
from scripts.pictures import attention, choices, masks, sampling, states
from scripts.pictures.parts import IMAGES


def theory() -> None:
    """Prefill cost and decode width."""
    plot_theory(IMAGES / "theory.png")


def losses() -> None:
    """Losses of tri-mode trainings with different weights."""
    measured = IMAGES.parent / "papers/results/nemotron_alpha.json"
    plot_losses(json.loads(measured.read_text(encoding="utf-8")), IMAGES / "nemotron_losses.png")


def pictures(*modules: ModuleType) -> dict[str, Callable[[], None]]:
    """The functions of modules that draw something, by name."""
    return {name: made for module in modules for name in module.PICTURES for made in [getattr(module, name)]}


if __name__ == "__main__":
    known = pictures(attention, choices, masks, sampling, states) | {"theory": theory, "losses": losses}
    for chosen in sys.argv[1:] or known:
        known[chosen]()
