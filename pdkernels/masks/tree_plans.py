"""Plans of trees that only the device knows: a drafter grows them, and no host reads them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pdkernels._validation import check
from pdkernels.masks.basic import causal
from pdkernels.masks.segment_mask import integer
from pdkernels.masks.tile_plan import TilePlan, packed_words

_OP = "masks.TreePlans"
_MOST = 1024  # tokens of a tile


def ancestors(parents: Tensor, depth: int) -> Tensor:
    """``(batch, n, n)`` bool: True where a node is another's ancestor, or itself.

    Args:
        parents: ``(batch, n)`` int64, the node before each, -1 for those without one.
        depth: at least as many nodes as the longest path has edges.

    >>> ancestors(torch.tensor([[-1, 0, 1, 0]]), 2).int().tolist()
    [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]]
    """
    nodes = parents.shape[1]
    identity = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(len(parents), nodes, nodes)
    above, there = parents.clamp(min=0)[..., None].expand(-1, -1, nodes), (parents >= 0)[..., None]
    seen = identity
    for _ in range(depth):
        seen = identity | (seen.gather(1, above) & there)
    return seen


class TreePlans:
    """Makes a stacked plan of a mask that a device has computed: a single tile, whose bitmaps differ each step.

    Nothing waits for the device, and nothing is planned on the host.

    Args:
        batch: samples.
        tokens: rows and columns of the masks, 2 .. 1024.
        device: of the plans.

    Raises:
        ValueError: sizes out of range.
        TypeError: sizes that are not ints.

    Example:
        >>> import torch, pdkernels as pd
        >>> parents = [-1, 0, 1, 0]
        >>> seen = ancestors(torch.tensor([parents]), 2)
        >>> plan = TreePlans(batch=1, tokens=4, device="cpu").of(seen)
        >>> torch.equal(plan.dense()[0], pd.masks.tree(parents).dense())
        True
    """

    def __init__(self, batch: int, tokens: int, device: torch.device | str) -> None:
        batch, tokens = integer("TreePlans", "batch", batch, 1), integer("TreePlans", "tokens", tokens, 2)
        check(tokens <= _MOST, _OP, "tokens", f"be at most {_MOST}", tokens)
        self._block = -(-tokens // 16) * 16
        # A triangle is a tile with a bitmap, as any mask may be; as plans of their own, samples do not share it.
        triangle = causal(tokens).plan(self._block, self._block)
        self._like = TilePlan.stack([replace(triangle) for _ in range(batch)]).to(device)

    def of(self, seen: Tensor) -> TilePlan:
        """The plan of ``(batch, tokens, tokens)`` bool: True where the row sees the column."""
        padding = self._block - seen.shape[1]
        return replace(self._like, bitmaps=packed_words(torch.nn.functional.pad(seen, (0, padding, 0, padding))))
