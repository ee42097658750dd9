"""Four published forward passes for Hopper that the model must reproduce, and what it then predicts of the Gluon kernel.

    python -m bench.predict.ladder        the tables of docs/gpu_proof.md

Nothing here is measured. The published rates are of an H100 with heads of 128 and no mask: Triton's kernels at 1,024 to 16,384 tokens
(facebookexperimental/triton #205, #206, #829), FlashAttention 3 at four sizes, taken as 2,048 to 16,384 (tritonbench #1254). They fix three
numbers: the clock while tensor cores are busy, what a wait for products costs, and what a program takes outside its loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pdkernels import masks
from pdkernels.masks.tile_plan import TilePlan

SMS = 132
CLOCK = 1.45e9
"""Cycles a second while tensor cores are busy: the power limit lowers it from 1.7e9."""
DRAIN = 256
"""Cycles from the last product of a step until its warps go on."""
PROGRAM = 5000
"""Cycles of a tile of 128 rows outside its loops: the first loads, the last step, the results."""
LAUNCH = 2.5e-6
TENSOR = 2048
"""Cycles of both products of 128 rows and 128 keys with heads of 128."""
MUFU = 512
"""Cycles that the exponentials of 64 x 128 scores hold their pipe."""


class Rung(NamedTuple):
    name: str
    step: float
    """Cycles of a program for 128 keys."""
    published: dict[int, float]
    """Tokens -> TFLOP/s."""


def together(slots: int) -> float:
    """Cycles of a step whose softmax runs beside the products of both warp groups; `slots` of a warp."""
    return max(TENSOR, 2 * slots, 2 * MUFU) + 2 * DRAIN


RUNGS = (
    # Two warp groups in step: products, then 540 instructions of each of 8 warps, two a scheduler.
    Rung("Triton", TENSOR + 2 * 540 + DRAIN, {1024: 407, 2048: 428, 4096: 460, 8192: 464, 16384: 487}),
    # A producer; each group waits for both of its products, and the groups do so at the same time.
    Rung("specialised", TENSOR + MUFU + 2 * DRAIN, {1024: 449, 16384: 526}),
    Rung("specialised and pipelined", together(451), {1024: 478, 2048: 568, 4096: 549, 8192: 581, 16384: 612}),
    Rung("FlashAttention 3", together(455), {2048: 541, 4096: 618, 8192: 628, 16384: 639}),
)


def rate(step: float, tokens: int) -> float:
    """TFLOP/s of programs that each see so many keys."""
    steps = tokens / 128
    return 4 * 128**3 * steps / (steps * step + PROGRAM) * CLOCK * SMS / 1e12


def snake(costs: Sequence[float], servers: int) -> float:
    """Until all are done, where persistent programs take work in turns of alternating direction.

    >>> snake([4, 3, 2, 1], 2)
    5.0
    """
    totals = [0.0] * servers
    for item, cost in enumerate(costs):
        turn, position = divmod(item, servers)
        totals[position if turn % 2 == 0 else servers - 1 - position] += cost
    return max(totals)


def gluon_forward(figures: dict[str, Any], plan: TilePlan, heads: int) -> tuple[float, float]:
    """Seconds of the Gluon kernel on a plan of 128 x 128 tiles, and longest over mean of its programs."""
    loops = sorted(loop["slots"] for loop in figures["loops"])
    steady, masked = together(loops[0]), together(loops[-1])
    visits = plan.visits()
    bounds, partial = visits.offsets.tolist(), (visits.bitmaps >= 0).tolist()
    costs: list[float] = []
    for tile in plan.q_order.tolist():
        begin, end = bounds[tile : tile + 2]
        some = sum(partial[begin:end])
        costs += [(end - begin - some) * steady + some * masked + PROGRAM] * heads
    longest = snake(costs, SMS)
    return longest / CLOCK + LAUNCH, longest / (sum(costs) / SMS)


# Work, plan, query heads, limit, the best peer's published time, goal: microseconds on an H200.
WORK = (
    ("noise-aware 4608, forward", masks.noise_aware_causal(512, 32, 64, layout="streams"), 28, 117, 160, 165),
    ("dual stream 8192, forward", masks.dual_stream(4096, 32), 32, 349, 457, 470),
)


def lines(figures: dict[str, Any]) -> Iterator[str]:
    sizes = (1024, 2048, 4096, 8192, 16384)
    yield "| predicted / published TFLOP/s | " + " | ".join(f"{size:,}" for size in sizes) + " |"
    yield "|---|" + "---:|" * len(sizes)
    for rung in RUNGS:
        cells = (
            f"{rate(rung.step, size):.0f} / {rung.published[size]}" if size in rung.published else "" for size in sizes
        )
        yield f"| {rung.name} | " + " | ".join(cells) + " |"
    yield ""
    yield "| work | limit | best peer, published | goal | predicted for the Gluon kernel | longest / mean of its programs |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, mask, heads, limit, peer, goal in WORK:
        seconds, balance = gluon_forward(figures, mask.plan(128, 128), heads)
        yield f"| {name} | {limit} µs | {peer} µs | {goal} µs | {seconds * 1e6:.0f} µs | {balance:.2f} |"


def main() -> None:
    from tests.ops.test_block_sparse_attention_gluon_compiled import measure

    case = "bf16:128:128"
    print("\n".join(lines(measure([case])[case])))


if __name__ == "__main__":
    main()
