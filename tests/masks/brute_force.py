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

    rows: list[list[int]] = []
    pairs: list[list[int]] = []

    def visits(lines: list[list[int | None]], length: int, block: int) -> tuple[list[int], list[int], list[int]]:
        """The tiles of each line, full ones first; records the same as ranges and lists."""
        offsets, tiles, numbers, described = [0], [], [], []
        for line in lines:
            begin, others = len(pairs), []
            for partial in (False, True):
                for j, number in enumerate(line):
                    if number is None or (number >= 0) != partial:
                        continue
                    tiles.append(j)
                    numbers.append(number)
                    if partial or (j + 1) * block > length:
                        others.append([j, number])
                    elif len(pairs) > begin and pairs[-1][1] == j:
                        pairs[-1][1] = j + 1
                    else:
                        pairs.append([j, j + 1])
            described.append([begin, len(pairs), len(pairs) + len(others)])
            pairs.extend(others)
            offsets.append(len(tiles))
        order = sorted(range(len(lines)), key=lambda i: offsets[i] - offsets[i + 1])
        rows.extend([*row, tile] for row, tile in zip(described, order))
        return offsets, tiles, numbers

    of_q = visits(grid, kv_len, block_k)
    of_k = visits([[grid[i][j] for i in range(q_tiles)] for j in range(kv_tiles)], q_len, block_q)
    return {
        "visits": [list(part) for part in of_q],
        "transposed": [list(part) for part in of_k],
        "rows": rows,
        "lists": pairs,
        "bitmaps": [[list(line) for line in bits] for bits in bitmaps],
        "q_len": q_len,
        "kv_len": kv_len,
        "block_q": block_q,
        "block_k": block_k,
        "visible_pairs": int(dense.sum()),
        "visited_tiles": len(of_q[1]),
    }


def listed(plan: TilePlan) -> dict[str, object]:
    """A plan in the same form."""
    tensors = {"rows": plan.rows.tolist(), "lists": plan.lists.tolist(), "bitmaps": plan.bitmaps.tolist()}
    visits = {name: [part.tolist() for part in plan.visits(name == "transposed")] for name in ("visits", "transposed")}
    return {**visits, **tensors, **plan._facts()}
