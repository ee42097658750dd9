"""Drafts with branches: the tree that a drafter grows, and the path through it that the target would have taken.

Source: "EAGLE-2" (arXiv 2406.16858). The confidence of a node is the product of the probabilities along its path. At
each depth the most confident nodes are extended, and in the end the most confident of all nodes are verified. A node is
never more confident than the one before it, so these form a tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pdkernels.masks import TilePlan, TreePlans
from pdkernels.masks.tree_plans import ancestors


class Tree(NamedTuple):
    """A draft. Node 0 is the known token, and a node comes after its parent."""

    tokens: torch.Tensor
    """``(batch, nodes)`` ids."""
    parents: torch.Tensor
    """``(batch, nodes)``, -1 for node 0."""
    depths: torch.Tensor
    """``(batch, nodes)``."""

    def plan(self, plans: TreePlans, depth: int) -> TilePlan:
        """Of the rows that verify it; no node is deeper than `depth`."""
        return plans.of(ancestors(self.parents, depth))

    def path(self, predictions: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The nodes ``(batch, width)`` from node 0 on, each the child that equals the prediction after the one before,
        and how many there are ``(batch,)``; then the last one again.

        >>> tree = Tree(torch.tensor([[7, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([[0, 1, 1, 2]]))
        >>> tree.path(torch.tensor([[2, 9, 4, 9]]), width=3)
        (tensor([[0, 2, 2]]), tensor([2]))
        """
        node = torch.zeros_like(predictions[:, :1])
        path, count = [node], torch.ones_like(node[:, 0])
        live = torch.ones_like(node, dtype=torch.bool)
        for _ in range(width - 1):
            right = (self.parents == node) & (self.tokens == predictions.gather(1, node))
            has_child, child = right.int().max(1, keepdim=True)
            live = live & (has_child > 0)
            node = torch.where(live, child, node)
            path.append(node)
            count = count + live[:, 0]
        return torch.cat(path, 1), count


class Growth:
    """The nodes that a drafter considers, depth by depth.

    Args:
        known: ``(batch, 1)``, the token that is known.
        branches: the nodes of each depth that are extended.
        deepest: ``(batch, 1)``, the depth past which no node is accepted, so that none is wanted.

    >>> growth = Growth(torch.tensor([[7]]), branches=2, deepest=torch.tensor([[2]]))
    >>> growth.add(torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, 0.4]]]).log())
    tensor([[0, 0]])
    >>> growth.frontier.tolist()
    [[1, 2]]
    >>> growth.add(torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[0.6, 0.1], [0.9, 0.1]]]).log())
    tensor([[1, 0]])
    >>> growth.frontier.tolist()  # 0.4 times 0.9, and 0.5 times 0.6
    [[5, 3]]
    >>> growth.best(4)
    Tree(tokens=tensor([[7, 1, 2, 5]]), parents=tensor([[-1,  0,  0,  2]]), depths=tensor([[0, 1, 1, 2]]))
    """

    def __init__(self, roots: torch.Tensor, branches: int, deepest: torch.Tensor) -> None:
        self._branches, self._deepest = branches, deepest
        self._tokens, self._parents, self._depths = roots, torch.full_like(roots, -1), torch.zeros_like(roots)
        self._scores = torch.zeros_like(roots, dtype=torch.float32)
        self._extended = torch.zeros_like(roots)

    @property
    def frontier(self) -> torch.Tensor:
        """``(batch, n)`` tokens of the nodes that are extended next."""
        return self._tokens.gather(1, self._extended)

    def add(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Adds the children ``(batch, n, branches)`` of the frontier, with the logarithms of their probabilities.

        Returns the place in the old frontier ``(batch, branches)`` of the node before each node of the new one; of the
        first depth 0.
        """
        branches, first = self._branches, self._tokens.shape[1]
        total = (scores + self._scores.gather(1, self._extended)[..., None]).flatten(1)
        parents = self._extended[..., None].expand_as(tokens).flatten(1)
        depth = self._depths[:, -1:] + 1
        total = total.masked_fill(depth > self._deepest, -torch.inf)
        self._tokens = torch.cat([self._tokens, tokens.flatten(1)], 1)
        self._parents = torch.cat([self._parents, parents], 1)
        self._depths = torch.cat([self._depths, depth.expand_as(parents)], 1)
        self._scores = torch.cat([self._scores, total], 1)
        chosen = total.sort(dim=1, descending=True, stable=True).indices[:, :branches]
        self._extended = first + chosen
        return chosen // tokens.shape[2]

    def best(self, nodes: int) -> Tree:
        """The most confident ones; of equals the first, so that no node is without its parent."""
        chosen = self._scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values
        place = torch.zeros_like(self._tokens)
        place.scatter_(1, chosen, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen))
        parents = self._parents.gather(1, chosen)
        parents = torch.where(parents < 0, parents, place.gather(1, parents.clamp(min=0)))
        return Tree(self._tokens.gather(1, chosen), parents, self._depths.gather(1, chosen))
