"""Draws the pictures of the op pages: `python docs/pictures.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pdkernels import masks as pdm

IMAGES = Path(__file__).resolve().parent / "images"
COMMITTED, ACCEPTED, REJECTED, FREE, MODEL = "#4c78a8", "#54a24b", "#e8b4a8", "#f2f2f2", "#f2cf5b"


def cells(axis: plt.Axes, y: float, items: list[tuple[str, str]], label: str) -> None:
    """A row of boxes with a text each, named at the left."""
    axis.text(-0.4, y + 0.4, label, ha="right", va="center", fontsize=10)
    for x, (text, colour) in enumerate(items):
        axis.add_patch(plt.Rectangle((x, y), 0.94, 0.8, facecolor=colour, edgecolor="#444444", linewidth=0.8))
        dark = colour in (COMMITTED, ACCEPTED)
        axis.text(x + 0.47, y + 0.4, text, ha="center", va="center", fontsize=9, color="white" if dark else "#222222")


def canvas(width: float, height: float, xlim: tuple[float, float], ylim: tuple[float, float]) -> tuple[plt.Figure, plt.Axes]:
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    axis.set(xlim=xlim, ylim=ylim)
    axis.axis("off")
    return figure, axis


def save(figure: plt.Figure, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / name, dpi=120)
    plt.close(figure)


def kv_commit() -> None:
    figure, axis = canvas(9.5, 3.1, (-2.6, 14.6), (-1.5, 3.5))
    draft = [str(i) for i in range(9)]
    keep = [0, 3, 6]
    before = [("c", COMMITTED)] * 4 + [(d, ACCEPTED if int(d) in keep else REJECTED) for d in draft] + [("", FREE)]
    after = [("c", COMMITTED)] * 4 + [(str(i), ACCEPTED) for i in keep]
    after += [(d, FREE) for d in draft[3:]] + [("", FREE)]
    cells(axis, 2.0, before, "before")
    cells(axis, 0.0, after, "after")
    for target, source in enumerate(keep):
        style = {"arrowstyle": "-|>", "color": ACCEPTED, "linewidth": 1.4}
        axis.annotate("", xy=(4.47 + target, 0.82), xytext=(4.47 + source, 1.98), arrowprops=style)
    for y, length, text in ((3.0, 4, "lengths = 4"), (-0.25, 7, "lengths = 7")):
        axis.plot([length - 0.03] * 2, [y - 1.05, y - 0.0] if y > 0 else [y + 1.15, y], color="black", linewidth=1.6)
        axis.text(length - 0.03, y + (0.1 if y > 0 else -0.35), text, ha="center", fontsize=9)
    axis.text(6.0, -1.3, "source_index = [0, 3, 6],  counts = 3", ha="center", fontsize=10, family="monospace")
    save(figure, "kv_commit.png")


def verify_draft() -> None:
    figure, axis = canvas(8, 3.1, (-3.4, 6.2), (-1.3, 3.4))
    cells(axis, 2.4, [("a", ACCEPTED), ("b", ACCEPTED), ("c", ACCEPTED), ("x", REJECTED), ("y", REJECTED)], "draft")
    cells(axis, 1.2, [("b", MODEL), ("c", MODEL), ("d", MODEL), ("y", MODEL), ("z", MODEL)], "predictions")
    cells(axis, -0.4, [("d", MODEL), ("y", MODEL), ("z", MODEL), ("r", FREE), ("r", FREE)], "new_draft")
    for i, (text, colour) in enumerate([("=", ACCEPTED), ("=", ACCEPTED), ("≠", "#c44e52")]):
        axis.annotate("", xy=(i + 1.3, 2.38), xytext=(i + 0.6, 2.02), arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.6})
        axis.text(i + 1.12, 2.13, text, fontsize=10, color=colour)
    axis.annotate("", xy=(0.47, 0.42), xytext=(2.47, 1.18), arrowprops={"arrowstyle": "-|>", "color": "#b8860b", "linewidth": 1.4})
    axis.text(2.0, 0.6, "next_token", fontsize=9, color="#b8860b", ha="left")
    axis.text(2.5, -1.1, "accepted = 3    r: refill", ha="center", fontsize=10, family="monospace")
    save(figure, "verify_draft.png")


def masks() -> None:
    rounds = [pdm.Stage(5, (4, 6, 3)), pdm.Stage(3, (4, 4)), pdm.Stage(1, sync=False)]
    noise_aware = {"prompt_len": 6, "block_size": 4, "num_blocks": 4}
    packed = [pdm.causal(9), pdm.dual_stream(6, 3), pdm.candidates(2, 3)]
    pictures: dict[str, tuple[str, pdm.SegmentMask, int | None]] = {
        "causal": ("causal(8, 20)", pdm.causal(8, 20), None),
        "block_causal": ("block_causal(22, 6, prefix_len=5)", pdm.block_causal(22, 6, prefix_len=5), None),
        "noisy": ("noise_aware_causal(6, 4, 4)", pdm.noise_aware_causal(**noise_aware), None),
        "clean": ('conditioning="clean"', pdm.noise_aware_causal(**noise_aware, conditioning="clean"), None),
        "window": ('conditioning="window", window=2', pdm.noise_aware_causal(**noise_aware, conditioning="window", window=2), None),
        "interleaved": ('layout="interleaved"', pdm.noise_aware_causal(**noise_aware, layout="interleaved"), None),
        "tiles_streams": ("Streams in tiles", pdm.noise_aware_causal(512, 32, 64), 128),
        "tiles_interleaved": ("Interleaved in tiles", pdm.noise_aware_causal(512, 32, 64, layout="interleaved"), 128),
        "dual_stream": ("dual_stream(14, 4)", pdm.dual_stream(14, 4), None),
        "dual_stream_block": ('dual_stream(14, 4, clean="block", prefix_len=4)', pdm.dual_stream(14, 4, "block", prefix_len=4), None),
        "planned": ("planned(stages)", pdm.planned(rounds), None),
        "planned_sparse": ("planned(stages, sparse=True)", pdm.planned(rounds, sparse=True), None),
        "quadratic": ("quadratic(4)", pdm.quadratic(4), None),
        "quadratic_interleaved": ('quadratic(4, in_group="causal", layout="interleaved")',
                                  pdm.quadratic(4, in_group="causal", layout="interleaved"), None),
        "candidates": ("candidates(3, 6)", pdm.candidates(3, 6), None),
        "tree": ("tree([-1, 0, 1, 2, 1, 4, 0, 6, 6, -1, 9])", pdm.tree([-1, 0, 1, 2, 1, 4, 0, 6, 6, -1, 9]), None),
        "pack": ("pack([causal, dual_stream, candidates], length=32)", pdm.pack(packed, 32), None),
    }  # fmt: skip
    for name, (title, mask, tile) in pictures.items():
        mask.draw(IMAGES / f"mask_{name}.png", tile, title)


if __name__ == "__main__":
    masks()
    kv_commit()
    verify_draft()
