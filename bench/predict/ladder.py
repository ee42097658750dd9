"""Four published forward passes for Hopper that the model must reproduce with the three numbers of the H100 that are fitted to them.

    python -m bench.predict.ladder        the table of docs/gpu_proof.md

The published rates are of an H100 with heads of 128 and no mask: Triton's kernels at 1,024 to 16,384 tokens
(facebookexperimental/triton #205, #206, #829), FlashAttention 3 at four sizes, taken as 2,048 to 16,384 (tritonbench #1254). They fix
the clock while tensor cores are busy, what a wait for products costs, and what a program takes outside its loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.predict.device import DEVICES
from bench.predict.gluon import MUFU, TENSOR, together

H100 = DEVICES["h100"]


class Rung(NamedTuple):
    name: str
    step: float
    """Cycles of a program for 128 keys."""
    published: dict[int, float]
    """Tokens -> TFLOP/s."""


RUNGS = (
    # Two warp groups in step: products, then 540 instructions of each of 8 warps, two a scheduler.
    Rung("Triton", TENSOR + 2 * 540 + H100.drain, {1024: 407, 2048: 428, 4096: 460, 8192: 464, 16384: 487}),
    # A producer; each group waits for both of its products, and the groups do so at the same time.
    Rung("specialised", TENSOR + MUFU + 2 * H100.drain, {1024: 449, 16384: 526}),
    Rung("specialised and pipelined", together(H100, 451), {1024: 478, 2048: 568, 4096: 549, 8192: 581, 16384: 612}),
    Rung("FlashAttention 3", together(H100, 455), {2048: 541, 4096: 618, 8192: 628, 16384: 639}),
)


def rate(step: float, tokens: int) -> float:
    """TFLOP/s of programs that each see so many keys."""
    steps = tokens / 128
    return 4 * 128**3 * steps / (steps * step + H100.program) * H100.clock * H100.sms / 1e12


def lines() -> Iterator[str]:
    sizes = (1024, 2048, 4096, 8192, 16384)
    yield "| predicted / published TFLOP/s | " + " | ".join(f"{size:,}" for size in sizes) + " |"
    yield "|---|" + "---:|" * len(sizes)
    for rung in RUNGS:
        cells = (
            f"{rate(rung.step, size):.0f} / {rung.published[size]}" if size in rung.published else "" for size in sizes
        )
        yield f"| {rung.name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(lines()))
