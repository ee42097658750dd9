"""Drafts from suffixes, as plainly as they are described: every end of the text is looked for in all texts.

Source: Oliaro et al., "SuffixDecoding" (arXiv 2411.04975), here with the last occurrence of the longest match instead of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

LEAST = 2  # tokens of a match
GROWTH = 3  # tokens drafted per matching token


def last_place(text: Sequence[int], end: Sequence[int]) -> int:
    """The index after the last occurrence of `end` in `text` that something follows; 0 if there is none.

    >>> last_place([1, 2, 3, 1, 2], [1, 2]), last_place([1, 2], [2])
    (2, 0)
    """
    places = [at + len(end) for at in range(len(text) - len(end)) if list(text[at : at + len(end)]) == list(end)]
    return max(places, default=0)


def suffix_draft(text: Sequence[int], pool: Sequence[Sequence[int]], maximum: int) -> list[int]:
    """At most `maximum` tokens after `text`: those that followed the longest of its ends that occurred earlier.

    The text itself wins over equally long matches in the `pool`, there the newest text wins, and in a text the last occurrence. A draft
    that reaches the end of the text continues with itself.

    >>> suffix_draft([1, 2, 3, 1, 2], [], 9), suffix_draft([7, 1, 2], [[7, 1, 2, 4], [1, 2, 5]], 9)
    ([3, 1, 2, 3, 1, 2], [4])
    """
    for length in range(len(text), LEAST - 1, -1):
        end, count = text[-length:], min(maximum, GROWTH * length)
        if place := last_place(text, end):
            return list(islice(cycle(text[place:]), count))
        for other in reversed(pool):
            if place := last_place(other, end):
                return list(other[place : place + count])
    return []
