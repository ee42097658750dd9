"""Pictures of recurrent states."""

from __future__ import annotations

import matplotlib.pyplot as plt

from scripts.pictures.parts import ACCEPTED, COMMITTED, FREE, MODEL, REJECTED, canvas, save

WORDS = "#b8860b"


def _state(axis: plt.Axes, y: float, text: str, colour: str = COMMITTED) -> None:
    axis.add_patch(plt.Rectangle((0, y - 0.1), 1.7, 1.0, facecolor=colour, edgecolor="#444444", linewidth=1.4))
    axis.text(0.85, y + 0.4, text, ha="center", va="center", fontsize=11, color="white")


def _pending(axis: plt.Axes, y: float, items: list[tuple[str, str]]) -> None:
    for x, (text, colour) in enumerate(items):
        at = 2.6 + x
        axis.add_patch(plt.Rectangle((at, y), 0.94, 0.8, facecolor=colour, edgecolor="#444444", linewidth=0.8))
        dark = colour in (COMMITTED, ACCEPTED)
        axis.text(at + 0.47, y + 0.4, text, ha="center", va="center", fontsize=9, color="white" if dark else "#222222")


def recurrent_state() -> None:
    """A draft of five rows, a commit of three of them, and the step that replays these."""
    figure, axis = canvas(10.5, 4.9, (-2.6, 14.3), (-0.2, 7.6))
    axis.text(0.85, 7.2, "state", ha="center", fontsize=10)
    axis.text(2.6, 7.2, "pending rows", ha="left", fontsize=10)
    axis.text(9.6, 7.2, "what happened", ha="left", fontsize=10)
    accepted = {"a": ACCEPTED, "b": REJECTED, "c": ACCEPTED, "d": REJECTED, "e": ACCEPTED}
    free = [("", FREE)]
    stages = [
        (5.4, "draft", "S₄", [(x, MODEL) for x in "abcde"] + free, "lengths 4   state_lengths 4",
         "outputs of a .. e are computed from S₄;\nonly what they add is stored"),
        (3.3, "commit", "S₄", list(accepted.items()) + free, "lengths 7   state_lengths 4",
         "state_commit_: pending_index = [0, 2, 4];\nno other byte changes"),
        (1.2, "next step", "S₇", [(x, MODEL) for x in "fghi"] + 2 * free, "lengths 7   state_lengths 7",
         "S₄ is read, a, c, e are replayed, S₇ is\nwritten, and f .. i computed from it"),
    ]  # fmt: skip
    for y, label, state, items, lengths, words in stages:
        axis.text(-0.4, y + 0.4, label, ha="right", va="center", fontsize=10)
        _state(axis, y, state)
        _pending(axis, y, items)
        axis.text(2.6, y + 1.02, lengths, ha="left", va="center", fontsize=8.5, family="monospace", color="#444444")
        axis.text(9.6, y + 0.4, words, ha="left", va="center", fontsize=9, color="#444444")
    style = {"arrowstyle": "-|>", "color": ACCEPTED, "linewidth": 1.4, "connectionstyle": "arc3,rad=0.12"}
    for x in (0, 2, 4):
        axis.annotate("", xy=(1.1 + 0.12 * x, 2.12), xytext=(3.0 + x, 3.26), arrowprops=style)
    axis.annotate("", xy=(0.5, 2.12), xytext=(0.5, 3.18), arrowprops={**style, "color": COMMITTED})
    axis.text(
        6.0, 0.2, "back to any length from state_lengths on: state_trim_, before the next step", ha="center",
        fontsize=9, color=WORDS,
    )  # fmt: skip
    save(figure, "recurrent_state.png")


PICTURES = ("recurrent_state",)
