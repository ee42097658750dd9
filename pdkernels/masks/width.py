"""Width scaling: repeated tokens, which widen a forward pass without more parameters."""

from __future__ import annotations

from pdkernels.masks.segment_mask import Repeated, Sees, Segment, SegmentMask, arange, check_tokens, flag, integer


def width_scaling(length: int, factor: int, kv_share: bool = False) -> SegmentMask:
    """Each token `factor` times in a row. A copy attends to the copies of its token up to itself, and to all copies of
    earlier tokens, or to the last of each with `kv_share`::

        width_scaling(3, 2)       kv_share=True
            1 . . . . .             1 . . . . .
            1 1 . . . .             1 1 . . . .
            1 1 1 . . .             . 1 1 . . .
            1 1 1 1 . .             . 1 1 1 . .
            1 1 1 1 1 .             . 1 . 1 1 .
            1 1 1 1 1 1             . 1 . 1 1 1

    Args:
        length: tokens before they are repeated.
        factor: copies of each, 1 or more.
        kv_share: earlier tokens are seen by their last copy alone, so that a cache needs one row for each.

    Returns:
        A square mask of ``length * factor`` tokens. Copies have the position of their token.

    Raises:
        ValueError: sizes out of range.
        TypeError: `kv_share` that is not a bool.

    Source: "Efficient Parallel Samplers for Recurrent-Depth Models" (arXiv 2510.14961), Definition B.3, Width-NoShare
    and Width-KVShare. There the j-th copy sees the first j - 1 copies of its token; it has to see itself too, because
    the first copy of the first token would see nothing. Positions are not given there: with these, a token is as far
    from another one as without copies.

    Example:
        >>> import pdkernels as pd
        >>> mask = pd.masks.width_scaling(2, 2, kv_share=True)
        >>> mask.positions.tolist()
        [0, 0, 1, 1]
        >>> mask.dense().int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    """
    op = "width_scaling"
    length = integer(op, "length", length, 0)
    factor = integer(op, "factor", factor, 1)
    kv_share = flag(op, "kv_share", kv_share)
    check_tokens(op, "length", length * factor, 2 * length if kv_share else 1)
    positions = arange(length).repeat_interleave(factor)
    if not kv_share:
        return SegmentMask([Segment(length * factor, "causal")], positions)
    earlier = Sees(1, 1, 2, 0, 2)  # the last copies of the tokens before
    first = Repeated(factor - 1, "causal", (earlier,), "copy")
    last = Repeated(1, "causal", (earlier, Sees(0, 1, 1, 2, 2)))
    return SegmentMask._repeat([(length, (first, last))], positions)
