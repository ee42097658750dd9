"""Layout of planned diffusion: plans written token by token, chunks denoised together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from pdkernels._validation import check, check_choice, check_type
from pdkernels.masks.segment_mask import Segment, SegmentMask, arange, flag, integer

OpenChunks = Literal["hidden", "visible"]
Inside = Literal["full", "causal"]


class Stage(NamedTuple):
    """One round of planning and diffusion."""

    plan: int
    """Tokens written one at a time: the prompt (in the first stage), the plan, or a last end token."""
    chunks: tuple[int, ...] = ()
    """Tokens of each chunk that the plan starts, its two tags included."""
    sync: bool = True
    """Whether a sync token follows the chunks. The round that ends a text may have none."""


def planned(
    stages: Sequence[Stage | tuple[Any, ...]],
    sparse: bool = False,
    open_chunks: OpenChunks = "hidden",
    inside: Inside = "full",
) -> SegmentMask:
    """Plans are causal, chunks attend to the text before their round and to themselves, and a sync makes chunks
    visible::

        planned([Stage(2, (2, 2))])           sparse=True
        plan   1 . | . . . . | .              1 . | . . . . | .
               1 1 | . . . . | .              1 1 | . . . . | .
        chunk  1 1 | 1 1 1 1 | .              1 1 | 1 1 . . | .
               1 1 | 1 1 1 1 | .              1 1 | 1 1 . . | .
        chunk  1 1 | 1 1 1 1 | .              1 1 | . . 1 1 | .
               1 1 | 1 1 1 1 | .              1 1 | . . 1 1 | .
        sync   1 1 | 1 1 1 1 | 1              1 1 | 1 1 1 1 | 1

    - A plan token attends to all plan and sync tokens before it, and to all chunks before the last sync.
    - A chunk token attends to the tokens that are visible to the last plan token before it, to its own chunk, and, if
      dense, to the other chunks of the round.
    - A sync token attends to everything before it. Tokens before a chunk never attend to it.

    Args:
        stages: the rounds, as `Stage` or as tuples ``(plan, chunks, sync)``.
        sparse: whether the chunks of a round are masked from each other (PDSA).
        open_chunks: whether chunks of an earlier round without a sync are "hidden" from later chunks, as in training,
            or "visible", as in the sampler's accumulated mask. Plan tokens never attend to them. This matters only for
            a text that continues without a sync, which the sampler never writes.
        inside: attention inside a chunk: "full", as masks need it, or "causal", for sparse chunks that are written
            token by token, each on its own (Pasta).

    Returns:
        A square mask over all tokens in text order; positions are 0, 1, 2, ...

    Raises:
        ValueError: a negative length; an unknown name; causal chunks that are not sparse.
        TypeError: something that is not a stage, or not a bool.

    Source: Planned Diffusion, section 4.2 and appendix H, and the masks of its released training code; causal chunks:
    its baseline Pasta (Jin et al., "Learning to keep a promise").

    Example:
        >>> import pdkernels as pd
        >>> mask = pd.masks.planned([pd.masks.Stage(3, (2, 2)), pd.masks.Stage(1, sync=False)], sparse=True)
        >>> mask
        SegmentMask(9 x 9: 2 plan, 2 chunk, 1 sync)
        >>> mask.dense()[3].int().tolist()
        [1, 1, 1, 1, 1, 0, 0, 0, 0]
    """
    op = "planned"
    sparse = flag(op, "sparse", sparse)
    check_choice(f"masks.{op}", "open_chunks", open_chunks, get_args(OpenChunks))
    check_choice(f"masks.{op}", "inside", inside, get_args(Inside))
    alone = inside == "full" or sparse
    check(
        alone, f"masks.{op}", "inside", "be 'full' where chunks attend to each other", repr(inside), "Pass sparse=True."
    )
    check_type(isinstance(stages, Iterable), f"masks.{op}", "stages", "be a sequence of stages", type(stages).__name__)
    segments: list[Segment] = []
    hidden: list[range] = []  # segments of chunks that no sync has made visible yet
    for stage in stages:
        is_stage = isinstance(stage, tuple) and 1 <= len(stage) <= 3
        check_type(
            is_stage, f"masks.{op}", "stages", "hold stages (plan, chunks, sync)", stage, "See pdkernels.masks.Stage."
        )
        plan, chunks, sync = Stage(*stage)
        check_type(isinstance(chunks, Sequence), f"masks.{op}", "chunks", "be a tuple of lengths", chunks)
        number = len(segments)
        segments.append(Segment(integer(op, "plan", plan, 0), "causal", _without(number, hidden), "plan"))
        first, last = number + 1, number + 1 + len(chunks)
        past = _without(first, hidden) if open_chunks == "hidden" else (range(first),)
        for chunk, length in enumerate(chunks, start=first):
            siblings = () if sparse else (range(first, chunk), range(chunk + 1, last))
            segments.append(Segment(integer(op, "chunks", length, 0), inside, (*past, *siblings), "chunk"))
        if last > first:
            hidden.append(range(first, last))
        if flag(op, "sync", sync):
            segments.append(Segment(1, "causal", (range(last),), "sync"))
            hidden.clear()
    return SegmentMask(segments)


def _without(end: int, holes: list[range]) -> tuple[range, ...]:
    """The segments below `end` outside the holes."""
    edges = [0, *(edge for hole in holes for edge in (hole.start, hole.stop)), end]
    return tuple(range(start, stop) for start, stop in zip(edges[::2], edges[1::2]))


def planned_streams(
    stages: Sequence[Stage | tuple[Any, ...]], sparse: bool = False, open_chunks: OpenChunks = "hidden"
) -> SegmentMask:
    """Training layout: noisy chunks, then the clean text. Noisy chunks attend to the clean text before their round and
    to themselves::

        planned_streams([Stage(1, (1, 1)), Stage(1, (2,), False)], sparse=True)
                 a b c c   p a b s p
        noisy a  1 . . .   1 . . . .
              b  . 1 . .   1 . . . .
              c  . . 1 1   1 1 1 1 1
              c  . . 1 1   1 1 1 1 1
        clean p  . . . .   1 . . . .
              a  . . . .   1 1 . . .
              b  . . . .   1 . 1 . .
              s  . . . .   1 1 1 1 .
              p  . . . .   1 1 1 1 1

    The noisy chunks of a round see the earlier rounds clean, as in decoding. Clean chunks that no other round attends
    to, such as those of a last round without a sync, are left out.

    Args:
        stages, sparse, open_chunks: as in `planned`.

    Returns:
        A square mask; positions are those in the text, so a noisy chunk shares its clean copy's.

    Raises:
        ValueError, TypeError: as `planned`.

    Source: Planned Diffusion, equation 10: each round's chunks are conditioned on the clean text of earlier rounds;
    laid out as two streams like Block Diffusion (BD3-LM).

    Example:
        >>> import pdkernels as pd
        >>> mask = pd.masks.planned_streams([pd.masks.Stage(2, (1, 1)), pd.masks.Stage(1, (2,), False)])
        >>> mask
        SegmentMask(10 x 10: 3 noisy, 2 plan, 3 chunk, 1 sync)
        >>> mask.positions.tolist()
        [2, 3, 6, 7, 0, 1, 2, 3, 4, 5]
    """
    text = planned(stages, sparse, open_chunks).segments
    chunks = [number for number, segment in enumerate(text) if segment.kind == "chunk"]
    noisy: list[Segment] = []
    read: set[int] = set()  # segments that tokens of other rounds attend to
    first = 0
    for count, number in enumerate(chunks):
        if count == 0 or chunks[count - 1] != number - 1:
            first = number  # chunks of a round follow each other, and a plan comes before them
        to_noisy = count - number
        mates = [
            range(span.start + to_noisy, span.stop + to_noisy) for span in text[number].sees if span.start >= first
        ]
        past = [span for span in text[number].sees if span.stop <= first]
        if text[number].length > 0:
            read.update(*past)
        clean = [range(span.start + len(chunks), span.stop + len(chunks)) for span in past]
        noisy.append(text[number]._replace(sees=(*mates, *clean), kind="noisy"))
    for segment in text:
        if segment.kind != "chunk" and segment.length > 0:
            read.update(*segment.sees)
    copies, starts, start = [], [], 0
    for number, segment in enumerate(text):
        sees = tuple(range(span.start + len(chunks), span.stop + len(chunks)) for span in segment.sees)
        is_read = segment.kind != "chunk" or number in read
        copies.append(segment._replace(sees=sees, length=segment.length if is_read else 0))
        starts.append(start)
        start += segment.length
    order = [(starts[number], text[number].length) for number in chunks]
    order += [(begin, copy.length) for begin, copy in zip(starts, copies, strict=True)]
    ranges = [arange(begin, begin + length) for begin, length in order]
    positions = torch.cat(ranges) if ranges else arange(0)
    return SegmentMask([*noisy, *copies], positions)
