"""Draws a run of planned diffusion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdkernels._validation import check
from pdkernels.generation.traces import ChunkStep


def plot_chunks(
    trace: Sequence[ChunkStep], path: Path, *, tokenizer: Any = None, topics: Sequence[Sequence[str]] = ()
) -> None:
    """Draws the forward in which each token of a chunk was written: a lane per chunk, positions from left to right.

    Chunks of a round share its forwards, so lanes of one colour scale were filled in parallel. A round begins after the
    one above it has ended.

    Args:
        trace: ``stats.trace`` of one sequence of method "planned" with ``trace=True``.
        path: of the PNG.
        tokenizer: turns ids into text; None: ids are shown.
        topics: the names of the chunks of each round.

    Raises:
        ValueError: an empty trace.
        ImportError: no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    check(bool(trace), "evaluation.plot_chunks", "trace", "hold steps", "an empty one")
    lanes: list[tuple[int, str, dict[int, tuple[int, int]]]] = []
    maximum = 1
    for number in sorted({step.round for step in trace}):
        steps = [step for step in trace if step.round == number]
        maximum = max(maximum, len(steps))
        for chunk in range(len(steps[0].canvas)):
            committed = {
                position: (forward, token)
                for forward, step in enumerate(steps)
                for (lane, position), token in step.committed.items()
                if lane == chunk
            }
            has_topic = number < len(topics) and chunk < len(topics[number])
            lanes.append((number, topics[number][chunk] if has_topic else f"chunk {chunk}", committed))
    columns = 1 + max(max(committed, default=0) for _, _, committed in lanes)
    figure, axis = plt.subplots(figsize=(max(6.0, 0.26 * columns + 2.5), 0.42 * len(lanes) + 1.4), layout="constrained")
    norm, colours = Normalize(1, maximum), colormaps["viridis"]
    scale = ScalarMappable(norm, colours)
    ticks, names, y, before = [], [], 0.0, lanes[0][0]
    for number, name, committed in lanes:
        y += 0.6 * (number != before)
        before = number
        for position, (forward, token) in committed.items():
            axis.barh(y, 0.92, left=position - 0.46, height=0.8, color=colours(norm(forward + 1)))
            text = _text(tokenizer, token)
            if text.isprintable():
                colour = "#222222" if forward + 1 > 0.6 * maximum else "white"
                axis.text(position, y, text, ha="center", va="center", fontsize=7, color=colour)
        ticks.append(y)
        names.append(f"round {number + 1}, {name}")
        y += 1
    axis.set(yticks=ticks, ylim=(y - 0.4, -0.6), xlim=(-0.6, columns - 0.4), xlabel="position in the chunk")
    axis.set_yticklabels(names, fontsize=8.5)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    ticks_at = MaxNLocator(integer=True)
    figure.colorbar(scale, ax=axis, pad=0.01, fraction=0.03, label="forward of the round", ticks=ticks_at)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _text(tokenizer: Any, token: int) -> str:
    if tokenizer is None:
        return str(token)
    try:
        return str(tokenizer.decode([token]))
    except ValueError:
        return "·"  # a pad, which is an id outside the tokenizer's
