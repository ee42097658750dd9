"""The evaluation of a masked-diffusion model: candidates and pictures.

Source: "Accelerating Diffusion Large Language Models with SlowFast Sampling", tables 1 to 4, figures 2 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pdkernels._validation import check
from pdkernels.evaluation.candidate import Candidate, colours_of
from pdkernels.evaluation.plot_rows import plot_rows
from pdkernels.generation.traces import MaskedStep

# The papers' thresholds, then those at which the tiny model is right about as often as one token at a time.
_SURE = {"tau_min": 0.9, "tau_high": 0.97, "max_exploration": 1, "window": 1}
_SURER = {"tau_min": 0.97, "tau_high": 0.99, "max_exploration": 1, "window": 1}
# All except the baseline, which fills the most confident position in each forward.
_COMPETING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llada", {"block_size": 16}),
    ("llada", {"steps": 32}),
    ("llada", {"block_size": 16, "steps": 32}),
    ("dream", {}),
    ("dllm_cache", {}),
    ("fast_dllm", {"block_size": 16, "cache": "none"}),
    ("fast_dllm", {"block_size": 16, "cache": "none", "threshold": 0.97}),
    ("fast_dllm", {"block_size": 16, "cache": "prefix", "threshold": 0.97}),
    ("fast_dllm", {"block_size": 16, "cache": "dual", "threshold": 0.97}),
    ("fast_dllm", {"block_size": 16, "cache": "dual", "threshold": None, "factor": 0.2}),
    ("slowfast", {}),
    ("slowfast", _SURER),
    ("slowfast", {**_SURER, "prompt_interval": 100, "gen_interval": 2, "transfer_ratio": 0.25}),
    ("slowfast", {**_SURE, "block_size": 16}),
    ("slowfast", {**_SURE, "block_size": 16, "prompt_interval": 100, "gen_interval": 2, "transfer_ratio": 0.25}),
)
_COLOURS = colours_of("masked", "#777777", "#b279a2", "#4c78a8", "#e39c37", "#54a24b")


def masked_candidates(name: str) -> list[Candidate]:
    """Candidates for model `name`: LLaDA's sampler in several settings, and faster methods."""
    competitors = [Candidate(name, method, settings=tuple(settings.items())) for method, settings in _COMPETING]
    return [Candidate(name, "llada"), *competitors]


def plot_masked(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the accuracy, tokens per forward and speed of all candidates.

    Args:
        rows: the ``extra_info`` of `as_json` of a masked-diffusion model on sums.
        path: of the PNG.

    Raises:
        ValueError: no row of a method for masked diffusion on sums.
        ImportError: no matplotlib.
    """
    rows = [
        row for row in rows if row["method"] in _COLOURS and row["right"] is not None and row["speedup"] is not None
    ]
    check(bool(rows), "evaluation.plot_masked", "rows", "hold figures of masked-diffusion methods on sums", "none")
    plot_rows(rows, path)


def plot_canvas(
    trace: Sequence[MaskedStep], path: Path, *, tokenizer: Any = None, mask_token: int | None = None
) -> None:
    """How a canvas was filled in: forwards from top to bottom, positions from left to right, colours for confidence.

    A coloured cell is a guess and its confidence; a framed one was committed in that forward and shows its token.
    Positions already filled are white. The lines at both ends of a row mark the window that could be committed.

    Args:
        trace: ``stats.trace`` of one sequence of a masked-diffusion method with ``trace=True``.
        path: of the PNG.
        tokenizer: turns ids into text; None: ids are shown.
        mask_token: the model's; if given, the picture starts at the first masked position.

    Raises:
        ValueError: an empty trace.
        ImportError: no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    check(bool(trace), "evaluation.plot_canvas", "trace", "hold steps", "an empty one")
    first = 0 if mask_token is None else trace[0].tokens.index(mask_token)
    columns = len(trace[0].tokens) - first
    grid = torch.full((len(trace), columns), torch.nan, dtype=torch.float32, device="cpu")
    for number, step in enumerate(trace):
        for position, confidence in step.confidence.items():
            grid[number, position - first] = confidence
    cell = 0.14
    figure, axis = plt.subplots(
        figsize=(max(6, cell * columns + 2), max(3, cell * len(trace) + 1.2)), layout="constrained"
    )
    drawn = axis.imshow(grid.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="none")
    figure.colorbar(drawn, ax=axis, pad=0.01, fraction=0.03, label="confidence of a guess")
    for number, step in enumerate(trace):
        for edge in step.window:
            axis.plot([edge - first - 0.5] * 2, [number - 0.5, number + 0.5], color="#c44e52", linewidth=1.4)
        for position, token in step.committed.items():
            axis.add_patch(
                Rectangle((position - first - 0.5, number - 0.5), 1, 1, fill=False, edgecolor="#c44e52", linewidth=0.9)
            )
            text = str(token) if tokenizer is None else tokenizer.decode([token])
            if text.isprintable() and columns <= 140:
                dark = grid[number, position - first] > 0.6
                axis.text(
                    position - first,
                    number,
                    text,
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="#222222" if dark else "white",
                )
    axis.set(xlabel="new positions", ylabel="forward", title="Framed: committed in this forward")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
