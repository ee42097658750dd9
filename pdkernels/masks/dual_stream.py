"""Training layout of block diffusion: a noisy and a clean copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from pdkernels._validation import INDEX_DTYPES, check, check_type
from pdkernels.masks.segment_mask import Repeated, Run, Sees, SegmentMask, arange, blocks, check_tokens, choice, integer


def dual_stream(
    length: int,
    block_size: int,
    clean: Literal["causal", "block"] = "causal",
    order: Literal["noisy_first", "clean_first"] = "noisy_first",
    noisy_positions: Sequence[int] | Tensor | None = None,
    prefix_len: int = 0,
) -> SegmentMask:
    """A noisy and a clean copy of a sequence. A noisy block attends to all of itself and to the clean blocks before
    it::

        dual_stream(4, 2)                     clean="block" differs in
              n n n n   c c c c                 the clean stream:
        n     1 1 . .   . . . .
        n     1 1 . .   . . . .
        n     . . 1 1   1 1 . .
        n     . . 1 1   1 1 . .
        c     . . . .   1 . . .                   1 1 . .
        c     . . . .   1 1 . .                   1 1 . .
        c     . . . .   1 1 1 .                   1 1 1 1
        c     . . . .   1 1 1 1                   1 1 1 1

    A noisy block sees neither its own clean block (which would reveal the answer) nor other noisy blocks. No
    clean row attends to noise.

    Args:
        length: tokens of the clean stream.
        block_size: tokens of a block. The last block may be shorter.
        clean: the clean stream is ``"causal"`` token by token (tri-mode models) or ``"block"``: causal from block to
            block, bidirectional inside (BD3-LM, Fast-dLLM v2, SDAR).
        order: which stream comes first.
        noisy_positions: positions that the noisy stream keeps, ascending; None: all from `prefix_len` on. Vision
            tokens, for instance, are dropped from it. They keep their position ids, and blocks are counted by those.
        prefix_len: clean tokens before the first block, such as the prompt where only the response is noised. They are
            causal among themselves, all blocks attend to them, and they have no noisy copy.

    Returns:
        A square mask; positions are those in the clean stream.

    Raises:
        ValueError: sizes out of range, an unknown name, positions that do not ascend within ``[prefix_len, length)``.

    Source: Nemotron-Labs-Diffusion, released code (the paper's "causally across blocks" for the noisy stream is
    imprecise: in the code and in Block Diffusion a noisy block sees no other noisy block); its compact layout for
    responses; Fast-dLLM v2. The paper does not say how blocks count where vision tokens are dropped; counting by
    position is this project's choice.

    Example:
        >>> import pdkernels as pd
        >>> mask = pd.masks.dual_stream(5, 2, noisy_positions=[1, 4])
        >>> mask.positions.tolist()
        [1, 4, 0, 1, 2, 3, 4]
        >>> mask.dense()[:2].int().tolist()
        [[1, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0]]
    """
    op = "dual_stream"
    length = integer(op, "length", length, 0)
    block_size = integer(op, "block_size", block_size, 1)
    prefix_len = integer(op, "prefix_len", prefix_len, 0)
    choice(op, "clean", clean, ("causal", "block"))
    choice(op, "order", order, ("noisy_first", "clean_first"))
    check(prefix_len <= length, f"masks.{op}", "prefix_len", f"be at most length ({length})", prefix_len)
    check_tokens(op, "length", 2 * length, 2 * ((length - prefix_len) // block_size))
    sizes = blocks(length - prefix_len, block_size)
    if noisy_positions is None:
        positions, noisy_sizes = arange(prefix_len, length), sizes
    else:
        positions = torch.as_tensor(noisy_positions).cpu()
        integers = positions.numel() == 0 or positions.dtype in INDEX_DTYPES
        check_type(
            integers,
            f"masks.{op}",
            "noisy_positions",
            "be int32 or int64",
            positions.dtype,
            "Give the numbers of positions.",
        )
        positions = positions.to(torch.int64)
        ascending = (
            positions.dim() == 1
            and bool((positions.diff() > 0).all())
            and bool(((positions >= prefix_len) & (positions < length)).all())
        )
        check(
            ascending, f"masks.{op}", "noisy_positions", f"ascend within [{prefix_len}, {length})", positions.tolist()
        )
        noisy_sizes = torch.bincount((positions - prefix_len) // block_size, minlength=len(sizes)).tolist()

    noisy_first = order == "noisy_first"
    prefix = len(sizes) if noisy_first else 0  # index of the prefix's segment, before the clean blocks
    clean_pattern: Literal["causal", "full"] = "causal" if clean == "causal" else "full"
    cleans = [(1, (Repeated(prefix_len, "causal", (), "prompt"),)), *_runs(sizes, clean_pattern, prefix, "clean")]
    noisies = _runs(noisy_sizes, "full", prefix, "noisy")
    runs = noisies + cleans if noisy_first else cleans + noisies
    streams = [positions, arange(length)]
    return SegmentMask._repeat(runs, torch.cat(streams if noisy_first else streams[::-1]))


def _runs(sizes: list[int], pattern: Literal["causal", "full"], prefix: int, kind: str) -> list[Run]:
    """Blocks of one stream: block j sees the clean prefix and the j clean blocks after it."""
    runs: list[Run] = []
    first = 0
    for size, same in groupby(sizes):
        count = sum(1 for _ in same)
        runs.append((count, (Repeated(size, pattern, (Sees(prefix, prefix + 1 + first, 1, 0, 1),), kind),)))
        first += count
    return runs
