"""A run of planned diffusion as text."""

from __future__ import annotations

from collections.abc import Sequence

from pdkernels.generation.traces import ChunkStep


def chunk_lanes(trace: Sequence[ChunkStep]) -> str:
    """The steps of each round from left to right, a lane per chunk: how many tokens it got in each step, a dot for
    none.

    Args:
        trace: ``stats.trace`` of one sequence of method "planned" with ``trace=True``.

    Example:
        >>> steps = [ChunkStep(0, [[9, 9], [9]], {(0, 1): 4, (1, 0): 7}), ChunkStep(0, [[9, 4], [7]], {(0, 0): 5}),
        ...          ChunkStep(1, [[9]], {(0, 0): 3})]
        >>> print(chunk_lanes(steps))
        round 0  chunk 0   2 tokens  1 1
                 chunk 1   1 tokens  1 .
        round 1  chunk 0   1 tokens  1
    """
    lines = []
    for number in sorted({step.round for step in trace}):
        steps = [step for step in trace if step.round == number]
        for chunk, content in enumerate(steps[0].canvas):
            counts = [sum(where == chunk for where, _ in step.committed) for step in steps]
            width = len(str(max(counts)))
            lane = " ".join(str(count or ".").rjust(width) for count in counts)
            name = f"round {number}" if chunk == 0 else " " * len(f"round {number}")
            lines.append(f"{name}  chunk {chunk} {len(content):3} tokens  {lane}")
    return "\n".join(lines)
