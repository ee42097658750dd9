"""Layouts of drafts with branches: quadratic self-speculation and token trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from pdkernels._validation import check_type, fail
from pdkernels.masks.segment_mask import Segment, SegmentMask, arange, check_tokens, choice, flag, integer, inverse

InGroup = Literal["bidirectional", "causal"]


class QuadraticMask(SegmentMask):
    """A `quadratic` mask, and the rows of its draft and mask tokens, as int64 tensors in the mask's row order.

    Attributes:
        block_size, masks_per_group, in_group, layout, anchor_group: as given to the builder.
    """

    block_size: int
    masks_per_group: int
    in_group: InGroup
    layout: Literal["spec_first", "interleaved"]
    anchor_group: bool

    @property
    def groups(self) -> range:
        """The number of draft tokens that have a group of masks."""
        return range(0 if self.anchor_group else 1, self.block_size)

    @cached_property
    def draft_rows(self) -> Tensor:
        """``(block_size,)`` the rows of the draft tokens."""
        draft = arange(self.block_size)
        if self.layout == "spec_first":
            return draft
        return draft + self.masks_per_group * (draft - self.groups.start).clamp(min=0)

    @cached_property
    def mask_rows(self) -> Tensor:
        """``(groups, masks_per_group)`` rows of the mask tokens; entry g continues draft token g."""
        masks = arange(self.masks_per_group)
        if self.layout == "spec_first":
            return self.block_size + arange(len(self.groups))[:, None] * self.masks_per_group + masks
        return self.draft_rows[self.groups.start :, None] + 1 + masks

    @cached_property
    def to_interleaved(self) -> Tensor:
        """``(tokens,)``: ``x[to_interleaved]`` puts tokens in this mask's order into the paper's: each draft token, its
        group."""
        groups = torch.cat([self.draft_rows[self.groups.start :, None], self.mask_rows], dim=1)
        return torch.cat([self.draft_rows[: self.groups.start], groups.flatten()])

    @cached_property
    def from_interleaved(self) -> Tensor:
        """``(tokens,)``: ``x[from_interleaved]`` puts tokens in the interleaved order into this mask's order."""
        return inverse(self.to_interleaved)


def quadratic(
    block_size: int,
    masks_per_group: int | None = None,
    in_group: InGroup = "bidirectional",
    layout: Literal["spec_first", "interleaved"] = "spec_first",
    anchor_group: bool = True,
) -> QuadraticMask:
    """A draft, and for each of its tokens a group of masks, which drafts the continuation if the draft is accepted up
    to there::

        quadratic(2)                          interleaved: d m m | d m m
          d d   m m   m m                       1 . . . . .
        d 1 .   . .   . .                       1 1 1 . . .
        d 1 1   . .   . .                       1 1 1 . . .
        m 1 .   1 1   . .                       1 . . 1 . .
        m 1 .   1 1   . .                       1 . . 1 1 1
        m 1 1   . .   1 1                       1 . . 1 1 1
        m 1 1   . .   1 1

    Draft tokens are causal and never attend to a mask, so they verify exactly as a causal model would. Group g sees
    draft tokens 0 .. g and itself. The cached prefix, visible to all, is not part of the mask, so one mask serves all
    steps.

    Args:
        block_size: draft tokens, including the first one (the anchor, which is already verified).
        masks_per_group: None: as many as draft tokens.
        in_group: whether masks of a group attend to each other ``"bidirectional"`` (Nemotron-Labs-Diffusion, TiDAR) or
            ``"causal"`` (Samragh et al., Apple).
        layout: ``"spec_first"``: all draft tokens, then the groups, which fills tiles and accepts drafts without moving
            cache slots; ``"interleaved"``: each draft token before its group.
        anchor_group: whether the anchor has a group. The released code has one. Equation 11 of the paper has none; then
            nothing is drafted if all tokens but the anchor are rejected.

    Returns:
        A square mask; positions ``g + r`` are relative to the cached length: draft token g at g, mask r = 1, 2, .. of
        its group at ``g + r``.

    Raises:
        ValueError: sizes out of range or an unknown name.

    Source: Nemotron-Labs-Diffusion, appendix C, and its released code.

    Example:
        >>> import pdkernels as pd
        >>> mask = pd.masks.quadratic(2)
        >>> mask.positions.tolist(), mask.mask_rows.tolist()
        ([0, 1, 1, 2, 2, 3], [[2, 3], [4, 5]])
        >>> pd.masks.quadratic(32).plan(64, 64).visited_tiles
        33
    """
    op = "quadratic"
    block_size = integer(op, "block_size", block_size, 1)
    masks_per_group = block_size if masks_per_group is None else integer(op, "masks_per_group", masks_per_group, 0)
    choice(op, "in_group", in_group, ("bidirectional", "causal"))
    choice(op, "layout", layout, ("spec_first", "interleaved"))
    anchor_group = flag(op, "anchor_group", anchor_group)
    tokens = block_size + (block_size if anchor_group else block_size - 1) * masks_per_group
    check_tokens(op, "block_size", tokens, 2 * block_size)
    group_pattern: Literal["causal", "full"] = "causal" if in_group == "causal" else "full"
    first = 0 if anchor_group else 1
    # Segment numbers of draft tokens: 0 .. first - 1, then first, first + step, ..
    step = 2 if layout == "interleaved" else 1

    def seen(end: int) -> tuple[range, range]:
        last = end if end < first else first + step * (end - first)
        return range(min(first, end)), range(first, last, step)

    draft = [Segment(1, "causal", seen(g), "draft") for g in range(block_size)]
    groups = [Segment(masks_per_group, group_pattern, seen(g + 1), "masks") for g in range(first, block_size)]
    if layout == "interleaved":
        segments = draft[:first] + [segment for pair in zip(draft[first:], groups) for segment in pair]
    else:
        segments = draft + groups

    ranks = arange(1 + masks_per_group)
    positions = arange(first, block_size)[:, None] + ranks
    if layout == "interleaved":
        positions = torch.cat([arange(first), positions.flatten()])
    else:
        positions = torch.cat([arange(block_size), positions[:, 1:].flatten()])
    mask = QuadraticMask(segments, positions)
    mask.block_size, mask.masks_per_group, mask.in_group = block_size, masks_per_group, in_group
    mask.layout, mask.anchor_group = layout, anchor_group
    return mask


def tree(parents: Sequence[int] | Tensor) -> SegmentMask:
    """A tree of draft tokens: each attends to itself and its ancestors. The cached prefix is not part of the mask::

        tree([-1, 0, 1, 0])      0 - 1 - 2
            1 . . .               \\
            1 1 . .                 3
            1 1 1 .
            1 . . 1

    Args:
        parents: the parent of each token, -1 for those that continue the prefix. Parents come before their children.

    Returns:
        A square mask; the position of a token is its depth, relative to the cached length.

    Raises:
        ValueError: a parent that does not come before its child.

    Tokens in a chain without branches become one segment.

    Example:
        >>> import pdkernels as pd
        >>> mask = pd.masks.tree([-1, 0, 1, 0])
        >>> mask.positions.tolist(), [segment.length for segment in mask.segments]
        ([0, 1, 2, 1], [1, 2, 1])
    """
    entries = parents.tolist() if isinstance(parents, Tensor) else parents
    expectation = "be a sequence of integers"
    check_type(isinstance(entries, Iterable), "masks.tree", "parents", expectation, type(parents).__name__)
    parents = [integer("tree", "parents", parent, -1) for parent in entries]
    children = [0] * len(parents)
    depth: list[int] = []
    for node, parent in enumerate(parents):
        if parent >= node:
            fail(
                "masks.tree",
                "parents",
                f"be -1 or come before their child, so be in [-1, {node - 1}] for token {node}",
                parent,
            )
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
        if parent >= 0:
            children[parent] += 1

    segment_of: list[int] = []
    lengths: list[int] = []
    sees: list[tuple[range, ...]] = []
    for node, parent in enumerate(parents):
        if node > 0 and parent == node - 1 and children[parent] == 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
            above = segment_of[parent] if parent >= 0 else -1
            sees.append(_and_segment(sees[above], above) if parent >= 0 else ())
        segment_of.append(len(lengths) - 1)
    segments = [Segment(length, "causal", seen, "branch") for length, seen in zip(lengths, sees)]
    return SegmentMask(segments, torch.tensor(depth, dtype=torch.int64, device="cpu"))


def _and_segment(sees: tuple[range, ...], segment: int) -> tuple[range, ...]:
    """The ranges plus one more segment."""
    if sees and sees[-1].stop == segment:
        return (*sees[:-1], range(sees[-1].start, segment + 1))
    return (*sees, range(segment, segment + 1))
