"""The tables of docs/gpu_proof.md: what was timed beside what is predicted, predictions of what was not, controls and loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from bench.predict import gluon, measured, packed_code, statistics_figures
from bench.predict.device import Device
from bench.predict.model import (
    Shared,
    choice,
    cut,
    head,
    packed_bytes,
    product,
    row_statistics,
    scan,
    shared,
    small,
    step_cycles,
)

US = 1e-6
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu_proof.md"


class Row(NamedTuple):
    """A prediction; times in seconds."""

    work: str
    floor: float
    goal: float | None
    predicted: float
    balance: float | None = None
    """Makespan of the programs over their mean."""


def rows(device: Device, figures: dict[str, Any]) -> list[Row]:
    """Of work that was not timed, or whose kernels have changed since."""
    from pdkernels.triton.recurrent_state import choose_tile

    table: list[Row] = []
    for mask, wanted in (("dual stream 8192", 1300 * US), ("causal 8192", 2576 * US)):
        plan, of_plan = measured.plans()[mask]
        multiplied = 5 * 1024 * plan.visited_tiles * of_plan[0] / device.sms / device.clock
        in_one_pass, _ = gluon.one_pass(device, figures, plan, of_plan)
        table.append(Row(f"{mask}, backward in one pass", multiplied, wanted, in_one_pass))
    if code := figures["statistics"]:
        for count in (1, 32, 256):
            floor = count * measured.VOCABULARY * 2 / device.memory
            seconds = row_statistics(device, statistics_figures.today(code), count, measured.VOCABULARY)
            goal = {1: 8, 32: 15, 256: 18}[count] * US
            table.append(Row(f"token statistics, {count} x 126,464", floor, goal, seconds))
        table.append(Row("top-p cut 256 x 126,464", floor, 40 * US, cut(device, code["cut"], 256, 126464)))
    table += [
        Row(f"LM head, {count} rows", floor * US, goal * US, *head(device, figures, count, 126464, 4096))
        for count, floor, goal in ((256, 336, 370), (64, 241, 245))
    ]
    outputs, width = 28672, 4096
    floor = (outputs + 64) * width * 2 / device.memory
    seconds = product(device, 64, outputs, width)
    table.append(Row(f"linear, {outputs:,} x {width:,}, 64 rows", floor, 1.1 * floor, seconds))
    floor = sum(packed_bytes("half 4", *shape) for shape in measured.LAYER) / device.memory
    for form, label, goal in (("int8", "rows in 8 bits", 70 * US), ("numbers", "rows as they are", 45 * US)):
        for count in (1, 8, 16, 32, 64):
            seconds = sum(packed_code.seconds(device, form, count, *shape) for shape in measured.LAYER)
            work = f"packed products of an 8B layer, Q4_0, {measured.counted(count)}, {label}"
            table.append(Row(work, floor, goal if count == 8 else None, seconds))
    # Heads, keys, values. A state is read and written once.
    for name, label, heads, keys, values in (("delta", "gated delta", 32, 128, 128), ("mamba", "Mamba 2", 48, 128, 64)):
        for batch, count in ((1, 1), (1, 8), (16, 8)):
            moved, columns = 2 * batch * heads * keys * values * 4, choose_tile(keys, values, batch * heads).columns
            kernel = figures[f"state {name}, {columns} columns"]
            seconds = scan(device, kernel, batch * heads * values // columns, count, moved)
            floor = moved / device.memory
            goal = 1.5 * floor + 2 * device.launch
            table.append(Row(f"{label} step, batch {batch}, {count} accepted and {count} new", floor, goal, seconds))
    wave, accepted, prompt = 512 * 5280 * 2, 8 * 147456, 16384
    # 32 heads and 8 of K and of V: q and k are written back, k and v stored.
    turned = Shared(prompt, prompt * 256 * (48 + 40 + 16), 2 * 192, 256, 3, prompt, 2)
    # Fresh and cached values are read, and the fresh ones stored; pages of 16.
    stale = Shared(prompt, prompt * 2048 * 3, 1024, 128, 8, prompt // 16, 1)
    return [
        *table,
        Row("rotation and append, 16,384 rows in slots", 101 * US, 130 * US, shared(device, turned)),
        Row(
            "choice of stale rows among 16,384", 23.4 * US, 50 * US, shared(device, stale) + choice(device, prompt, 512)
        ),
        # Exit: sums, then two more looks at the row. Inject waits for numbers that say where a row comes from.
        Row("recurrence exit and inject, 512 rows", 6.3 * US, 9 * US, small(device, 2, 6 * wave, 3)),
        # Lengths, indices and pages before the rows, and the lengths again in the second launch.
        Row("KV commit, 8 rows of 36 layers", 0.5 * US, 5 * US, small(device, 2, 2 * accepted, 4)),
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


def markdown(device: Device, figures: dict[str, Any]) -> str:
    """Comparisons, predictions, controls and loops, for docs/gpu_proof.md."""

    def time(seconds: float) -> str:
        micro = seconds * 1e6
        return f"{micro / 1000:.2f} ms" if micro >= 1000 else f"{micro:.0f} µs" if micro >= 20 else f"{micro:.1f} µs"

    lines = [
        f"{device.name}: {device.clock / 1e9:.2f} GHz, {device.memory / 1e9:,.0f} GB/s, {device.launch * 1e6:.1f} µs a launch, "
        f"{device.l2:.1f} bytes a cycle from L2 to an SM, {device.drain} cycles a wait for products, {device.program:,} a program, "
        f"{device.alone:.1f} for an instruction of a warp alone, {device.latency * 1e6:.2f} µs an access.",
        "",
        *([*measured.lines(device, figures), ""] if device.name == "H200" else []),
        "| predicted, not measured | floor | goal | predicted | over its goal | makespan / mean |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows(device, figures):
        over = "" if row.goal is None else f" {(row.predicted / row.goal - 1) * 100:+.0f} %"
        goal = "" if row.goal is None else f" {time(row.goal)}"
        balance = "" if row.balance is None else f" {row.balance:.2f}"
        lines.append(f"| {row.work} | {time(row.floor)} |{goal} | {time(row.predicted)} |{over} |{balance} |")
    lines += ["", "| control | predicted TFLOP/s | published |", "|---|---:|---|"]
    lines += [f"| {what} | {rate:.0f} | {known} |" for what, rate, known in controls(device, figures)]
    lines += ["", "| loop | slots a warp | tensor cycles | MUFU cycles | loads under way | spills | cycles a step |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for name, kernel in figures.items():
        if "steady" in kernel:
            loop, cycles = kernel["steady"], step_cycles(device, kernel["steady"], kernel["warps"])
            wait = "" if loop["wait"] == 99 else f" {loop['wait']}"
            tensor, mufu = (loop[pipe] * kernel["warps"] // 4 for pipe in ("tensor", "mufu"))
            lines.append(f"| {name} | {loop['slots']} | {tensor} | {mufu} |{wait} | {loop['spills']} | {cycles:.0f} |")
    return "\n".join(lines)


def write(blocks: dict[str, str], page: Path = PAGE) -> None:
    """Renews the tables of a page between ``<!-- name -->`` and ``<!-- /name -->``.

    ValueError: it has no such place.
    """
    text = page.read_text()
    for name, table in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, opened, behind = text.partition(begin)
        _, closed, after = behind.partition(end)
        if not (opened and closed):
            raise ValueError(f"{page} has no place for {name!r}")
        text = before + begin + table + end + after
    page.write_text(text)
