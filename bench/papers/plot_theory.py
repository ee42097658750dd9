"""Draws `bench.papers.theory`: the cost of width in a prefill, and the width of decoding."""

from __future__ import annotations

from pathlib import Path

from bench.papers.theory import decode_budget, prefill_cost

_COLOURS = ("#777777", "#4c78a8", "#c44e52")


def plot_theory(
    path: Path, *, factor: int = 4, hidden: int = 1024, recurrences: int = 32, inner: tuple[int, ...] = (2, 4, 8)
) -> None:
    """FLOPs of three prefills over those of depth scaling against prompt length, and rows of the sampler against block applications.

    Args:
        path: of the PNG.
        factor, hidden: of `prefill_cost`.
        recurrences, inner: of `decode_budget`; a line per value of `inner`.

    Raises:
        ImportError: no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (prefill, decode) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    lengths = [2**power for power in range(4, 15)]
    costs = [prefill_cost(length, factor, hidden).flops for length in lengths]
    for number, (name, colour) in enumerate(zip(("depth", "width, shared K/V", "width, all copies"), _COLOURS)):
        ratios = [flops[number] / flops[0] for flops in costs]
        prefill.plot(lengths, ratios, color=colour, linestyle="--" if number == 1 else "-")
        end = (lengths[-1], ratios[-1] + (0.0, -0.22, 0.0)[number])
        prefill.annotate(name, end, (-4, 6), textcoords="offset points", color=colour, ha="right", fontsize=9)
    prefill.set_xscale("log", base=2)
    prefill.set(xlabel="tokens of the prompt", ylabel="FLOPs over those of depth", ylim=(0, None))
    prefill.set_title(f"Prefill, {factor} applications, width {hidden}", loc="left", fontsize=11)
    steps = 2 * recurrences
    decode.plot([1, steps], [1, 1], color=_COLOURS[0])
    decode.annotate(
        "autoregressive", (steps, 1), (-4, 5), textcoords="offset points", ha="right", color=_COLOURS[0], fontsize=9
    )
    for count, colour in zip(inner, ("#4c78a8", "#54a24b", "#e39c37", "#b279a2")):
        budget = decode_budget(steps, recurrences, count)
        decode.step(range(1, steps + 1), budget.widths, where="post", color=colour)
        decode.annotate(
            f"r' = {count}",
            (steps, budget.wave),
            (-4, 5),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontsize=9,
        )
    decode.set(xlabel="applications of the block", ylabel="tokens in work", ylim=(0, None))
    decode.set_title(f"Decoding, {recurrences} recurrences a token", loc="left", fontsize=11)
    for axis in (prefill, decode):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
