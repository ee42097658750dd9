"""Pictures of the choice of tokens and rows."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch

import pdkernels as pd
from scripts.pictures.parts import ACCEPTED, COMMITTED, FREE, MODEL, REJECTED, canvas, cells, save


def logit_divergence() -> None:
    """On the left two distributions of the next token, on the right what min-p keeps of them."""
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.0), sharey=True, layout="constrained")
    distributions = {
        "then": [0.46, 0.30, 0.12, 0.04, 0.03, 0.02, 0.015, 0.015],
        "now": [0.62, 0.22, 0.07, 0.03, 0.025, 0.015, 0.01, 0.01],
    }
    for axis, levelled in zip(axes, (False, True)):
        for shift, (name, distribution) in zip((-0.2, 0.2), distributions.items()):
            low = [p < 0.1 * max(distribution) for p in distribution]
            bars = [1 / len(distribution) if levelled and under else p for p, under in zip(distribution, low)]
            total = sum(bars)
            colours = [REJECTED if levelled and under else (COMMITTED if name == "then" else ACCEPTED) for under in low]
            axis.bar(
                [i + shift for i in range(len(distribution))],
                [p / total for p in bars],
                0.38,
                color=colours,
                edgecolor="#444444",
                linewidth=0.6,
                label=name,
            )
        axis.spines[["top", "right"]].set_visible(False)
        axis.set(
            xticks=range(8),
            xticklabels=list("abcdefgh"),
            title="below 0.1 of the largest: 1 / V, then normed"
            if levelled
            else "the distributions: kl, entropy, argmax",
        )
    axes[0].legend(["then", "now"], frameon=False)
    save(figure, "logit_divergence.png")


def unmask() -> None:
    """The same canvas filled by three rules; confidence grows with the number of known neighbours."""
    words = "the quick brown fox jumps over the lazy dog".split()
    doubt = [0.05, 0.35, 0.3, 0.12, 0.45, 0.3, 0.04, 0.4, 0.14]
    rules = {"quota=2": {"quota": 2}, "threshold=0.85": {"threshold": 0.85}, "factor=1": {"factor": 1.0}}
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.0), layout="constrained")
    for axis, (title, rule) in zip(axes, rules.items()):
        axis.set(xlim=(-0.1, 9.1), ylim=(-4.1, 1.0), title=title)
        axis.axis("off")
        tokens, y = torch.full((1, len(words)), len(words)), 0.0
        while True:
            known = [0, *(tokens[0] != len(words)).tolist(), 0]
            confidence = torch.tensor([[1 - d * 0.4 ** (known[i] + known[i + 2]) for i, d in enumerate(doubt)]])
            before = tokens.clone()
            pd.unmask_(tokens, torch.arange(len(words))[None], confidence, mask_token=len(words), **rule)
            for x, word in enumerate(words):
                new, old = bool(tokens[0, x] != before[0, x]), bool(before[0, x] != len(words))
                text, colour = (
                    (word, ACCEPTED) if new else (word, COMMITTED) if old else (f"{confidence[0, x]:.2f}"[1:], FREE)
                )
                axis.add_patch(plt.Rectangle((x, y), 0.94, 0.8, facecolor=colour, edgecolor="#444444", linewidth=0.8))
                axis.text(
                    x + 0.47,
                    y + 0.4,
                    text,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if new or old else "#222222",
                )
            y -= 1
            if bool((tokens != len(words)).all()):
                break
    save(figure, "unmask.png")


def feature_cache() -> None:
    """One layer of a V-verify step: similarities choose rows, only those go through the products, all are added."""
    figure, axis = canvas(10.5, 5.0, (-3.6, 13.2), (-4.6, 3.6))
    similarity = [".99", ".61", ".98", ".97", ".42", ".99", ".98", ".88"]
    chosen = (1, 4)
    cells(axis, 2.4, [("v", MODEL)] * 8, "fresh values")
    cells(axis, 1.3, [("v", COMMITTED)] * 8, "cached values")
    cells(axis, 0.2, [(text, REJECTED if i in chosen else FREE) for i, text in enumerate(similarity)], "cosine")
    cells(axis, -1.4, [("1", MODEL), ("4", MODEL)], "gather_rows")
    cells(
        axis,
        -4.2,
        [("4'" if i == 4 else "1'" if i == 1 else str(i), ACCEPTED if i in chosen else COMMITTED) for i in range(8)],
        "cached output",
    )
    arrow = {"arrowstyle": "-|>", "color": "#b8860b", "linewidth": 1.4}
    for column, row in enumerate(chosen):
        axis.annotate("", xy=(column + 0.47, -0.58), xytext=(row + 0.47, 0.18), arrowprops=arrow)
        axis.annotate(
            "", xy=(row + 0.47, -3.38), xytext=(column + 0.47, -2.62), arrowprops={**arrow, "color": ACCEPTED}
        )
    axis.add_patch(plt.Rectangle((0, -2.6), 5.6, 0.8, facecolor="white", edgecolor="#444444", linewidth=0.8))
    axis.text(2.8, -2.2, "q and k, attention over all keys, output product", ha="center", va="center", fontsize=9)
    axis.text(
        8.3,
        1.4,
        "select_stale_rows_: the lowest cosines,\nindex = [1, 4]; fresh values replace\nthe cached ones",
        fontsize=9,
        va="center",
        color="#444444",
    )
    axis.text(8.3, -1.0, "gather_rows: x at index", fontsize=9, va="center", color="#b8860b")
    axis.text(
        8.3,
        -2.2,
        "apply_rope_append_, slots = index: K of rows\n1 and 4 overwrites its slot in the cache",
        fontsize=9,
        va="center",
        color="#444444",
    )
    axis.text(
        8.3,
        -3.8,
        "add_cached_rows_: rows 1 and 4 replace\nthe cached ones; x + cached of all rows",
        fontsize=9,
        va="center",
        color=ACCEPTED,
    )
    save(figure, "feature_cache.png")


def token_statistics() -> None:
    """Parts of a row, the results of each, and how they merge."""
    figure, axis = canvas(10.5, 3.4, (-2.9, 16.2), (-0.9, 3.9))
    logits = [0.2, 1.9, 0.6, 0.1, 1.2, 0.4, 2.6, 0.3, 0.9, 0.5, 0.2, 1.5, 0.7, 0.1, 0.4, 0.8]
    best = sorted(range(16), key=lambda i: -logits[i])[:2]
    for part in range(4):
        for i in range(4 * part, 4 * part + 4):
            axis.bar(
                i + 0.47,
                logits[i] * 0.55,
                0.8,
                bottom=2.3,
                color=ACCEPTED if i in best else COMMITTED,
                edgecolor="#444444",
                linewidth=0.6,
            )
        axis.add_patch(plt.Rectangle((4 * part, 1.05), 3.9, 0.85, facecolor=FREE, edgecolor="#444444", linewidth=0.8))
        axis.text(
            4 * part + 1.95,
            1.47,
            r"max, $\Sigma e^x$, $\Sigma x e^x$" "\nfirst tokens, best draw",
            ha="center",
            va="center",
            fontsize=8,
        )
        axis.annotate(
            "",
            xy=(4 * part + 1.95, 1.92),
            xytext=(4 * part + 1.95, 2.25),
            arrowprops={"arrowstyle": "-|>", "color": "#444444"},
        )
        axis.annotate(
            "", xy=(8, 0.62), xytext=(4 * part + 1.95, 1.03), arrowprops={"arrowstyle": "-|>", "color": "#444444"}
        )
    axis.add_patch(plt.Rectangle((2.5, -0.25), 11, 0.85, facecolor=MODEL, edgecolor="#444444", linewidth=0.8))
    axis.text(
        8, 0.17, "ids, probs, top_ids, top_probs, margin, entropy, logsumexp", ha="center", va="center", fontsize=9
    )
    for y, text in ((2.9, "logits, read once"), (1.47, "a part"), (0.17, "the row")):
        axis.text(-0.4, y, text, ha="right", va="center", fontsize=10)
    save(figure, "token_statistics.png")


def linear_token_statistics() -> None:
    """The head's rows in parts of two tiles, what a part keeps from its product with the hidden states, and the merge."""
    figure, axis = canvas(11, 3.6, (-3.2, 15.6), (-2.5, 4.2))
    colours, width = (COMMITTED, ACCEPTED, MODEL), 4
    axis.add_patch(plt.Rectangle((-2.9, 1.2), 1.5, 1.4, facecolor=REJECTED, edgecolor="#444444", linewidth=0.8))
    axis.text(-2.15, 1.9, "hidden\nrows x E", ha="center", va="center", fontsize=9)
    arrow = {"arrowstyle": "-|>", "color": "#555555", "linewidth": 1.1}
    axis.annotate("", xy=(-0.1, 1.9), xytext=(-1.35, 1.9), arrowprops=arrow)
    for part, colour in enumerate(colours):
        left = part * width
        for tile in range(2):
            corner = (left + tile * width / 2, 2.4)
            axis.add_patch(
                plt.Rectangle(corner, width / 2 - 0.12, 1.1, facecolor=colour, edgecolor="#444444", linewidth=0.8)
            )
            axis.text(
                corner[0] + width / 4 - 0.06,
                2.95,
                f"tile {2 * part + tile}",
                ha="center",
                va="center",
                fontsize=9,
                color="#222222" if colour == MODEL else "white",
            )
        axis.add_patch(plt.Rectangle((left, 0.2), width - 0.12, 1.2, facecolor=FREE, edgecolor=colour, linewidth=1.8))
        axis.text(
            left + width / 2, 0.8, "m, s, u, draw, top_k\nof rows x 2 tiles", ha="center", va="center", fontsize=9
        )
        axis.annotate("", xy=(left + width / 2, 1.45), xytext=(left + width / 2, 2.35), arrowprops=arrow)
        axis.annotate("", xy=(6, -0.95), xytext=(left + width / 2, 0.15), arrowprops=arrow)
    axis.text(6, 3.85, "the head, V x E: a program owns a part and walks its tiles", ha="center", fontsize=10)
    axis.text(12.3, 1.9, "logits live in\nregisters, one\ntile at a time", ha="left", va="center", fontsize=9)
    axis.add_patch(plt.Rectangle((2.6, -2.0), 6.8, 1.0, facecolor=FREE, edgecolor="#444444", linewidth=0.8))
    axis.text(6, -1.5, "ids, probs, top_k, margin, entropy, logsumexp", ha="center", va="center", fontsize=9)
    axis.text(9.7, -1.5, "merged in order, a row a program", ha="left", va="center", fontsize=9)
    save(figure, "linear_token_statistics.png")


PICTURES = ("logit_divergence", "unmask", "feature_cache", "token_statistics", "linear_token_statistics")
