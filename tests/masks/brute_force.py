"""The planner as the obvious program over the dense mask."""

from __future__ import annotations

from torch import Tensor

from pdkernels.masks import TilePlan

Bits = tuple[tuple[int, ...], ...]


def brute_force(dense: Tensor, block_q: int, block_k: int) -> dict[str, object]:
    """All that a `TilePlan` holds, as lists of ints."""
    (q_len, kv_len), words = dense.shape, -(-block_k // 32)
    q_tiles, kv_tiles = -(-q_len // block_q), -(-kv_len // block_k)
    bitmaps: list[Bits] = []
    grid: list[list[int | None]] = [[None] * kv_tiles for _ in range(q_tiles)]
    for i in range(q_tiles):
        for j in range(kv_tiles):
            tile = dense[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
            if tile.all():
                grid[i][j] = -1
            elif tile.any():
                lines = [[0] * words for _ in range(block_q)]
                for r, c in tile.nonzero().tolist():
                    lines[r][c // 32] |= 1 << c % 32
                bits = tuple(tuple(word - 2**32 if word >= 2**31 else word for word in line) for line in lines)
                if bits not in bitmaps:
                    bitmaps.append(bits)
                grid[i][j] = bitmaps.index(bits)

    def lists(lines: list[list[int | None]]) -> tuple[list[int], list[int], list[int], list[int]]:
        offsets, tiles, numbers = [0], [], []
        for line in lines:
            for partial in (False, True):
                visited = [j for j, number in enumerate(line) if number is not None and (number >= 0) == partial]
                tiles += visited
                numbers += [line[j] for j in visited]
            offsets.append(len(tiles))
        order = sorted(range(len(lines)), key=lambda i: offsets[i] - offsets[i + 1])
        return offsets, tiles, numbers, order

    kv_offsets, kv_list, kv_bitmaps, q_order = lists(grid)
    q_offsets, q_list, q_bitmaps, k_order = lists([[grid[i][j] for i in range(q_tiles)] for j in range(kv_tiles)])
    return {
        "kv_offsets": kv_offsets,
        "kv_tiles": kv_list,
        "kv_bitmaps": kv_bitmaps,
        "q_offsets": q_offsets,
        "q_tiles": q_list,
        "q_bitmaps": q_bitmaps,
        "q_order": q_order,
        "k_order": k_order,
        "bitmaps": [[list(line) for line in bits] for bits in bitmaps],
        "q_len": q_len,
        "kv_len": kv_len,
        "block_q": block_q,
        "block_k": block_k,
        "visible_pairs": int(dense.sum()),
    }


def listed(plan: TilePlan) -> dict[str, object]:
    """A plan in the same form."""
    return {name: value.tolist() for name, value in plan._tensors().items()} | plan._facts()
