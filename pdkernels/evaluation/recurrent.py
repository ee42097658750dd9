"""The evaluation of a recurrent-depth model: candidates, the memory of a wavefront, and the pictures.

Source: "Efficient parallel samplers for recurrent-depth models", Table 1 and figures 2 and 4 to 8, in miniature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdkernels import decoding
from pdkernels._validation import check
from pdkernels.evaluation.candidate import Candidate, colours_of
from pdkernels.evaluation.plot_rows import plot_rows
from pdkernels.generation.traces import RecurrentStep

# Options that are varied one at a time, around the defaults.
_RECURRENCES = (1, 2, 4, 8, 32)
_SAMPLER: dict[str, tuple[Any, ...]] = {
    "inner_recurrence": (1, 2, 8),
    "threshold": (0.01, 0.1),
    "noise": (0.3,),
    "momentum": (0.0,),
    "max_wavefront": (1, 2, 4, 8),
}
_COLOURS = colours_of("recurrent", "#777777", "#e39c37", "#b279a2", "#4c78a8")


def recurrent_candidates(name: str) -> list[Candidate]:
    """Static decoding of model `name` at several depths, adaptive exits, self-speculation, sampler options."""
    candidates = [Candidate(name, "recurrent_static")]
    candidates += [Candidate(name, "recurrent_static", settings=(("recurrences", count),)) for count in _RECURRENCES]
    candidates += [
        Candidate(name, "recurrent_adaptive"),
        Candidate(name, "recurrent_adaptive", settings=(("criterion", "kl"),)),
    ]
    candidates += [
        Candidate(name, "recurrent_self_speculation", settings=settings)
        for settings in ((), (("draft_recurrences", 2),))
    ]
    candidates.append(Candidate(name, "recurrent_diffusion"))
    for option, values in _SAMPLER.items():
        candidates += [Candidate(name, "recurrent_diffusion", settings=((option, value),)) for value in values]
    return candidates


def with_full_wave(candidate: Candidate) -> dict[str, Any] | None:
    """Options to measure a candidate's peak memory: the sampler, with no state converging before its wavefront is full.

    None for samplers that differ in something other than the wavefront, whose memory is the same.

    >>> with_full_wave(Candidate("tiny-recurrent", "recurrent_diffusion", settings=(("max_wavefront", 8),)))
    {'max_wavefront': 8, 'threshold': 0.0, 'max_recurrences': 32}
    """
    if candidate.method != "recurrent_diffusion":
        return candidate.options
    if not set(candidate.options) <= {"max_wavefront"}:
        return None
    rows = candidate.options.get("max_wavefront", decoding.default_option(candidate.method, "max_wavefront"))
    inner = decoding.default_option(candidate.method, "inner_recurrence")
    return {**candidate.options, "threshold": 0.0, "max_recurrences": rows * inner}


class _Live(TorchDispatchMode):
    """Bytes allocated by ops that are still alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.held: dict[int, tuple[Any, int]] = {}
        self.peak: int = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.held.setdefault(storage._cdata, (storage._weak_ref(), storage.nbytes()))
        dead = [key for key, (reference, _) in self.held.items() if torch.UntypedStorage._expired(reference)]
        for key in dead:
            torch.UntypedStorage._free_weak_ref(self.held.pop(key)[0])
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return result


def extra_memory(model: Any, prompt: str, method: str, **options: Any) -> int:
    """Peak bytes of tensors in a generation, without weights: caches, states and results of ops.

    Args:
        model: see `pdkernels.decoding.generate`, which takes all arguments.

    Example:
        >>> import pdkernels as pd
        >>> model = pd.models.load("tiny-code")
        >>> call = model, "import os", "jacobi"
        >>> few, many = (extra_memory(*call, max_new_tokens=4, block_size=size) for size in (2, 64))
        >>> 0 < few < many
        True
    """
    # Tables that the first call creates, such as those of the rotation, belong to the model, not to the generation.
    chosen = decoding.find(method)
    decoding.generate(model, prompt, chosen, **options)
    live = _Live()
    with live:
        decoding.generate(model, prompt, chosen, **options)
    return live.peak


_NOTE = "r: recurrences of a token; r': of a step of the sampler, whose other rows differ from it in one option."


def plot_recurrent(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the accuracy and speed of all candidates.

    Args:
        rows: the ``extra_info`` of `as_json` of a recurrent-depth model on a task with answers.
        path: of the PNG.

    Raises:
        ValueError: no row of a recurrent-depth method with answers.
        ImportError: no matplotlib.
    """
    rows = [
        row for row in rows if row["method"] in _COLOURS and row["right"] is not None and row["speedup"] is not None
    ]
    check(
        bool(rows),
        "evaluation.plot_recurrent",
        "rows",
        "hold figures of recurrent-depth methods on a task with answers",
        "none",
    )
    plot_rows(rows, path, _NOTE, forwards=False)


def plot_wave(
    trace: Sequence[RecurrentStep], path: Path, *, tokenizer: Any = None, threshold: float | None = None
) -> None:
    """Draws a run of the sampler: steps from top to bottom, positions from left to right, colours for distances.

    A cell is a row of the wave in a step, with its token if the text fits; its colour shows the relative change of the
    state. The line to the left of the cells is the cursor: all positions to its left are frozen.

    Args:
        trace: ``stats.trace`` of one sequence of a `recurrent_diffusion` with ``trace=True``.
        path: of the PNG.
        tokenizer: turns ids into text; None: ids are shown.
        threshold: the distance below which a row has converged, marked in the colour bar.

    Raises:
        ValueError: an empty trace.
        ImportError: no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    check(bool(trace), "evaluation.plot_wave", "trace", "hold steps", "an empty one")
    first = trace[0].cursor
    columns = max(step.cursor + len(step.tokens) for step in trace) - first
    grid = torch.full((len(trace), columns), torch.nan, dtype=torch.float32, device="cpu")
    for number, step in enumerate(trace):
        start = step.cursor - first
        grid[number, start : start + len(step.tokens)] = torch.tensor(
            step.distance, dtype=torch.float32, device="cpu"
        ).clamp(1e-3, 2)
    cell = 0.17
    figure, axis = plt.subplots(
        figsize=(max(6, cell * columns + 2.4), max(3, cell * len(trace) + 1.3)), layout="constrained"
    )
    drawn = axis.imshow(grid.numpy(), aspect="auto", cmap="viridis_r", norm=LogNorm(1e-3, 2), interpolation="none")
    bar = figure.colorbar(drawn, ax=axis, pad=0.01, fraction=0.03, label="distance of the state from the previous step")
    if threshold is not None:
        bar.ax.axhline(threshold, color="#c44e52", linewidth=2)
    for number, step in enumerate(trace):
        start = step.cursor - first
        axis.plot([start - 0.5, start - 0.5], [number - 0.5, number + 0.5], color="#c44e52", linewidth=1.6)
        if step.frozen:
            axis.plot([start - 0.5, start + step.frozen - 0.5], [number + 0.5] * 2, color="#c44e52", linewidth=1.6)
        if columns <= 140 and len(trace) <= 160:
            for index, token in enumerate(step.tokens):
                text = str(token) if tokenizer is None else tokenizer.decode([token])
                text = text if text.isprintable() else "·"
                colour = "#222222" if step.distance[index] < 0.01 else "white"
                axis.text(start + index, number, text, ha="center", va="center", fontsize=6.5, color=colour)
    axis.set(
        xlabel="position after the prompt",
        ylabel="step of the sampler",
        title="The wave: frozen rows leave at the red line",
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
