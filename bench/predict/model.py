"""Predicts the times of the kernels on a GPU from their machine code and their plans. Nothing here is measured.

    python -m bench.predict --device h200        the table of docs/gpu_proof.md

A step of a loop takes the cycles of its tensor products plus the issue slots of its warps if the loop waits for the products before
it continues, otherwise the larger of the two. To that are added the cost of every such wait, and the latency of loads that are waited
for immediately. The step takes at least the time in which L2 delivers its loads. Programs are then assigned to the SMs in launch order.
The time of a small kernel is that of a launch, of its bytes, and of each dependent memory access.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pdkernels import masks
from pdkernels.masks.tile_plan import TilePlan
from tests.harness.budgets import find_nvcc


class Device(NamedTuple):
    """Of a GPU, where clocks are those of a long run."""

    name: str
    sms: int
    clock: float
    """Cycles a second."""
    memory: float
    """Bytes a second, read and written."""
    l2: float
    """Bytes a cycle that an SM gets from L2 while all of them ask."""
    launch: float = 2.5e-6
    """Seconds of a kernel that does next to nothing."""
    drain: int = 200
    """Cycles from the last product of a step until its warps go on, filling the pipe again included."""
    exposed: int = 750
    """Cycles of loads that are waited for as soon as they are issued: 500 to 1000."""
    program: int = 1500
    """Cycles of a program outside its loops."""
    latency: float = 0.6e-6
    """Seconds of an access to memory that waits for another, with the instructions around it."""
    alone: float = 2.0
    """Cycles that a warp takes for an instruction where no other one fills its waits."""
    near: int = 40
    """Cycles of an access to what is in the first-level cache."""


DEVICES = {"h200": Device("H200", 132, 1.7e9, 4.3e12, 28.0), "h100": Device("H100", 132, 1.7e9, 3.0e12, 28.0)}


class Row(NamedTuple):
    """A line of the table; times in seconds."""

    work: str
    floor: float
    goal: float
    predicted: float
    balance: float | None = None
    """Makespan of the programs over their mean, of the worst kernel."""


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
    device: Device, figures: dict[str, Any], new: int, prefix: int, heads: tuple[int, int]
) -> tuple[float, float]:
    """Seconds of `new` rows over a cached prefix, and makespan over mean of the splits."""
    from pdkernels.triton.speculative_attention import _TABLE, SHORTEST_SPLIT, SPLIT_STEP, choose_splits

    blocking, kernel = _TABLE["many", "sm_90"][128], figures["speculative contiguous"]
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


def statistics(device: Device, slots: float, rows: int, width: int) -> float:
    """Seconds of vocabulary statistics of 16-bit logits: `slots` a warp issues for 2048 of them, then a block joins each row."""
    warps = rows * -(-width // 2048)
    issue = warps * slots / (4 * device.sms * device.clock)
    return max(issue, rows * width * 2 / device.memory) + 2 * device.launch + 2 * device.latency


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


def product(device: Device, figures: dict[str, Any], rows: int, outputs: int, width: int) -> float:
    """Seconds of `linear` in bf16: what L2 delivers to the SM with most programs, what its warps issue, or reading the weights."""
    from pdkernels.triton.linear import choose_abreast, choose_few

    tiling = choose_abreast(rows, outputs) if rows > 16 else choose_few(outputs)
    kernel = figures[f"product, {tiling.rows} rows"]
    programs = -(-rows // tiling.rows) * -(-outputs // tiling.outputs)
    step = step_cycles(device, kernel["steady"], kernel["warps"])
    cycles = -(-programs // device.sms) * width / tiling.depth * step
    return max(cycles / device.clock, (outputs + rows) * width * 2 / device.memory) + device.launch


def packed(device: Device, figures: dict[str, Any], name: str, rows: int, outputs: int, width: int) -> float:
    """Seconds of a product with a packed matrix: what its warps issue, what a warp issues one after the other, or reading the codes."""
    from pdkernels.triton.quantized_linear import _TABLE, BLOCK

    tiling, kernel = next(one for one in _TABLE if rows <= one.rows), figures[f"packed {name}, {rows} rows"]
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


def choice(device: Device, rows: int, threads: int) -> float:
    """Seconds of the kernel that finds the rows with the lowest keys, a block a sequence: 33 passes over them and one that writes."""
    cycles = 34 * -(-rows // threads) * (device.near + threads / 32 * 8 / 4)
    return device.launch + 2 * device.latency + cycles / device.clock


def cut(device: Device, slots: Sequence[int], rows: int, width: int) -> float:
    """Seconds of the kernel that finds what top-p keeps: a block a row, which reads it in as many passes as there are `slots`, of a
    warp for 256 logits; a search through the bins after each pass but the first."""
    turns = -(-rows // device.sms) * width / 256
    passes = (max(turns * each / (4 * device.clock), rows * width * 2 / device.memory) for each in slots)
    return sum(passes) + device.launch + 4 * device.latency


def region_slots() -> float | None:
    """What a warp issues for a region of 2048 bf16 logits; None without nvcc."""
    from tests.harness.sass import cheapest_way

    return (
        None
        if find_nvcc() is None
        else cheapest_way(statistics_kernel("token_region_kernel", "Lb1ELb0E"), "MUFU.EX2", 64)
    )


def cut_slots() -> list[int] | None:
    """What a warp issues for 256 bf16 logits in each pass of the cut: the largest, masses into bins, what is left. None without nvcc."""
    from tests.harness.sass import cheapest_way, outer_loops

    if find_nvcc() is None:
        return None
    loops = outer_loops(statistics_kernel("token_cut_kernel", "Li8E"), "LDG")
    # Loops of top-k lie between the first pass and that of the masses, which needs exponentials.
    second = next(i for i, loop in enumerate(loops) if any(x.name.startswith("MUFU.EX2") for x in loop))
    passes = (loops[0], *loops[second : second + 2])
    return [cheapest_way(loop, *(("MUFU.EX2", 8) if number == 1 else ("LDG", 1))) for number, loop in enumerate(passes)]


def statistics_kernel(name: str, variant: str) -> Any:
    """The machine code of a kernel of vocabulary statistics for bf16."""
    from setup import CUDA_ARCHS
    from tests.harness.budgets import INCLUDE_DIRS, KERNEL_FOLDER, compile_kernels
    from tests.harness.sass import disassemble

    code = compile_kernels(KERNEL_FOLDER / "token_statistics.cu", INCLUDE_DIRS, CUDA_ARCHS)
    found = disassemble(code, "sm_90a")
    (kernel,) = (body for mangled, body in found.items() if f"{name}I13__nv_bfloat16{variant}" in mangled)
    return kernel


def rows(device: Device, figures: dict[str, Any], slots: float | None, cuts: Sequence[int] | None = None) -> list[Row]:
    """The table."""
    us = 1e-6
    noisy = Attention(device, figures, masks.noise_aware_causal(512, 32, 64, layout="streams").plan(128, 128), (28, 4))
    dual = Attention(device, figures, masks.dual_stream(4096, 32).plan(128, 128), (32, 8))
    found = [
        Row("block-sparse forward, noise-aware 4608", 117 * us, 195 * us, *noisy.forward()),
        Row("its backward", 292 * us, 580 * us, *noisy.backward()),
        Row("dual stream 8192, forward", 349 * us, 520 * us, *dual.forward()),
        Row("its backward", 873 * us, 1700 * us, *dual.backward()),
        Row("quadratic width 8, prefix 16k", 27.5 * us, 42 * us, *speculative(device, figures, 81, 16384, (32, 8))),
    ]
    if slots is not None:
        found.append(
            Row("token statistics 256 x 126,464", 15.1 * us, 17.5 * us, statistics(device, slots, 256, 126464))
        )
    if cuts is not None:
        found.append(Row("top-p cut 256 x 126,464", 15.1 * us, 40 * us, cut(device, cuts, 256, 126464)))
    found += [
        Row(f"LM head, {count} rows", floor * us, goal * us, *head(device, figures, count, 126464, 4096))
        for count, floor, goal in ((256, 336, 370), (64, 241, 245))
    ]
    for count in (1, 16, 64):
        floor = (28672 + count) * 4096 * 2 / device.memory
        seconds = product(device, figures, count, 28672, 4096)
        found.append(Row(f"linear, 28,672 x 4,096, {count} row{'s' * (count > 1)}", floor, 1.1 * floor, seconds))
    for name, label in (("half 4", "Q4_0"), ("super 4", "Q4_K")):
        for count in (8, 64):
            floor = packed_bytes(name, 28672, 4096) / device.memory
            seconds = packed(device, figures, name, count, 28672, 4096)
            found.append(
                Row(f"packed product {label}, 28,672 x 4,096, {count} rows, Triton", floor, 1.5 * floor, seconds)
            )
    # Heads, keys, values; tiles have 32 columns. A state is read and written once.
    for name, label, heads, keys, values in (("delta", "gated delta", 32, 128, 128), ("mamba", "Mamba 2", 48, 128, 64)):
        for batch, count in ((1, 1), (1, 8), (16, 8)):
            moved = 2 * batch * heads * keys * values * 4
            seconds = scan(device, figures[f"state {name}"], batch * heads * values // 32, count, moved)
            floor = moved / device.memory
            goal = 1.5 * floor + 2 * device.launch
            found.append(Row(f"{label} step, batch {batch}, {count} accepted and {count} new", floor, goal, seconds))
    wave, accepted, prompt = 512 * 5280 * 2, 8 * 147456, 16384
    # 32 heads and 8 of K and of V: q and k are written back, k and v stored.
    turned = Shared(prompt, prompt * 256 * (48 + 40 + 16), 2 * 192, 256, 3, prompt, 2)
    # Fresh and cached values are read, and the fresh ones stored; pages of 16.
    stale = Shared(prompt, prompt * 2048 * 3, 1024, 128, 8, prompt // 16, 1)
    return [
        *found,
        Row("rotation and append, 16,384 rows in slots", 101 * us, 130 * us, shared(device, turned)),
        Row(
            "choice of stale rows among 16,384", 23.4 * us, 50 * us, shared(device, stale) + choice(device, prompt, 512)
        ),
        # Exit: sums, then two more looks at the row. Inject waits for numbers that say where a row comes from.
        Row("recurrence exit and inject, 512 rows", 6.3 * us, 9 * us, small(device, 2, 6 * wave, 3)),
        # Lengths, indices and pages before the rows, and the lengths again in the second launch.
        Row("KV commit, 8 rows of 36 layers", 0.5 * us, 5 * us, small(device, 2, 2 * accepted, 4)),
    ]


def controls(device: Device, figures: dict[str, Any]) -> list[tuple[str, float, str]]:
    """(what, predicted TFLOP/s of its loop on full tiles, what was published)."""

    def rate(loop: dict[str, int], warps: int) -> float:
        flops = loop["tensor"] * warps / 4 * 4096
        return flops / step_cycles(device, loop, warps) * device.clock * device.sms / 1e12

    flex = figures["flex"]
    # As FlashAttention 4's forward for Hopper was found compiled: products of one group of 64 rows run while the other one's softmax
    # does, 455 instructions a warp for 128 keys, and each group waits for both of its products.
    flash = {"slots": 455, "tensor": 1024, "mufu": 512, "wait": 1, "drains": 0, "loaded": 0}
    tensor, issue = flash["tensor"] * 2, flash["slots"] * 2
    overlapped = 2 * tensor / (max(tensor, issue) + 2 * device.drain) * 2048 * device.clock * device.sms / 1e12
    return [
        ("FlexAttention's template, no mask", rate(flex["steady"], flex["warps"]), "408 to 496"),
        ("FlashAttention 4's loop for Hopper", overlapped, "560 to 740 (FlashAttention 3)"),
    ]


def markdown(device: Device, figures: dict[str, Any], slots: float | None, cuts: Sequence[int] | None = None) -> str:
    """Loops, rows and controls, for docs/gpu_proof.md."""

    def time(seconds: float) -> str:
        micro = seconds * 1e6
        return f"{micro / 1000:.2f} ms" if micro >= 1000 else f"{micro:.0f} µs" if micro >= 20 else f"{micro:.1f} µs"

    lines = [
        "| work | floor | goal | predicted now | over its goal | makespan / mean |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows(device, figures, slots, cuts):
        over = f"{(row.predicted / row.goal - 1) * 100:+.0f} %"
        balance = "" if row.balance is None else f" {row.balance:.2f}"
        lines.append(
            f"| {row.work} | {time(row.floor)} | {time(row.goal)} | {time(row.predicted)} | {over} |{balance} |"
        )
    lines += ["", "| control | predicted TFLOP/s | published |", "|---|---:|---|"]
    lines += [f"| {what} | {rate:.0f} | {known} |" for what, rate, known in controls(device, figures)]
    lines += ["", "| loop | slots a warp | tensor cycles | MUFU cycles | loads under way | spills | cycles a step |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for name, kernel in figures.items():
        loop, cycles = kernel["steady"], step_cycles(device, kernel["steady"], kernel["warps"])
        wait = "" if loop["wait"] == 99 else f" {loop['wait']}"
        tensor = loop["tensor"] * kernel["warps"] // 4
        lines.append(
            f"| {name} | {loop['slots']} | {tensor} | {loop['mufu'] * kernel['warps'] // 4} |{wait} | {loop['spills']} | {cycles:.0f} |"
        )
    return "\n".join(lines)
