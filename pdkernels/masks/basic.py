"""General masks: causal, full, block-causal, and packed samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdkernels._validation import check, check_type
from pdkernels.masks.segment_mask import Segment, SegmentMask, arange, blocks, check_tokens, integer


def causal(q_len: int, kv_len: int | None = None) -> SegmentMask:
    """Each token attends to itself and to the tokens before it.

    Args:
        q_len: rows, 0 or more.
        kv_len: columns; None: `q_len`. The last row attends to all columns, as when new tokens follow cached ones; with
            fewer columns than rows the first rows are fully masked.

    Returns:
        A mask of shape ``(q_len, kv_len)``; positions are those of the columns: the last row is at ``kv_len - 1``.

    Example:
        >>> import pdkernels as pd
        >>> pd.masks.causal(2, 4).dense().int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
        >>> pd.masks.causal(2, 4).positions.tolist()
        [2, 3]
    """
    q_len = integer("causal", "q_len", q_len, 0)
    kv_len = q_len if kv_len is None else integer("causal", "kv_len", kv_len, 0)
    tokens = max(q_len, kv_len)
    mask = SegmentMask([Segment(tokens, "causal")], arange(kv_len - tokens, kv_len))
    return mask if q_len == kv_len else mask[tokens - q_len :, tokens - kv_len :]


def full(q_len: int, kv_len: int | None = None) -> SegmentMask:
    """Each token attends to all tokens.

    Args:
        q_len: rows, 0 or more.
        kv_len: columns; None: `q_len`.

    Returns:
        A mask of shape ``(q_len, kv_len)``; positions as in `causal`.

    Example:
        >>> import pdkernels as pd
        >>> pd.masks.full(2, 3).dense().int().tolist()
        [[1, 1, 1], [1, 1, 1]]
    """
    q_len = integer("full", "q_len", q_len, 0)
    kv_len = q_len if kv_len is None else integer("full", "kv_len", kv_len, 0)
    tokens = max(q_len, kv_len)
    mask = SegmentMask([Segment(tokens, "full")], arange(kv_len - tokens, kv_len))
    return mask if q_len == kv_len else mask[tokens - q_len :, tokens - kv_len :]


def block_causal(length: int, block_size: int, prefix_len: int = 0) -> SegmentMask:
    """Causal from block to block, bidirectional inside a block. The last block may be shorter::

        block_causal(5, 2, prefix_len=1)
            1 . . . .     prefix, causal
            1 1 1 . .
            1 1 1 . .
            1 1 1 1 1
            1 1 1 1 1

    Args:
        length: all tokens, including the prefix.
        block_size: tokens of a block.
        prefix_len: tokens before the first block, causal among themselves.

    Source: Fast-dLLM v2 (prompt prefill over blocks). With one block it is the first pass of quadratic
    self-speculation: the prompt causal, then masks that attend to the prompt and to each other. With ``block_size=1``
    it is `causal`.

    Example:
        >>> import pdkernels as pd
        >>> pd.masks.block_causal(4, 2).dense().int().tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    op = "block_causal"
    length = integer(op, "length", length, 0)
    block_size = integer(op, "block_size", block_size, 1)
    prefix_len = integer(op, "prefix_len", prefix_len, 0)
    check(prefix_len <= length, f"masks.{op}", "prefix_len", f"be at most length ({length})", prefix_len)
    check_tokens(op, "length", length, (length - prefix_len) // block_size)
    segments = [Segment(prefix_len, "causal", (), "prompt")]
    for number, size in enumerate(blocks(length - prefix_len, block_size), start=1):
        segments.append(Segment(size, "full", (range(number),), "block"))
    return SegmentMask(segments)


def pack(masks: Sequence[SegmentMask], length: int | None = None) -> SegmentMask:
    """Samples side by side in one sequence, masked from each other. Each keeps its own positions::

        pack([causal(2), full(2)], length=5)
            1 . . . .
            1 1 . . .
            . . 1 1 .
            . . 1 1 .
            . . . . .     padding: fully masked rows and columns

    Args:
        masks: whole masks, no slices.
        length: total tokens, including padding; None: those of the masks.

    Raises:
        ValueError: slices, or masks longer than `length` in total.
        TypeError: something that is not a mask.

    Attention returns zeros and a log-sum-exp of -inf for padding rows. Their positions are 0.

    Example:
        >>> import pdkernels as pd
        >>> mask = pd.masks.pack([pd.masks.causal(2), pd.masks.causal(3)], length=6)
        >>> mask.positions.tolist()
        [0, 1, 0, 1, 2, 0]
    """
    op = "masks.pack"
    segments: list[Segment] = []
    samples = 0
    check_type(
        not isinstance(masks, SegmentMask), op, "masks", "be a list of masks", "one mask", "Write pack([mask], length)."
    )
    masks = list(masks)
    for mask in masks:
        check_type(isinstance(mask, SegmentMask), op, "masks", "be segment masks", type(mask).__name__)
        tokens = sum(segment.length for segment in mask.segments)
        check(
            mask.shape == (tokens, tokens),
            op,
            "masks",
            "be whole masks",
            f"a slice of shape {mask.shape}",
            "Pack first, then slice.",
        )
        first = len(segments)
        for segment in mask.segments:
            sees = tuple(range(r.start + first, r.stop + first, r.step) for r in segment.sees)
            segments.append(segment._replace(sees=sees, sample=segment.sample + samples))
        samples += 1 + max((segment.sample for segment in mask.segments), default=0)
    positions = [mask.positions for mask in masks]
    used = sum(map(len, positions))
    if length is not None:
        length = integer("pack", "length", length, 0)
        check(used <= length, op, "length", f"be at least the {used} tokens of the masks", length)
        segments.append(Segment(length - used, "none", (), "padding", samples))
        positions.append(torch.zeros(length - used, dtype=torch.int64, device="cpu"))
    return SegmentMask(segments, torch.cat(positions) if positions else None)
