"""Four published forward passes for Hopper that the model must reproduce, and what it then predicts of our kernels.

    python -m bench.predict.ladder        the tables of docs/gpu_proof.md

Nothing here is measured. The published rates are of an H100 with heads of 128 and no mask: Triton's kernels at 1,024 to 16,384 tokens
(facebookexperimental/triton #205, #206, #829), FlashAttention 3 at four sizes, taken as 2,048 to 16,384 (tritonbench #1254). They fix three
numbers: the clock while tensor cores are busy, what a wait for products costs, and what a program takes outside its loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench.predict.model import DEVICES, head, makespan
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


CALIBRATED = DEVICES["h200"]._replace(clock=CLOCK, drain=DRAIN, program=PROGRAM)
"""For the Triton kernels, whose steps `bench.predict.model` adds up as the first rung does."""


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


def tile_costs(plan: TilePlan, transposed: bool, steady: float, masked: float) -> list[float]:
    """Cycles of a head on each tile of a plan of 128 x 128 tiles, those with the most visits first."""
    visits = plan.visits(transposed)
    bounds, partial = visits.offsets.tolist(), (visits.bitmaps >= 0).tolist()
    found = []
    rows = plan.rows[plan.grid[0] :] if transposed else plan.rows[: plan.grid[0]]
    for tile in rows[:, 3].tolist():
        begin, end = bounds[tile : tile + 2]
        some = sum(partial[begin:end])
        found.append((end - begin - some) * steady + some * masked)
    return found


def of_queries(plan: TilePlan, heads: int, steady: float, masked: float) -> tuple[float, float]:
    """Seconds of persistent programs, and longest over mean."""
    costs = [cost + PROGRAM for cost in tile_costs(plan, False, steady, masked) for _ in range(heads)]
    longest = snake(costs, SMS)
    return longest / CLOCK + LAUNCH, longest / (sum(costs) / SMS)


def gluon_forward(figures: dict[str, Any], plan: TilePlan, heads: int) -> tuple[float, float]:
    """Seconds of the Gluon kernel on a plan of 128 x 128 tiles, and longest over mean of its programs."""
    loops = sorted(loop["slots"] for loop in figures["loops"])
    return of_queries(plan, heads, together(loops[0]), together(loops[-1]))


def gluon_backward(figures: dict[str, dict[str, Any]], plan: TilePlan, heads: tuple[int, int]) -> tuple[float, float]:
    """The same of both kernels of the backward pass, whose steps of 64 have three products and three waits, and four and three."""
    from pdkernels.triton.block_sparse_attention import split_group

    (dq, dq_masked), (dkv, dkv_masked) = (
        [2 * (max(tensor, 2 * loop["slots"], MUFU) + 3 * DRAIN) for loop in (loops[0], loops[-1])]
        for tensor, loops in ((1536, figures["dq"]["loops"]), (2048, figures["dkv"]["loops"]))
    )
    first, balance = of_queries(plan, heads[0], dq, dq_masked)
    tiles = tile_costs(plan, True, dkv, dkv_masked)
    group = heads[0] // heads[1]
    pieces, piece = split_group(group, heads[1] * len(tiles))
    sizes = [min(piece, group - part * piece) for part in range(pieces)]
    longest, mean = makespan([cost * size + PROGRAM for cost in tiles for size in sizes for _ in range(heads[1])], SMS)
    seconds = first + longest / CLOCK + LAUNCH
    if pieces > 1:
        seconds += LAUNCH + 2 * plan.kv_len * heads[1] * 128 * (2 * 4 * pieces + 2) / CALIBRATED.memory
    return seconds, max(balance, longest / mean)


def gluon_speculative(figures: dict[str, Any], new: int, prefix: int, heads: int, kv_heads: int) -> tuple[float, float]:
    """Seconds of the Gluon kernel of `new` rows over a cached prefix, and longest over mean of its programs."""
    from pdkernels.triton.speculative_attention import SHORTEST_SPLIT, SPLIT_STEP, choose_splits

    loops = sorted(loop["slots"] for loop in figures["loops"])
    steady, masked = together(loops[0]), together(loops[-1])
    row_tiles = -(-new * heads // kv_heads // 128)
    splits = choose_splits(prefix, kv_heads * row_tiles)
    keys = max(-(-prefix // splits // SPLIT_STEP.value) * SPLIT_STEP.value, SHORTEST_SPLIT.value)
    in_use = -(-prefix // keys)
    costs: list[float] = []
    for split in reversed(range(in_use)):
        own = min(keys, prefix - split * keys)
        tail = -(-new // 128) if split == in_use - 1 else 0
        cost = own // 128 * steady + (tail + (own % 128 > 0)) * masked + PROGRAM
        costs += [cost] * (kv_heads * row_tiles)
    longest, mean = makespan(costs, SMS)
    merge = LAUNCH + new * heads * 128 * 4 * 2 * in_use / (CALIBRATED.l2 * SMS * CLOCK)
    return longest / CLOCK + LAUNCH + merge, longest / mean


NOISY = masks.noise_aware_causal(512, 32, 64, layout="streams"), (28, 4)
DUAL = masks.dual_stream(4096, 32), (32, 8)


def predictions(gluon: dict[str, dict[str, Any]], triton: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Seconds, and longest over mean of the programs, by work."""

    return {
        "noise-aware 4608, forward": gluon_forward(gluon["forward"], NOISY[0].plan(128, 128), NOISY[1][0]),
        "its backward": gluon_backward(gluon, NOISY[0].plan(128, 128), NOISY[1]),
        "dual stream 8192, forward": gluon_forward(gluon["forward"], DUAL[0].plan(128, 128), DUAL[1][0]),
        "its backward ": gluon_backward(gluon, DUAL[0].plan(128, 128), DUAL[1]),
        "quadratic width 8, prefix 16k": gluon_speculative(gluon["speculative"], 81, 16384, 32, 8),
        "LM head, 256 rows (Triton)": head(CALIBRATED, triton, 256, 126464, 4096),
    }


# Limit, the best peer's published time, goal: microseconds on an H200, in the order of the predictions.
GOALS = (
    (117, "160", 165),
    (292, "465 to 555", 520),
    (349, "457", 470),
    (873, "1300 to 1390", 1350),
    (27, "45 to 50", 46),
    (336, "about 400", 400),
)


def lines(gluon: dict[str, dict[str, Any]], triton: dict[str, Any]) -> Iterator[str]:
    sizes = (1024, 2048, 4096, 8192, 16384)
    yield "| predicted / published TFLOP/s | " + " | ".join(f"{size:,}" for size in sizes) + " |"
    yield "|---|" + "---:|" * len(sizes)
    for rung in RUNGS:
        cells = (
            f"{rate(rung.step, size):.0f} / {rung.published[size]}" if size in rung.published else "" for size in sizes
        )
        yield f"| {rung.name} | " + " | ".join(cells) + " |"
    yield ""
    yield "| work | limit | best peer, published | goal | predicted | over its goal | longest / mean of the programs |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for (name, (seconds, balance)), (limit, peer, goal) in zip(predictions(gluon, triton).items(), GOALS, strict=True):
        micro = seconds * 1e6
        over = f"{(micro / goal - 1) * 100:+.0f} %"
        yield f"| {name.strip()} | {limit} µs | {peer} µs | {goal} µs | {micro:.0f} µs | {over} | {balance:.2f} |"


def measure() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What `lines` takes: the figures of the Gluon kernels for heads of 128, and of the Triton kernels."""
    from bench.predict.loop_figures import measure as of_triton
    from tests.ops import test_block_sparse_attention_gluon_backward_compiled as backward
    from tests.ops import test_block_sparse_attention_gluon_compiled as forward
    from tests.ops import test_speculative_attention_gluon_compiled as speculative

    found = {}
    for name, (module, case) in {
        "forward": (forward, "bf16:128:128"),
        "speculative": (speculative, "bf16:128:0:64"),
        "dq": (backward, "bf16:128:128"),
        "dkv": (backward, "bf16:128:128:keys"),
    }.items():
        found[name] = module.measure([case])[case]
    return found, of_triton()


def main() -> None:
    print("\n".join(lines(*measure())))


if __name__ == "__main__":
    main()
