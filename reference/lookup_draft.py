"""Drafts that are looked up: the tokens that followed earlier occurrences of a text's last tokens.

Source: Saxena, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding, 2023), here with the longest match, a
draft that grows with it, and a pool of other texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice

from torch import Tensor

REACH = 5  # the largest number of tokens compared
LEAST = 2  # a match of one token is too weak
GROWTH = 3  # tokens drafted per matching token


def longest_match(last: Sequence[int], searched: Sequence[int]) -> tuple[int, int]:
    """The length of the longest suffix of `last` that occurs in `searched`, and the index after it; the last of equally long matches.

    >>> longest_match([9, 1, 2], [1, 2, 7, 9, 1, 2, 8, 1, 2]), longest_match([1], [2])
    ((3, 6), (0, 1))
    """
    best = (0, 0)
    for after in range(1, len(searched) + 1):
        length = 0
        while length < min(after, len(last)) and searched[after - 1 - length] == last[-1 - length]:
            length += 1
        best = max(best, (length, after))
    return best


def looked_up(
    text: Sequence[int],
    pool: Iterable[Sequence[int]],
    maximum: int,
    max_match: int = REACH,
    min_match: int = LEAST,
    growth: int = GROWTH,
) -> list[int]:
    """At most `maximum` draft tokens after `text`: those that followed its last tokens earlier, in the text or in an entry of `pool`.

    The longest match wins, then the text over the pool, then the newer match. A draft that reaches the end of the text continues
    with itself, so that a repeating text is drafted at full length.

    >>> looked_up([1, 2, 3, 1, 2], [], 9), looked_up([7, 1, 2], [[7, 1, 2, 4]], 9), looked_up([1, 2, 3], [], 9)
    ([3, 1, 2, 3, 1, 2], [4], [])
    """
    last = text[-max_match:]
    length, followed = 0, list[int]()
    for entry in pool:
        own, after = longest_match(last, entry[:-1])
        if own >= length:
            length, followed = own, list(entry[after:])
    own, after = longest_match(last, text[:-1])
    if own >= length:
        length, followed = own, list(islice(cycle(text[after:]), maximum))
    if length < min_match:
        return []
    return followed[: maximum if length == max_match else min(maximum, growth * length)]


def texts_in(tokens: Iterable[int]) -> list[list[int]]:
    """What -1 separates.

    >>> texts_in([1, 2, -1, -1, 3, -1])
    [[1, 2], [], [3], []]
    """
    texts: list[list[int]] = [[]]
    for token in tokens:
        if token == -1:
            texts.append([])
        else:
            texts[-1].append(token)
    return texts


def lookup_draft_(
    draft: Tensor,
    draft_lengths: Tensor,
    tokens: Tensor,
    ends: Tensor,
    start: int = 0,
    max_match: int = REACH,
    min_match: int = LEAST,
    growth: int = GROWTH,
) -> None:
    """Shapes as in ``pdkernels.lookup_draft_``."""
    slots, width = draft.shape[1], tokens.shape[1]
    sequences = list(zip(draft_lengths.tolist(), ends.tolist()))
    for b, (length, end) in enumerate(sequences):
        for name, value, low, high in (("draft_lengths", length, 0, slots), ("ends", end, start, width - 1)):
            if not low <= value <= high and length != 0:
                words = f"{name} must be in [{low}, {high}], got {value} for sequence {b}."
                raise ValueError(f"pdkernels.lookup_draft_: {words}")
    for b, (length, end) in enumerate(sequences):
        if length == 0:
            continue
        tokens[b, end] = draft[b, 0]
        row = tokens[b, : end + 1].tolist()
        *pool, text = texts_in(row[:start]) + texts_in(row[start:])
        found = looked_up(text, pool, slots - 1, max_match, min_match, growth)
        draft[b, 1:] = draft.new_tensor([*found, *[0] * (slots - 1 - len(found))])
        draft_lengths[b] = min(length, 1 + len(found))
