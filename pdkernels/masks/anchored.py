"""Training layout of drafters: blocks attached to anchors in packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from pdkernels import _host
from pdkernels._validation import INDEX_DTYPES, check, check_type
from pdkernels.masks.segment_mask import MAX_TOKENS, SegmentMask, arange, check_tokens, choice, flag, integer


class AnchoredMask(SegmentMask):
    """An `anchored` mask, and the tokens that its rows represent. All tensors are int64 in host memory.

    Attributes:
        base_len: the number of base tokens, which come first.
        anchors: ``(n,)`` the base token of each block.
        sizes: ``(n,)`` the number of rows of each block.
    """

    base_len: int
    anchors: Tensor
    sizes: Tensor

    @property
    def queries(self) -> SegmentMask:
        """The mask of the block rows over all columns, for a drafter whose base rows are features of another model."""
        return self[self.base_len :]

    @cached_property
    def anchor_rows(self) -> Tensor:
        """``(block rows,)`` the anchor of each row's block."""
        return torch.repeat_interleave(self.anchors, self.sizes)

    @cached_property
    def offsets(self) -> Tensor:
        """``(block rows,)`` the offset of each row in its block. Row r represents base token
        ``anchor_rows[r] + offsets[r]``. A block may extend past the end of its document: leave those rows out of the
        loss."""
        begins = self.sizes.cumsum(0) - self.sizes
        return arange(self.kv_len - self.base_len) - torch.repeat_interleave(begins, self.sizes)


def anchored(
    documents: Sequence[int] | Tensor,
    anchors: Sequence[int] | Tensor,
    block: int | Sequence[int] | Tensor,
    inside: Literal["full", "causal"] = "full",
    window: int | None = None,
    inclusive: bool = False,
    base: Literal["none", "causal"] = "none",
) -> AnchoredMask:
    """Packed documents, then a block of rows per anchor, which attends to itself and to its document up to the anchor::

        anchored([4, 2], anchors=[2, 5], block=2)          base="causal", inclusive=True
              b b b b b b   0 0 1 1                        differs in
        b     . . . . . .   . . . .                            1 . . . . .
        b     . . . . . .   . . . .                            1 1 . . . .
        b     . . . . . .   . . . .                            1 1 1 . . .
        b     . . . . . .   . . . .                            1 1 1 1 . .
        b     . . . . . .   . . . .                            . . . . 1 .
        b     . . . . . .   . . . .                            . . . . 1 1
        0     1 1 . . . .   1 1 . .                            1 1 1 . . .
        0     1 1 . . . .   1 1 . .                            1 1 1 . . .
        1     . . . . 1 .   . . 1 1                            . . . . 1 1
        1     . . . . 1 .   . . 1 1                            . . . . 1 1

    Every step has new anchors, so compiled code builds the mask from tensors in one pass, and its plan is not cached.

    Args:
        documents: ``(tokens,)`` int32 or int64 tensor with the document of each base token, -1 for padding; or a list
            of lengths. Documents are contiguous.
        anchors: ``(n,)`` base tokens in any order; they may repeat. A block at padding attends only to itself.
        block: the number of rows of every block, or ``(n,)`` for each block; 0 or more.
        inside: attention inside a block: bidirectional (``"full"``) or ``"causal"``.
        window: the number of base tokens before its anchor that a block attends to; None: all of its document.
        inclusive: whether a block attends to its anchor.
        base: ``"none"``: base rows attend to nothing (they are features of another model, and `AnchoredMask.queries` is
            run). ``"causal"``: they attend to their document causally.

    Returns:
        A square mask of ``tokens + sum(block)`` rows. Positions of base tokens are relative to their document, those of
        padding are 0, those of a block continue from its anchor.

    Raises:
        ValueError: anchors outside the base, a document in two pieces, sizes out of range, an unknown name.
        TypeError: something that is not an integer.

    A tensor on a GPU is copied to the host, which synchronizes.

    Source: DFlash as trained by speculators (``anchored(ids, anchors, 16)``, with a window in sliding layers); P-EAGLE
    (rollouts of an anchor as one block of their depths: ``inside="causal", inclusive=True, base="causal"``);
    DiffusionGemma as trained by NeMo Automodel (one document, an anchor at the start of each block of the response, the
    last block shorter; sliding layers have a window of one less than the model's).

    Example:
        >>> import pdkernels as pd
        >>> mask = pd.masks.anchored([4, 2], anchors=[2, 5], block=2)
        >>> mask.queries.dense().int().tolist()
        [[1, 1, 0, 0, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1,
        0, 0, 0, 1, 1]]
        >>> mask.positions.tolist(), (mask.anchor_rows + mask.offsets).tolist()
        ([0, 1, 2, 3, 0, 1, 2, 3, 1, 2], [2, 3, 5, 6])
    """
    op = "anchored"
    ids = _integers("documents", documents)
    if not isinstance(documents, Tensor):
        lengths = [integer(op, "documents", length, 0) for length in documents]
        check_tokens(op, "documents", sum(lengths), len(lengths))
        ids = torch.repeat_interleave(arange(len(lengths)), ids)
    anchor_tokens = _integers("anchors", anchors)
    if isinstance(block, (Sequence, Tensor)):
        sizes = _integers("block", block)
        check(
            sizes.shape == anchor_tokens.shape,
            f"masks.{op}",
            "block",
            f"have an entry for each of {len(anchor_tokens)} anchors",
            len(sizes),
        )
    else:
        sizes = anchor_tokens.new_full(anchor_tokens.shape, integer(op, "block", block, 0))
    choice(op, "inside", inside, ("full", "causal"))
    choice(op, "base", base, ("none", "causal"))
    reach = MAX_TOKENS if window is None else integer(op, "window", window, 0)
    rows = int(sizes.clamp(0, MAX_TOKENS).sum())
    check_tokens(op, "block", len(ids) + rows, len(anchor_tokens))
    positions = torch.empty(len(ids) + rows, dtype=torch.int64, device="cpu")
    table = _host.SegmentMask.anchored(
        _array(ids), _array(anchor_tokens), _array(sizes), inside, reach, flag(op, "inclusive", inclusive),
        base == "causal", _array(positions),
    )  # fmt: skip
    labels = [("context", 0, table.segments - len(anchor_tokens)), ("block", 0, len(anchor_tokens))]
    mask = AnchoredMask._of_table(table, [label for label in labels if label[2]], positions)
    mask.base_len, mask.anchors, mask.sizes = len(ids), anchor_tokens, sizes
    return mask


def _array(numbers: Tensor) -> tuple[int, int]:
    """Address and count."""
    return numbers.data_ptr(), len(numbers)


def _integers(argument: str, values: Sequence[int] | Tensor) -> Tensor:
    """A copy as a contiguous int64 vector in host memory, which the mask keeps."""
    op = "masks.anchored"
    numbers = torch.as_tensor(values, device=None if isinstance(values, Tensor) else "cpu")
    integers = numbers.numel() == 0 or numbers.dtype in INDEX_DTYPES
    check_type(integers, op, argument, "be int32 or int64", numbers.dtype)
    check(numbers.dim() == 1, op, argument, "have one dimension", tuple(numbers.shape))
    return numbers.detach().to("cpu", torch.int64).clone(memory_format=torch.contiguous_format)
