"""Draws the losses of trainings over their steps, as figure 4 of Nemotron-Labs-Diffusion does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = ("#777777", "#9ecae9", "#4c78a8", "#54a24b", "#e39c37", "#c44e52")


def plot_losses(result: Mapping[str, Any], path: Path) -> None:
    """Both losses of each weight of the masked one, on logarithmic scales.

    Args:
        result: that of `python -m bench.papers nemotron alpha`, with its `curves`.
        path: of the PNG.

    Raises:
        ImportError: no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for axis, loss in zip(axes, ("autoregressive", "masked")):
        for colour, (name, curve) in zip(_COLOURS, result["curves"].items()):
            points = [(point["step"], point[loss]) for point in curve if loss in point]
            if points:
                label = name if name.startswith("no ") else f"alpha = {name}"
                axis.plot(*zip(*points), color=colour, label=label)
        axis.set(xlabel="steps", ylabel="nats a token", yscale="log")
        axis.set_title(f"The {loss} loss", loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
