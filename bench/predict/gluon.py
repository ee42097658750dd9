"""Times of the Gluon kernels for Hopper, heads of 128: a producer copies, and two groups of four warps run the softmax of one step beside
the products of the step before."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf
from typing import Any

from bench.predict.device import Device
from bench.predict.model import makespan
from pdkernels.masks.tile_plan import TilePlan

TENSOR = 2048
"""Cycles of both products of 128 rows and 128 keys with heads of 128."""
SHARED = 128
"""Bytes that shared memory delivers in a cycle."""
ONE_PASS_BYTES = 2 * (3 * 32 + 2 * 16) * 1024 + 2 * 16 * 1024 + 16 * 1024 + 32 * 1024
"""Of a step of 64 queries and 128 keys: operands of the five products of each consumer, three of which have both in shared memory; queries
and gradients that arrive, gradients of scores that are written, and sums of dQ that leave by the same way."""
MUFU = 512
"""Cycles that the exponentials of 64 x 128 scores hold their pipe."""


def together(device: Device, slots: int) -> float:
    """Cycles of a step whose softmax runs beside the products of both warp groups; `slots` of a warp."""
    return max(TENSOR, 2 * slots, 2 * MUFU) + 2 * device.drain


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
    costs = []
    rows = plan.rows[plan.grid[0] :] if transposed else plan.rows[: plan.grid[0]]
    for tile in rows[:, 3].tolist():
        begin, end = bounds[tile : tile + 2]
        with_mask = sum(partial[begin:end])
        costs.append((end - begin - with_mask) * steady + with_mask * masked)
    return costs


def of_queries(device: Device, plan: TilePlan, heads: int, steady: float, masked: float) -> tuple[float, float]:
    """Seconds of persistent programs, and longest over mean."""
    costs = [cost + device.program for cost in tile_costs(plan, False, steady, masked) for _ in range(heads)]
    longest = snake(costs, device.sms)
    return longest / device.clock + device.launch, longest / (sum(costs) / device.sms)


def forward(device: Device, figures: dict[str, Any], plan: TilePlan, heads: tuple[int, int]) -> tuple[float, float]:
    """Seconds on a plan of 128 x 128 tiles, and longest over mean of its programs."""
    loops = sorted(loop["slots"] for loop in figures["gluon forward"]["loops"])
    return of_queries(device, plan, heads[0], together(device, loops[0]), together(device, loops[-1]))


def backward(device: Device, figures: dict[str, Any], plan: TilePlan, heads: tuple[int, int]) -> tuple[float, float]:
    """The same of both kernels of the backward pass, whose steps of 64 have three products and three waits, and four and three."""
    from pdkernels.triton.block_sparse_attention import split_group

    (dq, dq_masked), (dkv, dkv_masked) = (
        [2 * (max(tensor, 2 * loop["slots"], MUFU) + 3 * device.drain) for loop in (loops[0], loops[-1])]
        for tensor, loops in ((1536, figures["gluon dq"]["loops"]), (2048, figures["gluon dkv"]["loops"]))
    )
    first, balance = of_queries(device, plan, heads[0], dq, dq_masked)
    tiles = tile_costs(plan, True, dkv, dkv_masked)
    group = heads[0] // heads[1]
    pieces, piece = split_group(group, heads[1] * len(tiles))
    sizes = [min(piece, group - number * piece) for number in range(pieces)]
    costs = [cost * size + device.program for cost in tiles for size in sizes for _ in range(heads[1])]
    longest, mean = makespan(costs, device.sms)
    seconds = first + longest / device.clock + device.launch
    if pieces > 1:
        seconds += device.launch + 2 * plan.kv_len * heads[1] * 128 * (2 * 4 * pieces + 2) / device.memory
    return seconds, max(balance, longest / mean)


def one_pass(
    device: Device, figures: dict[str, Any], plan: TilePlan, heads: tuple[int, int], waits: bool = True
) -> tuple[float, float]:
    """Seconds of the backward pass of five products, and what programs wait for their turns, as a part of all time. Without `waits`: as
    if none had to."""
    from pdkernels.triton.block_sparse_attention import split_group

    slots = max(loop["slots"] for loop in figures["gluon one pass"]["loops"])
    step = max(5 * 512, ONE_PASS_BYTES / SHARED, 2 * slots, MUFU) + 4 * device.drain
    group = heads[0] // heads[1]
    order = [rows[:, 3].tolist() for rows in (plan.rows[: plan.grid[0]], plan.rows[plan.grid[0] :])]
    seen = plan.visits(False).offsets.diff().tolist()
    visits = plan.visits(True)
    bounds, tiles = visits.offsets.tolist(), visits.tiles.tolist()
    pieces, piece = split_group(group, heads[1] * len(order[1]))
    hand_on = 2 * device.latency * device.clock if waits else -inf
    ended: dict[tuple[int, int], float] = {}
    free, waited = [0.0] * device.sms, 0.0
    for tile in order[1]:
        walk = sorted(tiles[bounds[tile] : bounds[tile + 1]], key=lambda at: (-seen[at], -at))
        for part in range(pieces):
            for kv_head in range(heads[1]):
                now = free[0] + device.program + device.latency * device.clock
                of_part = range(part * piece, min(group, (part + 1) * piece))
                for query in [
                    (kv_head * group + head, 2 * at + cut) for at in walk for head in of_part for cut in (0, 1)
                ]:
                    now += step
                    turn = max(now, ended.get(query, -inf) + hand_on)
                    waited += turn - now
                    now = ended[query] = turn
                heapq.heapreplace(free, now)
    elements = plan.q_len * heads[0] * 128
    # A program that describes visits looks at a dozen words that wait for each other.
    seconds = max(free) / device.clock + 3 * device.launch + 12 * device.latency + 4 * elements / device.memory
    if pieces > 1:
        seconds += device.launch + 2 * plan.kv_len * heads[1] * 128 * (2 * 4 * pieces + 2) / device.memory
    return seconds, waited / device.sms / max(free)


def speculative(
    device: Device, figures: dict[str, Any], new: int, prefix: int, heads: tuple[int, int]
) -> tuple[float, float]:
    """Seconds of `new` rows over a cached prefix, and longest over mean of the programs."""
    from pdkernels.triton.speculative_attention import SHORTEST_SPLIT, SPLIT_STEP, choose_splits

    loops = sorted(loop["slots"] for loop in figures["gluon speculative"]["loops"])
    steady, masked = together(device, loops[0]), together(device, loops[-1])
    programs = heads[1] * -(-new * heads[0] // heads[1] // 128)
    splits = choose_splits(prefix, programs)
    keys = max(-(-prefix // splits // SPLIT_STEP.value) * SPLIT_STEP.value, SHORTEST_SPLIT.value)
    in_use = -(-prefix // keys)
    costs: list[float] = []
    for split in reversed(range(in_use)):
        length = min(keys, prefix - split * keys)
        tail = -(-new // 128) if split == in_use - 1 else 0
        cost = length // 128 * steady + (tail + (length % 128 > 0)) * masked + device.program
        costs += [cost] * programs
    longest, mean = makespan(costs, device.sms)
    merge = device.launch + new * heads[0] * 128 * 4 * 2 * in_use / (device.l2 * device.sms * device.clock)
    return longest / device.clock + device.launch + merge, longest / mean


def measure() -> dict[str, dict[str, Any]]:
    """The figures of the kernels for heads of 128, each from a process of its own."""
    from tests.ops import test_block_sparse_attention_gluon_backward_compiled as gradients
    from tests.ops import test_block_sparse_attention_gluon_compiled as attention
    from tests.ops import test_speculative_attention_gluon_compiled as drafts

    cases = {
        "forward": (attention, "bf16:128:128"),
        "dq": (gradients, "bf16:128:128"),
        "dkv": (gradients, "bf16:128:128:keys"),
        "one pass": (gradients, "bf16:128:128:one-pass"),
        "speculative": (drafts, "bf16:128:0:64"),
    }
    return {f"gluon {name}": module.measure([case])[case] for name, (module, case) in cases.items()}
