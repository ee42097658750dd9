"""Draws the pictures of the op pages: `python docs/pictures.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import pdkernels as pd
from pdkernels import masks as pdm
from pdkernels.evaluation import plot_canvas, plot_chunks, plot_theory, plot_wave

IMAGES = Path(__file__).resolve().parent / "images"
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
        axis.annotate(
            "",
            xy=(i + 1.3, 2.38),
            xytext=(i + 0.6, 2.02),
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.6},
        )
        axis.text(i + 1.12, 2.13, text, fontsize=10, color=colour)
    axis.annotate(
        "", xy=(0.47, 0.42), xytext=(2.47, 1.18), arrowprops={"arrowstyle": "-|>", "color": "#b8860b", "linewidth": 1.4}
    )
    axis.text(2.0, 0.6, "next_token", fontsize=9, color="#b8860b", ha="left")
    axis.text(2.5, -1.1, "accepted = 3    r: refill", ha="center", fontsize=10, family="monospace")
    save(figure, "verify_draft.png")


def recurrence() -> None:
    """A step of a wave: two rows freeze, nothing moves, and the next step reads two rows further on."""
    figure, axis = canvas(9.8, 4.4, (-3.9, 9.4), (-1.4, 6.0))
    settled = [True, True, False, True]
    cells(axis, 4.6, [("a", COMMITTED), ("b", MODEL), ("c", MODEL), ("d", MODEL), ("", FREE)], "tokens")
    cells(axis, 3.5, [("b", ACCEPTED), ("c", ACCEPTED), ("d", MODEL), ("e", MODEL), ("", FREE)], "predictions")
    states = [("z₀", ACCEPTED), ("z₁", ACCEPTED), ("z₂", MODEL), ("z₃", MODEL), ("", FREE)]
    cells(axis, 2.4, states, "states")
    for x, (done, distance) in enumerate(zip(settled, (".01", ".02", ".30", ".02"))):
        mark, colour = ("<", ACCEPTED) if done else ("≥", "#c44e52")
        axis.text(x + 0.47, 2.05, f"{distance} {mark} ε", ha="center", va="center", fontsize=8, color=colour)
    axis.text(5.3, 5.0, "a is text already", fontsize=9, va="center", color=COMMITTED)
    axis.text(
        5.3,
        3.9,
        "recurrence_advance_: b, c become text,\nand the wave moves on by advance = 2",
        fontsize=9,
        va="center",
        color=ACCEPTED,
    )
    axis.text(
        5.3,
        2.8,
        "recurrence_exit: row 2 has not settled,\nso row 3 waits (rule prefix)",
        fontsize=9,
        va="center",
        color="#444444",
    )
    after = 0.0
    cells(axis, after, [("c", COMMITTED), ("d", MODEL), ("e", MODEL), ("", FREE), ("", FREE)], "tokens")
    cells(
        axis,
        after - 1.1,
        [("z₂ + noise", MODEL), ("z₃ + noise", MODEL), ("init", FREE), ("", FREE), ("", FREE)],
        "what enters the core",
    )
    for x in range(2):
        style = {"arrowstyle": "-|>", "color": "#b8860b", "linewidth": 1.4}
        axis.annotate("", xy=(x + 0.6, after + 0.84), xytext=(x + 2.47, 1.82), arrowprops=style)
    axis.text(3.35, 1.2, "row i is read at row i + advance", fontsize=9, color="#b8860b", va="center")
    axis.text(5.3, after + 0.4, "cursor + 2, one new row (headway)", fontsize=9, va="center", color="#444444")
    axis.text(
        5.3,
        after - 0.7,
        "recurrence_inject: noise, and\ne = (1 - η) prelude + η e of before",
        fontsize=9,
        va="center",
        color="#444444",
    )
    axis.text(-3.8, 5.75, "step t", fontsize=11, weight="bold")
    axis.text(-3.8, 1.2, "step t + 1", fontsize=11, weight="bold")
    save(figure, "recurrence.png")


def block_sparse_attention() -> None:
    """On the left the tiles of a mask, on the right how the program of one query tile walks its list."""
    plan, chosen = pdm.noise_aware_causal(72, 16, 6).plan(32, 32), 7
    figure, (axis, steps) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained", width_ratios=[1, 1.2])
    tiles, (offsets, others, bitmaps) = plan.grid[0], (part.tolist() for part in plan.visits())
    lists = [list(zip(others, bitmaps))[offsets[t] : offsets[t + 1]] for t in range(tiles)]
    for t in range(tiles):
        content = {tile: MODEL if bitmap >= 0 else COMMITTED for tile, bitmap in lists[t]}
        for key in range(tiles):
            box = plt.Rectangle(
                (key, t), 0.94, 0.94, facecolor=content.get(key, FREE), edgecolor="#444444", linewidth=0.8
            )
            axis.add_patch(box)
    axis.add_patch(
        plt.Rectangle((-0.08, chosen - 0.08), tiles + 0.1, 1.1, facecolor="none", edgecolor="black", linewidth=2)
    )
    axis.set(
        xlim=(-0.3, tiles + 0.2),
        ylim=(tiles + 0.2, -0.3),
        aspect="equal",
        xticks=[i + 0.47 for i in range(tiles)],
        yticks=[i + 0.47 for i in range(tiles)],
    )
    axis.set_xticklabels(range(tiles))
    axis.set_yticklabels(range(tiles))
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_xlabel("key tiles")
    axis.set_ylabel("query tiles")
    names = ((COMMITTED, "full"), (MODEL, "partial"), (FREE, "skipped"))
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="#444444") for colour, _ in names]
    axis.legend(
        handles, [name for _, name in names], loc="upper center", ncols=3, frameon=False, bbox_to_anchor=(0.5, 1.12)
    )

    steps.set(xlim=(-0.2, 8.6), ylim=(-5.2, 3.0))
    steps.axis("off")
    visits = lists[chosen]
    steps.text(-0.1, 2.6, f"the list of query tile {chosen}", fontsize=11, weight="bold")
    full = sum(bitmap < 0 for _, bitmap in visits)
    for x, (tile, bitmap) in enumerate(visits):
        colour = MODEL if bitmap >= 0 else COMMITTED
        steps.add_patch(plt.Rectangle((x, 1.2), 0.94, 0.8, facecolor=colour, edgecolor="#444444", linewidth=0.8))
        steps.text(
            x + 0.47, 1.6, str(tile), ha="center", va="center", fontsize=10, color="white" if bitmap < 0 else "#222222"
        )
        if bitmap >= 0:
            steps.text(x + 0.47, 1.0, f"bitmap {bitmap}", ha="center", va="top", fontsize=8, color="#444444")
    for begin, end, text in ((0, full, "first loop: no mask"), (full, len(visits), "second loop: bits")):
        steps.plot([begin + 0.05, end - 0.1], [2.12, 2.12], color="black", linewidth=1.2)
        steps.text((begin + end) / 2, 2.2, text, ha="center", fontsize=9)
    code = """peak, total, acc = -inf, 0, 0
for key tile in list:
    s = scale * q @ k.T
    s = where(bit, s, -inf)    second loop only
    old, peak = peak, max(peak, rowmax(s))
    p = exp(s - peak)
    total = total * exp(old - peak) + rowsum(p)
    acc   = acc   * exp(old - peak) + p @ v
out = acc / total         (0 where nothing was seen)
lse = peak + log(total)   (-inf there)"""
    steps.text(-0.1, 0.3, code, fontsize=9.5, family="monospace", va="top", linespacing=1.5)
    save(figure, "block_sparse_attention.png")


def speculative_attention() -> None:
    """On the left the keys of each new token: the prefix in splits, the plan's tiles of the tail. On the right what is computed."""
    mask, tile, splits, width = pdm.quadratic(4), 4, 3, 5
    dense, new, prefix = mask.dense(), mask.q_len, 3 * 5
    figure, (axis, steps) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained", width_ratios=[1.75, 1])
    for row in range(new):
        for key in range(prefix):
            axis.add_patch(plt.Rectangle((key, row), 0.92, 0.92, facecolor=COMMITTED, linewidth=0))
        for key in range(new):
            colour = MODEL if dense[row, key] else FREE
            axis.add_patch(plt.Rectangle((prefix + 1 + key, row), 0.92, 0.92, facecolor=colour, linewidth=0))
    for share in range(splits):
        axis.add_patch(
            plt.Rectangle(
                (share * width - 0.06, -0.06), width, new + 0.06, facecolor="none", edgecolor="black", linewidth=1.4
            )
        )
        axis.text((share + 0.5) * width, -0.5, f"split {share}", ha="center", fontsize=9)
    for row in range(0, new, tile):
        for key in range(0, new, tile):
            seen = bool(dense[row : row + tile, key : key + tile].any())
            style = (
                {"edgecolor": "black", "linewidth": 1.4}
                if seen
                else {"edgecolor": "#bbbbbb", "linewidth": 0.6, "linestyle": ":"}
            )
            axis.add_patch(
                plt.Rectangle(
                    (prefix + 1 + key - 0.06, row - 0.06),
                    tile,
                    tile,
                    facecolor="none",
                    zorder=3 if seen else 2,
                    **style,
                )
            )
    axis.text(prefix + 1 + new / 2, -0.5, "tail: tiles of the plan", ha="center", fontsize=9)
    axis.set(xlim=(-0.4, prefix + new + 1.6), ylim=(new + 0.4, -1.8), aspect="equal")
    axis.set_xticks(
        [prefix / 2, prefix + 1 + new / 2],
        ["cached tokens, lengths[b] of them", "new tokens: 4 drafted, 4 masks after each"],
    )
    axis.set_yticks([2, 4 + (new - 4) / 2], ["drafted", "masks"])
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    names = ((COMMITTED, "visible to all: no mask"), (MODEL, "visible: the plan's bits"), (FREE, "hidden"))
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour) for colour, _ in names]
    axis.legend(
        handles, [name for _, name in names], loc="lower center", ncols=3, frameon=False, bbox_to_anchor=(0.5, 1.0)
    )

    steps.set(xlim=(0, 10), ylim=(-10, 3))
    steps.axis("off")
    code = """for each split, in parallel:
    attend to its cached tokens
    one split also for the tail:
        for key tile in the plan's list:
            attend, masked by its bits
    keep out_s, lse_s      (float32)

lse = log(sum_s exp(lse_s))
out = sum_s exp(lse_s - lse) * out_s"""
    steps.text(0, 1.6, "one query tile, one KV head", fontsize=11, weight="bold")
    steps.text(0, 0.6, code, fontsize=9.5, family="monospace", va="top", linespacing=1.6)
    save(figure, "speculative_attention.png")


def transformer_ops() -> None:
    """A layer from left to right: matrix products in white, the ops of the family in colour."""
    figure, axis = canvas(12.5, 2.7, (-0.3, 17.3), (-1.3, 2.3))
    boxes = [
        ("qkv\nproduct", FREE, 1.5),
        ("apply_rope_append_\n+ bias, RoPE, K V \u2192 cache", COMMITTED, 3.0),
        ("attention", FREE, 1.5),
        ("output\nproduct", FREE, 1.5),
        ("add_rms_norm\nnorm_2, norm_3", ACCEPTED, 2.1),
        ("gate, up\nproduct", FREE, 1.5),
        ("silu_and_mul", MODEL, 1.4),
        ("down\nproduct", FREE, 1.5),
        ("add_rms_norm\nnorm_4, next norm_1", ACCEPTED, 2.4),
    ]
    x, ends = 0.0, []
    for text, colour, width in boxes:
        axis.add_patch(plt.Rectangle((x, 0), width - 0.12, 1.2, facecolor=colour, edgecolor="#444444", linewidth=0.8))
        dark = colour in (COMMITTED, ACCEPTED)
        axis.text(
            x + width / 2 - 0.06,
            0.6,
            text,
            ha="center",
            va="center",
            fontsize=8.5,
            color="white" if dark else "#222222",
        )
        x += width
        ends.append(x - width / 2 - 0.06)
    arrow = {"arrowstyle": "-|>", "color": "#555555", "linewidth": 1.2}
    for start, end, text in ((-0.2, ends[4], "residual x"), (ends[4] + 0.3, ends[8], "residual h")):
        axis.annotate(
            "",
            xy=(end, 1.22),
            xytext=(start, 1.75),
            arrowprops={**arrow, "connectionstyle": "angle,angleA=0,angleB=90,rad=4"},
        )
        axis.text((start + end) / 2, 1.85, text, ha="center", fontsize=9)
    axis.text(
        8.5,
        -0.75,
        "white: products and attention    in colour: one op each, every row read once",
        ha="center",
        fontsize=9,
    )
    save(figure, "transformer_ops.png")


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
    for place, row in enumerate(chosen):
        axis.annotate("", xy=(place + 0.47, -0.58), xytext=(row + 0.47, 0.18), arrowprops=arrow)
        axis.annotate("", xy=(row + 0.47, -3.38), xytext=(place + 0.47, -2.62), arrowprops={**arrow, "color": ACCEPTED})
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
            place = (left + tile * width / 2, 2.4)
            axis.add_patch(
                plt.Rectangle(place, width / 2 - 0.12, 1.1, facecolor=colour, edgecolor="#444444", linewidth=0.8)
            )
            axis.text(
                place[0] + width / 4 - 0.06,
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


def masks() -> None:
    rounds = [pdm.Stage(5, (4, 6, 3)), pdm.Stage(3, (4, 4)), pdm.Stage(1, sync=False)]
    noise_aware = {"prompt_len": 6, "block_size": 4, "num_blocks": 4}
    packed = [pdm.causal(9), pdm.dual_stream(6, 3), pdm.candidates(2, 3)]
    pictures: dict[str, tuple[str, pdm.SegmentMask, int | None]] = {
        "causal": ("causal(8, 20)", pdm.causal(8, 20), None),
        "block_causal": ("block_causal(22, 6, prefix_len=5)", pdm.block_causal(22, 6, prefix_len=5), None),
        "noisy": ("noise_aware_causal(6, 4, 4)", pdm.noise_aware_causal(**noise_aware), None),
        "clean": ('conditioning="clean"', pdm.noise_aware_causal(**noise_aware, conditioning="clean"), None),
        "window": (
            'conditioning="window", window=2',
            pdm.noise_aware_causal(**noise_aware, conditioning="window", window=2),
            None,
        ),
        "interleaved": ('layout="interleaved"', pdm.noise_aware_causal(**noise_aware, layout="interleaved"), None),
        "tiles_streams": ("Streams in tiles", pdm.noise_aware_causal(512, 32, 64), 128),
        "tiles_interleaved": ("Interleaved in tiles", pdm.noise_aware_causal(512, 32, 64, layout="interleaved"), 128),
        "dual_stream": ("dual_stream(14, 4)", pdm.dual_stream(14, 4), None),
        "dual_stream_block": (
            'dual_stream(14, 4, clean="block", prefix_len=4)',
            pdm.dual_stream(14, 4, "block", prefix_len=4),
            None,
        ),
        "planned": ("planned(stages)", pdm.planned(rounds), None),
        "planned_sparse": ("planned(stages, sparse=True)", pdm.planned(rounds, sparse=True), None),
        "planned_streams": (
            "planned_streams(stages, sparse=True)",
            pdm.planned_streams(
                [pdm.Stage(4, (4, 5)), pdm.Stage(2, (4,), False), pdm.Stage(1, sync=False)], sparse=True
            ),
            None,
        ),
        "quadratic": ("quadratic(4)", pdm.quadratic(4), None),
        "quadratic_interleaved": (
            'quadratic(4, in_group="causal", layout="interleaved")',
            pdm.quadratic(4, in_group="causal", layout="interleaved"),
            None,
        ),
        "candidates": ("candidates(3, 6)", pdm.candidates(3, 6), None),
        "tree": ("tree([-1, 0, 1, 2, 1, 4, 0, 6, 6, -1, 9])", pdm.tree([-1, 0, 1, 2, 1, 4, 0, 6, 6, -1, 9]), None),
        "anchored": (
            "anchored([9, 7], [3, 6, 11, 14], 4, window=4)",
            pdm.anchored([9, 7], [3, 6, 11, 14], 4, window=4).queries,
            None,
        ),
        "anchored_rollouts": (
            'anchored([9, 7], anchors, sizes, "causal", inclusive=True, base="causal")',
            pdm.anchored([9, 7], [2, 6, 11], [4, 2, 3], "causal", inclusive=True, base="causal"),
            None,
        ),
        "pack": ("pack([causal, dual_stream, candidates], length=32)", pdm.pack(packed, 32), None),
    }
    for name, (title, mask, tile) in pictures.items():
        mask.draw(IMAGES / f"mask_{name}.png", tile, title)


def gallery() -> None:
    """Masks of the size of a training step or a draft, in the tiles of a kernel."""
    rounds = [pdm.Stage(60, (90, 120, 70)), pdm.Stage(40, (110, 60)), pdm.Stage(1, sync=False)]
    anchors = list(range(40, 500, 46))
    pictures: dict[str, tuple[str, pdm.SegmentMask, int]] = {
        "causal": ("causal(512)", pdm.causal(512), 64),
        "block_causal": ("block_causal(512, 32, prefix_len=100)", pdm.block_causal(512, 32, prefix_len=100), 64),
        "dual_stream": ("dual_stream(384, 32)", pdm.dual_stream(384, 32), 64),
        "noise_aware": ("noise_aware_causal(128, 32, 10)", pdm.noise_aware_causal(128, 32, 10), 64),
        "planned": ("planned(stages, sparse=True)", pdm.planned(rounds, sparse=True), 64),
        "anchored": ("anchored([300, 212], anchors, 16).queries", pdm.anchored([300, 212], anchors, 16).queries, 32),
        "quadratic": ("quadratic(16)", pdm.quadratic(16), 32),
        "candidates": ("candidates(6, 32)", pdm.candidates(6, 32), 32),
        "pack": ("pack([...], length=512)", pdm.pack([pdm.dual_stream(n, 16) for n in (120, 70, 50)], 512), 64),
    }
    for name, (title, mask, tile) in pictures.items():
        mask.draw(IMAGES / f"gallery_{name}.png", tile, title)


def recurrent_wave() -> None:
    """A run of the recurrent-depth sampler on a sum."""
    model = pd.models.load("tiny-recurrent")
    result = pd.decoding.generate(
        model, "482 + 967 = ?\n", "recurrent_diffusion", inner_recurrence=1, max_new_tokens=44, trace=True
    )
    plot_wave(result.stats.trace[0], IMAGES / "recurrent_wave.png", tokenizer=model.tokenizer, threshold=0.03)


def slowfast_canvas() -> None:
    """How SlowFast fills the canvas of a sum."""
    model = pd.models.load("tiny-masked")
    options = {"block_size": 16, "tau_min": 0.9, "tau_high": 0.97, "max_exploration": 1, "window": 1}
    result = pd.decoding.generate(model, "482 + 967 = ?\n", "slowfast", max_new_tokens=96, trace=True, **options)
    plot_canvas(
        result.stats.trace[0], IMAGES / "slowfast_canvas.png", tokenizer=model.tokenizer, mask_token=model.mask_token
    )


def planned_chunks() -> None:
    """How the chunks of two rounds are filled in: the second names lists of the digit that the first one picks."""
    model = pd.models.load("tiny-planned")
    options = {"steps_ratio": 0.25, "temperature": 1.0, "seed": 1, "max_new_tokens": 320}
    result = pd.decoding.generate(model, "*p;4x;3d;3q;pr;pw;\n", "planned", trace=True, **options)
    topics = [[model.tokenizer.decode(topic) for topic in each.topics] for each in result.stats.plans[0].rounds]
    path = IMAGES / "planned_chunks.png"
    plot_chunks(result.stats.trace[0], path, tokenizer=model.tokenizer, topics=topics)


if __name__ == "__main__":
    masks()
    gallery()
    block_sparse_attention()
    speculative_attention()
    kv_commit()
    verify_draft()
    transformer_ops()
    logit_divergence()
    feature_cache()
    token_statistics()
    linear_token_statistics()
    recurrence()
    unmask()
    recurrent_wave()
    slowfast_canvas()
    planned_chunks()
    plot_theory(IMAGES / "theory.png")
