"""Products with 4-bit codes by the kernels of csrc/cuda (quantized_linear.cu, quantized_linear_numbers.cu): Q4_0, rows in bfloat16, as nvcc 13.0
compiles them for sm_90a."""

from __future__ import annotations

from typing import NamedTuple

from bench.predict.device import Device
from bench.predict.model import packed_bytes

WARPS, ABREAST = 8, 2
"""Of a block of threads, each with chunks of the width; blocks that fit an SM."""


class Tiling(NamedTuple):
    """A warp's chunk: so many tiles of 16 outputs, groups of 8 rows, and blocks of 32 columns."""

    tiles: int
    groups: int
    blocks: int
    slots: int
    """Instructions that a warp issues for a chunk and all its groups, the turn with the sums included."""
    skipped: int = 0
    """Of these, what a group that has no rows saves."""
    along: int = WARPS
    """Warps that share tiles, and the width."""


class Form(NamedTuple):
    """How products take rows."""

    tilings: tuple[tuple[int, int, Tiling], ...]
    """Up to so many rows, from so many tiles on; the first that fits."""
    turn: int
    """Cycles from a warp's sums to the next one's, where warps take turns along the width: four or more additions that depend on each
    other between accesses to shared memory, and a barrier. Assumed."""
    near: int
    """Cycles that a warp waits for a chunk that has been fetched to L2. Assumed."""
    row_bytes: float
    """Of a number of a row, as products read it."""
    launches: int


FORMS = {
    "int8": Form(
        (
            (8, 1584, Tiling(1, 1, 8, 430, along=1)),
            (8, 0, Tiling(1, 1, 8, 525)),
            (16, 0, Tiling(1, 2, 4, 500)),
            (64, 0, Tiling(1, 4, 2, 480)),
        ),
        turn=150,
        near=300,
        row_bytes=1.5,
        launches=2,
    ),
    "numbers": Form(
        ((8, 528, Tiling(2, 1, 4, 345)), (8, 0, Tiling(1, 1, 8, 340)), (64, 0, Tiling(2, 4, 2, 350, 42))),
        turn=0,
        near=300,
        row_bytes=2,
        launches=1,
    ),
}


def seconds(device: Device, form: str, rows: int, outputs: int, width: int) -> float:
    """The longest of: the matrix is read; warps issue; the chunks of a warp follow each other; L2 delivers codes and rows, of which
    blocks of threads that are abreast share the rows. And launches."""
    how, tiles, blocks = FORMS[form], -(-outputs // 16), -(-width // 32)
    tiling = next(tiling for most, least, tiling in how.tilings if rows <= most and tiles >= least)
    groups = -(-rows // 8)
    row_tiles = -(-groups // tiling.groups)
    on_sm = -(-(-(-tiles // (tiling.tiles * WARPS // tiling.along)) * row_tiles) // device.sms)
    abreast, chunks = min(on_sm, ABREAST), -(-blocks // (tiling.along * tiling.blocks))
    slots = tiling.slots - tiling.skipped * max(tiling.groups - groups, 0)
    # Memory is read ahead by registers while others have their turns, or fetched to L2.
    turns = how.turn and tiling.along > 1
    waits = max(WARPS * how.turn, device.latency * device.clock) if turns else how.near
    chunk = slots * max(device.alone, abreast * WARPS / 4) + waits
    chain = on_sm / abreast * chunks * chunk + device.latency * device.clock
    read = packed_bytes("half 4", outputs, width)
    shared = on_sm / abreast * min(groups, tiling.groups) * 8 * width * how.row_bytes
    delivered = (read * row_tiles / device.sms + shared) / device.l2
    return max(max(chain, delivered) / device.clock, read / device.memory) + how.launches * device.launch
