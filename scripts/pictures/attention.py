"""Pictures of caches, drafts, attention and layers."""

from __future__ import annotations

import matplotlib.pyplot as plt

from pdkernels import masks as pdm
from scripts.pictures.parts import ACCEPTED, COMMITTED, FREE, MODEL, REJECTED, canvas, cells, save


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


PICTURES = (
    "kv_commit",
    "verify_draft",
    "recurrence",
    "block_sparse_attention",
    "speculative_attention",
    "transformer_ops",
)
