"""Layout of planned diffusion: plans written token by token, then chunks diffused together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from pdkernels._validation import check_choice, check_type
from pdkernels.masks.segment_mask import Segment, SegmentMask, flag, integer

OpenChunks = Literal["hidden", "visible"]


class Stage(NamedTuple):
    """One round of planning and diffusion."""

    plan: int
    """Tokens written one by one: the prompt (in the first stage), the plan, or a last end token."""
    chunks: tuple[int, ...] = ()
    """Tokens of each chunk that the plan starts, its two tags included."""
    sync: bool = True
    """Whether a sync token follows the chunks. The round that ends a text may have none."""


def planned(
    stages: Sequence[Stage | tuple[Any, ...]], sparse: bool = False, open_chunks: OpenChunks = "hidden"
) -> SegmentMask:
    """Plans are causal, chunks attend to what came before their round and to themselves, and a sync makes chunks visible::

        planned([Stage(2, (2, 2))])           sparse=True
        plan   1 . | . . . . | .              1 . | . . . . | .
               1 1 | . . . . | .              1 1 | . . . . | .
        chunk  1 1 | 1 1 1 1 | .              1 1 | 1 1 . . | .
               1 1 | 1 1 1 1 | .              1 1 | 1 1 . . | .
        chunk  1 1 | 1 1 1 1 | .              1 1 | . . 1 1 | .
               1 1 | 1 1 1 1 | .              1 1 | . . 1 1 | .
        sync   1 1 | 1 1 1 1 | 1              1 1 | 1 1 1 1 | 1

    - A plan token attends to all plan and sync tokens before it, and to all chunks before the last sync.
    - A chunk token attends to what a plan token before its round's chunks attends to, its own chunk, and, if dense, the
      round's other chunks.
    - A sync token attends to everything before it. Tokens before a chunk never attend to it.

    Args:
        stages: the rounds, as `Stage` or as tuples ``(plan, chunks, sync)``.
        sparse: whether the chunks of a round are blind to each other (PDSA).
        open_chunks: what chunks of an earlier round are to later chunks until a sync: "hidden", as in training, or "visible", as
            in the sampler's accumulated mask. Plan tokens never attend to them. It matters only to a text that goes on
            without a sync, which the sampler never writes.

    Returns:
        A square mask over all tokens in text order; positions are 0, 1, 2, ...

    Raises:
        ValueError: a negative length; an unknown name.
        TypeError: something that is no stage, or no bool.

    Source: Planned Diffusion, section 4.2 and appendix H, and the masks of its released training code.

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
    check_type(isinstance(stages, Iterable), f"masks.{op}", "stages", "be a sequence of stages", type(stages).__name__)
    segments: list[Segment] = []
    hidden: list[range] = []  # segments of chunks that no sync has shown yet
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
            others = () if sparse else (range(first, chunk), range(chunk + 1, last))
            segments.append(Segment(integer(op, "chunks", length, 0), "full", (*past, *others), "chunk"))
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
