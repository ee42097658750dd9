"""Predicts the times of kernels on a GPU from their machine code and their plans.

    python -m bench.predict --device h200        the tables of docs/gpu_proof.md

A step of a loop takes the cycles of its tensor products plus the issue slots of its warps if the loop waits for the products before
it continues, otherwise the larger of the two. To that are added the cost of every such wait, and the latency of loads that are waited
for immediately. The step takes at least the time in which L2 delivers its loads. Programs are then assigned to the SMs in launch order.
The time of a small kernel is that of a launch, of its bytes, of each dependent memory access, and of what a warp issues alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.predict.device import Device
from pdkernels.masks.tile_plan import TilePlan

if TYPE_CHECKING:
    from pdkernels.triton.linear import Tiling


def step_cycles(device: Device, loop: dict[str, int], warps: int) -> float:
    """Of one program on an SM."""
    tensor, issue = loop["tensor"] * warps / 4, max(loop["slots"], loop["mufu"]) * warps / 4
    cycles = tensor + issue + device.drain * loop["drains"] if loop["drains"] else max(tensor, issue)
    cycles = max(cycles, loop["loaded"] * warps / device.l2)
    return cycles + (device.exposed if loop["wait"] == 0 else 0)


def makespan(costs: Iterable[float], servers: int) -> tuple[float, float]:
    """(until all are done, mean over the servers) of work that the server free next takes up in order.

    >>> makespan([3, 1, 1, 1], 2), makespan([1, 1, 1, 3], 2)
    ((3.0, 3.0), (4.0, 3.0))
    """
    free, total = [0.0] * servers, 0.0
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
        total += cost
    return max(free), total / servers


class Attention:
    """Kernels of block-sparse attention on a plan of 128 x 128 tiles."""

    def __init__(
        self, device: Device, figures: dict[str, Any], plan: TilePlan, heads: tuple[int, int], head_dim: int = 128
    ) -> None:
        self.device, self.figures, self.plan, self.heads, self.head_dim = device, figures, plan, heads, head_dim

    def _tiles(self, kernel: str, cuts: tuple[int, int], transposed: bool) -> list[float]:
        """Cycles of a program on each tile, those with the most visits first."""
        steady, masked = (
            step_cycles(self.device, self.figures[kernel][loop], self.figures[kernel]["warps"])
            for loop in ("steady", "masked")
        )
        visits = self.plan.visits(transposed)
        rows, q_tiles = self.plan.rows, self.plan.grid[0]
        order = (rows[q_tiles:] if transposed else rows[:q_tiles])[:, 3].tolist()
        bounds, partial = visits.offsets.tolist(), (visits.bitmaps >= 0).tolist()
        found = []
        for tile in order:
            begin, end = bounds[tile : tile + 2]
            some = sum(partial[begin:end])
            found.append((end - begin - some) * cuts[0] * steady + some * cuts[1] * masked)
        return found

    def by_queries(self, kernel: str) -> tuple[float, float]:
        """Seconds of a kernel of query tiles, and makespan over mean."""
        from pdkernels.triton.blocking import _TABLE

        blocking = _TABLE[kernel, "sm_90"][128]
        tiles = self._tiles(kernel, (128 // blocking.block_n, 128 // blocking.masked), False)
        heads, kv_heads = self.heads
        costs = [
            cost + self.device.program for _ in range(kv_heads) for cost in tiles for _ in range(heads // kv_heads)
        ]
        return self._seconds(costs, kernel)

    def by_keys(self) -> tuple[float, float]:
        """Seconds of dK and dV, the sum of their pieces included, and makespan over mean."""
        from pdkernels.triton.block_sparse_attention import split_group
        from pdkernels.triton.blocking import _TABLE

        blocking = _TABLE["dkv", "sm_90"][128]
        tiles = self._tiles("dkv", (128 // blocking.block_m, 128 // blocking.masked), True)
        heads, kv_heads = self.heads
        group = heads // kv_heads
        pieces, piece = split_group(group, kv_heads * len(tiles))
        sizes = [min(piece, group - part * piece) for part in range(pieces)]
        costs = [cost * size + self.device.program for cost in tiles for size in sizes for _ in range(kv_heads)]
        seconds, balance = self._seconds(costs, "dkv")
        if pieces > 1:
            elements = 2 * self.plan.kv_len * kv_heads * self.head_dim
            seconds += self.device.launch + elements * (2 * 4 * pieces + 2) / self.device.memory
        return seconds, balance

    def _seconds(self, costs: Sequence[float], kernel: str) -> tuple[float, float]:
        longest, mean = makespan(costs, self.device.sms * self.figures[kernel]["programs"])
        return longest / self.device.clock + self.device.launch, longest / mean

    def forward(self) -> tuple[float, float]:
        return self.by_queries("forward")

    def backward(self) -> tuple[float, float]:
        (of_q, first), (of_k, second) = self.by_queries("dq"), self.by_keys()
        return of_q + of_k, max(first, second)


def speculative(
    device: Device, figures: dict[str, Any], new: int, prefix: int, heads: tuple[int, int], layout: str = "contiguous"
) -> tuple[float, float]:
    """Seconds of `new` rows over a cached prefix, and makespan over mean of the splits."""
    from pdkernels.triton.speculative_attention import _TABLE, SHORTEST_SPLIT, SPLIT_STEP, choose_splits

    blocking, kernel = _TABLE["many", "sm_90"][128], figures[f"speculative {layout}"]
    row_tiles = -(-new * heads[0] // heads[1] // blocking.block_m)
    splits = choose_splits(prefix, heads[1] * row_tiles)
    keys = max(-(-prefix // splits // SPLIT_STEP.value) * SPLIT_STEP.value, SHORTEST_SPLIT.value)
    in_use = -(-prefix // keys)
    steady, masked = (step_cycles(device, kernel[loop], kernel["warps"]) for loop in ("steady", "masked"))
    costs = []
    for split in reversed(range(in_use)):
        own = min(keys, prefix - split * keys)
        tail = -(-new // blocking.masked) * masked if split == in_use - 1 else 0
        costs += [own / blocking.block_n * steady + tail + device.program] * (heads[1] * row_tiles)
    longest, mean = makespan(costs, device.sms * kernel["programs"])
    merge = device.launch + new * heads[0] * 128 * 4 * 2 * in_use / (device.l2 * device.sms * device.clock)
    return longest / device.clock + device.launch + merge, longest / mean


class Statistics(NamedTuple):
    """The earlier kernels of vocabulary statistics: a warp for each region of 2048 logits, then a block for each row."""

    region: float
    """Instructions that a warp issues for a region."""
    row: float
    """Instructions that a warp issues for a row, one after the other."""
    waits: int
    """Accesses of both kernels that wait for each other."""


def statistics(device: Device, work: Statistics, rows: int, width: int) -> float:
    """Seconds for 16-bit logits. A warp computes when all its loads have arrived, so reading and issuing add up."""
    issue = rows * -(-width // 2048) * work.region / (4 * device.sms)
    cycles = issue + work.row * device.alone
    return cycles / device.clock + rows * width * 2 / device.memory + 2 * device.launch + work.waits * device.latency


class RowStatistics(NamedTuple):
    """The kernel of vocabulary statistics: a cluster of blocks for each row, eight warps in a block (csrc/cuda/token_statistics.cu)."""

    region: float
    """Instructions that a warp issues for a region of 2048 logits, while the loads of its next one are under way."""
    row: float
    """Instructions that a warp issues one after the other when all regions of a row are done."""
    waits: int = 2
    """Accesses that wait for each other: the first region's loads, then those of the tokens that are ranked."""


def row_blocks(device: Device, rows: int, regions: int, resident: int = 2) -> int:
    """As `blocks_of_row` of csrc/cuda/cluster.h chooses."""
    blocks = 1
    while blocks < 8 and 2 * blocks <= regions and 2 * blocks * rows <= resident * device.sms:
        blocks *= 2
    return blocks


def row_statistics(device: Device, work: RowStatistics, rows: int, width: int) -> float:
    """Seconds for 16-bit logits. A warp computes while it loads, so that the longer of the two counts."""
    regions = -(-width // 2048)
    blocks = row_blocks(device, rows, regions)
    abreast = min(2, -(-rows * blocks // device.sms))
    issue = regions_of_warps(device, work.region, rows, regions, blocks * 8, abreast * 8 / 4)
    read = rows * width * 2 / device.memory
    after = work.row * device.alone / device.clock + (device.meeting / device.clock if blocks > 1 else 0)
    return device.launch + max(issue, read) + after + work.waits * device.latency


def regions_of_warps(device: Device, slots: float, rows: int, regions: int, warps: int, abreast: float) -> float:
    """Seconds in which warps issue `slots` for each region: `warps` share a row, `abreast` a quarter of an SM."""
    alone = -(-regions // warps) * slots * max(device.alone, abreast)
    return max(rows * regions * slots / (4 * device.sms), alone) / device.clock


def head(device: Device, figures: dict[str, Any], rows: int, width: int, depth: int) -> tuple[float, float]:
    """Seconds of statistics of a product with the vocabulary, and makespan over mean."""
    from pdkernels.triton.linear_token_statistics import _TABLE, FEW_ROWS, choose_parts

    many = rows > FEW_ROWS
    tiling, kernel = _TABLE["sm_90"][many], figures["vocabulary many" if many else "vocabulary few"]
    tiles, parts = choose_parts(width, tiling.columns)
    step = step_cycles(device, kernel["steady"], kernel["warps"])
    # What is not the loop of products is issued once for the tiles abreast.
    one = depth / tiling.depth * step + (kernel["code"] - kernel["steady"]["slots"]) * kernel["warps"] / 4
    left = [min(tiles, -(-width // tiling.columns) - part * tiles) for part in range(parts)]
    row_tiles = -(-rows // tiling.rows)
    costs = [-(-count // tiling.abreast) * one + device.program for count in left for _ in range(row_tiles)]
    longest, mean = makespan(costs, device.sms * kernel["programs"])
    seconds = max(longest / device.clock, (width + rows) * depth * 2 / device.memory)
    return seconds + 2 * device.launch, longest / mean


def product(device: Device, rows: int, outputs: int, width: int, tiling: Tiling | None = None) -> float:
    """Seconds of `linear` in bf16: what L2 delivers to the SM with most programs, or reading the weights."""
    from pdkernels.triton.linear import choose_abreast, choose_few

    tiling = tiling or (choose_abreast(rows, outputs) if rows > 16 else choose_few(outputs))
    programs = -(-rows // tiling.rows) * -(-outputs // tiling.outputs)
    delivered = -(-programs // device.sms) * width * (tiling.rows + tiling.outputs) * 2
    return max(delivered / device.l2 / device.clock, (outputs + rows) * width * 2 / device.memory) + device.launch


def packed(device: Device, figures: dict[str, Any], name: str, rows: int, outputs: int, width: int) -> float:
    """Seconds of a product with a packed matrix: what its warps issue, what a warp issues one after the other, or reading the codes."""
    from pdkernels.triton.quantized_linear import _TABLE, BLOCK

    tiling, compiled = next((tiling, size) for tiling, size in zip(_TABLE, (8, 16, 64)) if rows <= tiling.rows)
    kernel = figures[f"packed {name}, {compiled} rows"]
    programs = -(-outputs // tiling.outputs) * -(-rows // tiling.rows)
    slots = width / (2 * BLOCK.value * tiling.pairs) * kernel["steady"]["slots"] + kernel["code"]
    issue = programs * slots * kernel["warps"] / (4 * device.sms)
    waves = -(-programs // (device.sms * kernel["programs"]))
    cycles = max(issue, waves * slots * device.alone)
    return max(cycles / device.clock, packed_bytes(name, outputs, width) / device.memory) + 2 * device.launch


def packed_bytes(name: str, outputs: int, width: int) -> int:
    """Of the codes and scales of a matrix with this kind of scales and bits."""
    from pdkernels.reference.quantized_linear import Layout

    scales, bits = name.split()
    return Layout(scales, int(bits), 8 if scales == "super" else 1).nbytes(outputs, width)


def scan(device: Device, kernel: dict[str, Any], programs: int, rows: int, moved: int) -> float:
    """Seconds of a step of layers with a state that replays `rows` rows and computes as many: the bytes, or what a warp issues one
    after the other. The longest loop is that over new rows. The second launch moves what is small."""
    slots = rows * (kernel["steady"]["slots"] + kernel["masked"]["slots"]) + kernel["code"]
    waves = -(-programs // (device.sms * kernel["programs"]))
    abreast = min(-(-programs // device.sms), kernel["programs"])
    cycles = waves * slots * max(device.alone, abreast * kernel["warps"] / 4)
    return max(cycles / device.clock, moved / device.memory) + 2 * device.launch + 2 * device.latency


def small(device: Device, launches: int, moved: float, waits: int) -> float:
    """Seconds of kernels bound by latency: launches, bytes, and accesses that wait for another one."""
    return launches * device.launch + moved / device.memory + waits * device.latency


class Shared(NamedTuple):
    """A kernel whose blocks share the rows of a sequence; each looks at all that could be wrong with it first (csrc/cuda/rows.h)."""

    rows: int
    moved: int
    """Bytes, of all rows together."""
    blocks: int
    threads: int
    resident: int
    """Blocks that an SM holds at once."""
    looks: int
    """Rows or pages that a block looks at."""
    waits: int
    """Accesses of a look that wait for each other."""


def shared(device: Device, work: Shared) -> float:
    """Seconds: a block has four looks a thread under way, and two accesses after them until rows arrive."""
    rounds = -(-work.blocks // (device.sms * work.resident))
    check = (-(-work.looks // (4 * work.threads)) * work.waits + 2) * device.latency
    return device.launch + work.moved / device.memory + rounds * check


HELD = 32
"""Keys that a thread holds in registers."""
LOOK, READ, TOTAL, PLACE = 3.5, 5, 60, 67
"""Instructions that a warp issues for a key of a lane in registers, for one in memory, of which 8 are under way, for the sum over a
block, and for 32 rows that get their places, as compiled."""


def choice(device: Device, rows: int, threads: int) -> float:
    """Seconds of the kernel that finds the rows with the lowest keys, a block a sequence: 33 looks at all keys, of which the first are in
    registers, and two passes in which the rows get their places."""
    turns, schedulers = -(-rows // threads), threads / 32 / 4
    look = min(turns, HELD) * LOOK * schedulers + TOTAL * device.alone
    look += max(0, turns - HELD) * (READ * schedulers + device.near / 8)
    cycles = 33 * look + turns * PLACE * schedulers + 2 * -(-turns // 4) * device.near
    return device.launch + 3 * device.latency + cycles / device.clock


def cut(device: Device, slots: Sequence[int], rows: int, width: int) -> float:
    """Seconds of the kernel that finds what top-p keeps, where few tokens are within reach of the cut: a block a row, which reads it
    twice, for the sums and for the tokens near the largest logit. `slots`: what a warp issues for 2048 logits in each pass. Then the bins
    are searched, three times."""
    regions = -(-width // 2048)
    abreast = min(2, -(-rows // device.sms))
    read = rows * width * 2 / device.memory
    passes = (max(regions_of_warps(device, each, rows, regions, 8, abreast * 8 / 4), read) for each in slots)
    return sum(passes) + device.launch + (2 + 3) * device.latency
