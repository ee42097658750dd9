"""Pictures of masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pdkernels._validation import message
from pdkernels.masks.tile_plan import TilePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "tokens": "#4c78a8",
    "prompt": "#8c8c8c",
    "context": "#8c8c8c",
    "plan": "#8c8c8c",
    "clean": "#4c78a8",
    "block": "#4c78a8",
    "noisy": "#f58518",
    "chunk": "#f58518",
    "draft": "#4c78a8",
    "masks": "#f58518",
    "candidate": "#54a24b",
    "branch": "#54a24b",
    "sync": "#b279a2",
    "padding": "#d8d8d8",
}
OTHERS = ["#e45756", "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6"]
HIDDEN = (0.975, 0.975, 0.975)
INK = "#333333"
PARTIAL = "#b00020"
# Pixels of the matrix in either direction; longer masks show a sample of their rows and columns.
MOST = 1400
# A label needs this share of the matrix.
MIN_SHARE = 0.035


class Run(Protocol):
    """The part of a segment that a picture shows."""

    @property
    def length(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def sample(self) -> int: ...


class Picture(NamedTuple):
    """The part of a mask that a picture shows. Windows and indices are over all tokens."""

    segments: Sequence[Run]
    segment_ids: Tensor
    rows: tuple[int, int]
    columns: tuple[int, int]
    density: float
    visible: Callable[[Tensor, Tensor], Tensor]
    """Visibility of some rows and some columns."""


def draw(mask: Picture, path: str | PathLike[str], plan: TilePlan | None, title: str | None) -> None:
    """See `SegmentMask.draw`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        remedy = "Install it with: pip install matplotlib"
        raise ImportError(message("masks.draw", "matplotlib", "be installed", "none", remedy)) from error

    kinds = list(dict.fromkeys(segment.kind for segment in mask.segments))
    spare = iter(OTHERS * len(kinds))
    colours = {kind: COLOURS.get(kind) or next(spare) for kind in kinds}
    shown_q, shown_k = mask.rows[1] - mask.rows[0], mask.columns[1] - mask.columns[0]
    q_len, kv_len = max(shown_q, 1), max(shown_k, 1)
    size = 6.2
    height = size * min(max(q_len / kv_len, 0.12), 1.6)
    width = min(size, height * kv_len / q_len) if q_len > kv_len else size
    figure = Figure(figsize=(max(width, 3.0) + 1.5, height + 1.75), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(_colours(mask, colours), extent=(0, kv_len, q_len, 0), interpolation="nearest", aspect="auto", zorder=0)
    _lines(axes, mask)
    _strips(axes, mask, colours)
    shape = f"{shown_q} x {shown_k}, {mask.density:.1%} visible"
    entries = _kind_legend(mask, colours)
    if plan is not None:
        _tiles(axes, plan)
        entries += _tile_legend()
        visits, partial, of = plan.visited_tiles, int((plan.visits().bitmaps >= 0).sum()), prod(plan.grid)
        shape += f"\n{plan.block_q} x {plan.block_k} tiles: {visits} of {of} visited, {partial} partial"
        shape += f", efficiency {plan.tile_efficiency:.1%}"
    axes.set(xlim=(0, kv_len), ylim=(q_len, 0))
    figure.suptitle(title or ", ".join(kinds) or "empty mask", fontsize=11, fontweight="bold", x=0.03, ha="left")
    axes.set_title(shape, fontsize=8.5, color=INK, loc="left", pad=27)
    figure.supylabel("queries", fontsize=9, color=INK)
    axes.set_xlabel("keys", fontsize=9, color=INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.tick_params(labelsize=8, colors=INK)
    axes.spines[:].set_color("#bbbbbb")
    if entries:
        columns = max(1, min(len(entries), int(figure.get_figwidth() / 1.9)))
        figure.legend(handles=entries, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    figure.savefig(path, format="png", dpi=120)


def _sampled(window: tuple[int, int]) -> Tensor:
    start, stop = window
    count = min(stop - start, MOST)
    return start + (torch.arange(count, dtype=torch.float64, device="cpu") * ((stop - start) / max(count, 1))).to(
        torch.int64
    )


def _colours(mask: Picture, colours: dict[str, str]) -> Any:
    """``(rows, columns, 3)``: the colour of the key's kind, paler in another segment than the query's."""
    from matplotlib.colors import to_rgb

    rows, columns = _sampled(mask.rows), _sampled(mask.columns)
    if rows.numel() == 0 or columns.numel() == 0:
        return torch.tensor(HIDDEN, dtype=torch.float32, device="cpu").expand(1, 1, 3).numpy()
    ids = mask.segment_ids.to(torch.int64)
    kinds = [to_rgb(colours[segment.kind]) for segment in mask.segments]
    palette = torch.tensor(kinds, dtype=torch.float32, device="cpu")[ids[columns]]
    strength = 0.5 + (ids[rows, None] == ids[columns])[..., None].float() / 2
    shade = palette * strength + (1 - strength)
    return torch.where(
        mask.visible(rows, columns)[..., None], shade, torch.tensor(HIDDEN, dtype=torch.float32, device="cpu")
    ).numpy()


def _spans(mask: Picture, window: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Segment, start and end of the part inside the window, for each segment that is not empty."""
    token = 0
    for number, segment in enumerate(mask.segments):
        begin, end = max(token, window[0]) - window[0], min(token + segment.length, window[1]) - window[0]
        if begin < end:
            yield number, begin, end
        token += segment.length


def _lines(axes: Axes, mask: Picture) -> None:
    """Edges of segments, unless there are too many, and of tokens, if there are few."""
    for window, along in ((mask.rows, axes.axhline), (mask.columns, axes.axvline)):
        spans, total = list(_spans(mask, window)), window[1] - window[0]
        if total <= 64:
            for token in range(1, total):
                along(token, color="white", linewidth=0.7, zorder=1)
        if len(spans) <= 64:
            for _, begin, _ in spans[1:]:
                along(begin, color="#888888", linewidth=0.6, zorder=2)


def _strips(axes: Axes, mask: Picture, colours: dict[str, str]) -> None:
    """Bars above and to the right of the matrix that show the segments."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches()
    for window, horizontal in ((mask.columns, True), (mask.rows, False)):
        total = max(window[1] - window[0], 1)
        thick = 0.13 / (height if horizontal else width)
        for begin, end, kind, label in _labelled(mask, window):
            share = (end - begin) / total
            start, extent = begin / total, share
            if horizontal:
                corner, box, middle = (start, 1.006), (extent, thick), (start + extent / 2, 1.012 + thick)
            else:
                start = 1 - end / total
                corner, box, middle = (1.006, start), (thick, extent), (1.012 + thick, start + extent / 2)
            _bar(axes, corner, box, colours[kind])
            needed = MIN_SHARE if not horizontal else 0.011 * len(label) + 0.01
            if share >= needed:
                vertical, side = ("bottom", "center") if horizontal else ("center", "left")
                axes.text(
                    *middle, label, transform=axes.transAxes, clip_on=False, fontsize=7.5, color=INK, va=vertical,
                    ha=side,
                )  # fmt: skip


def _bar(axes: Axes, corner: tuple[float, float], box: tuple[float, float], colour: str) -> None:
    from matplotlib.patches import Rectangle

    patch = Rectangle(
        corner, *box, transform=axes.transAxes, facecolor=colour, edgecolor="white", linewidth=0.4, clip_on=False
    )
    axes.add_patch(patch)


def _labelled(mask: Picture, window: tuple[int, int]) -> list[tuple[int, int, str, str]]:
    """Start, end, kind and label of bars. Where segments are too narrow for a label, runs of one kind share a bar."""
    totals: dict[tuple[int, str], int] = {}
    numbers = []
    for segment in mask.segments:
        key = (segment.sample, segment.kind)
        numbers.append(totals.get(key, 0))
        totals[key] = numbers[-1] + 1
    runs: list[list[tuple[int, int, int]]] = []
    for span in _spans(mask, window):
        segment, before = mask.segments[span[0]], mask.segments[runs[-1][-1][0]] if runs else None
        if before is not None and (before.kind, before.sample) == (segment.kind, segment.sample):
            runs[-1].append(span)
        else:
            runs.append([span])
    minimum = 2 * MIN_SHARE * (window[1] - window[0])
    runs = [
        bar
        for run in runs
        for bar in ([run] if any(end - begin < minimum for _, begin, end in run) else [[span] for span in run])
    ]
    bars = []
    for run in runs:
        (first, begin, _), (last, _, end) = run[0], run[-1]
        segment = mask.segments[first]
        label = segment.kind
        if totals[(segment.sample, segment.kind)] > 1:
            label += f" {numbers[first]}" if first == last else f" {numbers[first]}..{numbers[last]}"
        bars.append((begin, end, segment.kind, label))
    return bars


def _tiles(axes: Axes, plan: TilePlan) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    full: list[Rectangle] = []
    partial: list[Rectangle] = []
    offsets, tiles, bitmaps = (tensor.tolist() for tensor in plan.visits())
    for i, (first, last) in enumerate(pairwise(offsets)):
        for tile, bitmap in zip(tiles[first:last], bitmaps[first:last]):
            corner = (tile * plan.block_k, i * plan.block_q)
            box = (min(plan.block_k, plan.kv_len - corner[0]), min(plan.block_q, plan.q_len - corner[1]))
            (full if bitmap < 0 else partial).append(Rectangle(corner, *box))
    thin = 1.1 if len(full) + len(partial) < 300 else 0.35
    axes.add_collection(PatchCollection(full, facecolor="none", edgecolor=INK, linewidth=thin, zorder=3))
    hatched: dict[str, Any] = {"hatch": "///" if len(partial) < 1000 else None, "hatch_linewidth": 0.6}
    axes.add_collection(
        PatchCollection(partial, facecolor="none", edgecolor=PARTIAL, alpha=0.6, linewidth=thin, zorder=4, **hatched)
    )


def _kind_legend(mask: Picture, colours: dict[str, str]) -> list[Any]:
    """The colours in the picture, one per kind of key, in both shades if both occur."""
    from matplotlib.patches import Patch

    visible_kinds = {mask.segments[number].kind for number, _, _ in _spans(mask, mask.columns)}
    entries = [
        Patch(facecolor=colour, label=f"{kind} keys" if kind != "tokens" else "keys")
        for kind, colour in colours.items()
        if kind in visible_kinds
    ]
    rows, columns = _sampled(mask.rows), _sampled(mask.columns)
    if rows.numel() == 0 or columns.numel() == 0:
        return entries
    ids, visible = mask.segment_ids.to(torch.int64), mask.visible(rows, columns)
    same_segment = ids[rows, None] == ids[columns]
    if bool((visible & same_segment).any()) and bool((visible & ~same_segment).any()):
        entries.append(Patch(facecolor="#7f7f7f", label="dark: in the query's segment"))
        entries.append(Patch(facecolor="#bfbfbf", label="pale: in another segment"))
    return entries


def _tile_legend() -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(facecolor="none", edgecolor=INK, label="full tile"),
        Patch(facecolor="none", edgecolor=PARTIAL, hatch="///", label="partial tile"),
    ]
