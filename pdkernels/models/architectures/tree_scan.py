"""Scans of recurrent layers with gradients, for training: rows form a tree, and many of its branches are computed at
once.

A row follows its parent. Chains of rows are cut into pieces: where they branch, and where they get long. Inside a piece
all rows are computed by matrix products (the chunked form of the gated delta rule); then pieces take the state that
their parents end with, one depth of the tree after the other.

Source: "Gated Delta Networks" (arXiv 2412.06464); `torch_chunk_gated_delta_rule` of transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST = 64
"""Rows of a piece."""


class Pieces(NamedTuple):
    """The pieces of a sequence of rows."""

    rows: Tensor
    """(pieces, width) the rows of each piece, and the number of rows where it is shorter. Pieces are in the order of
    their depths."""
    levels: list[Tensor]
    """For the pieces of each depth, the pieces that they follow, counted from the first of the depth before; -1 at
    depth 0."""
    ancestors: Tensor
    """(rows, reach) the rows before each row, nearest first, and the number of rows where there is none."""


def pieces_of(parents: Sequence[int], reach: int = 0) -> Pieces:
    """The pieces of rows with these parents, -1: none, in any order; and `reach` ancestors of every row.

    >>> found = pieces_of([-1, 0, 1, 0], reach=2)
    >>> found.rows.tolist(), [level.tolist() for level in found.levels], found.ancestors.tolist()
    ([[0, 4], [1, 2], [3, 4]], [[-1], [0, 0]], [[4, 4], [0, 4], [1, 0], [0, 4]])
    """
    count = len(parents)
    children = Counter(parents)
    piece_of, members, followed, depths = [-1] * count, [], [], []  # type: ignore[var-annotated]
    for row in _parents_first(parents):
        parent = parents[row]
        before = -1 if parent < 0 else piece_of[parent]
        if before < 0 or children[parent] > 1 or len(members[before]) == LONGEST:
            members.append([])
            followed.append(before)
            depths.append(0 if before < 0 else depths[before] + 1)
            before = len(members) - 1
        piece_of[row] = before
        members[before].append(row)
    width = max([0, *map(len, members)])
    by_depth: list[list[int]] = [[] for _ in range(max([-1, *depths]) + 1)]
    place = []
    for piece, depth in enumerate(depths):
        place.append(len(by_depth[depth]))
        by_depth[depth].append(piece)
    ordered = [members[piece] for here in by_depth for piece in here]
    rows = torch.tensor([piece + [count] * (width - len(piece)) for piece in ordered], dtype=torch.int64, device="cpu")
    levels = [
        torch.tensor([place[followed[piece]] if depth else -1 for piece in here], device="cpu")
        for depth, here in enumerate(by_depth)
    ]
    at = torch.tensor([*parents, -1], dtype=torch.int64, device="cpu")
    at = torch.where(at < 0, count, at)
    ancestors, now = torch.empty(count, reach, dtype=torch.int64, device="cpu"), torch.arange(count, device="cpu")
    for back in range(reach):
        ancestors[:, back] = now = at[now]
    return Pieces(rows, levels, ancestors)


def _parents_first(parents: Sequence[int]) -> list[int]:
    """All rows, each after its parent."""
    order: list[int] = []
    there = [False] * len(parents)
    for row in range(len(parents)):
        path = []
        while row >= 0 and not there[row]:
            there[row] = True
            path.append(row)
            row = parents[row]
        order += reversed(path)
    return order


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces) -> Tensor:
    """A causal convolution of x ``(rows, channels)`` with weight ``(channels, width)`` along the branches."""
    padded = F.pad(x, (0, 0, 0, 1))
    out = x * weight[:, -1]
    for back in range(1, weight.shape[1]):
        out = out + padded.index_select(0, pieces.ancestors[:, back - 1]) * weight[:, -1 - back]
    return out if bias is None else out + bias


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pieces: Pieces, l2norm_eps: float | None = None
) -> Tensor:
    """The gated delta rule of q, k ``(rows, heads, key_dim)``, v ``(rows, heads, value_dim)``, and g and beta ``(rows,
    heads)``."""
    if l2norm_eps is not None:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + l2norm_eps) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, 1))[pieces.rows].transpose(1, 2) for x in (q, k, v))
    g, beta = (F.pad(x, (0, 0, 0, 1))[pieces.rows].transpose(1, 2) for x in (g, beta))
    sums = g.cumsum(-1)
    width = sums.shape[-1]
    later = torch.ones(width, width, dtype=torch.bool, device=v.device).triu(1)
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighted = k * beta[..., None]
    system = (weighted @ k.mT) * decay
    right_side = torch.cat([v * beta[..., None], weighted * sums.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    values, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    local = (q @ k.mT) * decay
    q = q * sums.exp()[..., None]
    k = k * (sums[..., -1:] - sums).exp()[..., None]
    decayed = sums[..., -1].exp()[..., None, None]
    # Not indexed one depth at a time: the gradient of that would be filled up to all pieces.
    levels = zip(*(x.split([len(before) for before in pieces.levels]) for x in (values, read, q, k, local, decayed)))
    outputs, state = [], v.new_zeros(len(pieces.levels[0]), v.shape[1], k.shape[-1], v.shape[-1])
    for depth, (before, level) in enumerate(zip(pieces.levels, levels)):
        values, read, q, k, local, decayed = level
        state = state.index_select(0, before) if depth else state
        new = values - read @ state
        outputs.append(q @ state + local @ new)
        state = state * decayed + k.mT @ new
    outputs_by_row = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    rows, count = pieces.rows.flatten(), len(pieces.ancestors)
    # Every row is in one piece; the last place is that of padding. No number is read, as a traced graph could not.
    at = torch.empty(count + 1, dtype=torch.int64, device=rows.device)
    at[rows] = torch.arange(len(rows), device=rows.device)
    return outputs_by_row[at[:count]]
