"""Boxes, a canvas and the colours of all pictures of the docs."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
COMMITTED, ACCEPTED, REJECTED, FREE, MODEL = "#4c78a8", "#54a24b", "#e8b4a8", "#f2f2f2", "#f2cf5b"


def cells(axis: plt.Axes, y: float, items: list[tuple[str, str]], label: str) -> None:
    """A row of boxes with a text in each, labelled on the left."""
    axis.text(-0.4, y + 0.4, label, ha="right", va="center", fontsize=10)
    for x, (text, colour) in enumerate(items):
        axis.add_patch(plt.Rectangle((x, y), 0.94, 0.8, facecolor=colour, edgecolor="#444444", linewidth=0.8))
        dark = colour in (COMMITTED, ACCEPTED)
        axis.text(x + 0.47, y + 0.4, text, ha="center", va="center", fontsize=9, color="white" if dark else "#222222")


def canvas(
    width: float, height: float, xlim: tuple[float, float], ylim: tuple[float, float]
) -> tuple[plt.Figure, plt.Axes]:
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    axis.set(xlim=xlim, ylim=ylim)
    axis.axis("off")
    return figure, axis


def save(figure: plt.Figure, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / name, dpi=120)
    plt.close(figure)
