"""Speed of light of block diffusion: the fewest forwards in which a block could be filled with what serial denoising puts there.

Source: "Nemotron-Labs-Diffusion", section 4. Nothing is remembered or bounded, and every search tries what its
definition says, in order. A block is a tuple of ids, `mask` where it is open; `model(block)` gives a guess and its probability
for every place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Block = tuple[int, ...]
BlockModel = Callable[[Block], tuple[Sequence[int], Sequence[float]]]


class Filling(NamedTuple):
    """How a scheme filled a block."""

    block: Block  # at the end
    committed: list[list[int]]  # places filled after each forward, surest first


def open_places(block: Block, mask: int) -> list[int]:
    return [place for place, token in enumerate(block) if token == mask]


def surest_first(places: Sequence[int], probs: Sequence[float]) -> list[int]:
    """The first of equals first.

    >>> surest_first([0, 1, 2], [0.5, 0.9, 0.5])
    [1, 0, 2]
    """
    return sorted(places, key=lambda place: (-probs[place], place))


def filled(block: Block, places: Sequence[int], tokens: Sequence[int]) -> Block:
    """`block` with the guesses `tokens` in `places`."""
    return tuple(tokens[place] if place in places else token for place, token in enumerate(block))


def serial(model: BlockModel, block: Block, mask: int) -> Filling:
    """The surest guess, one a forward. Where it ends is the *target* of the other schemes."""
    committed = []
    while places := open_places(block, mask):
        tokens, probs = model(block)
        committed.append(surest_first(places, probs)[:1])
        block = filled(block, committed[-1], tokens)
    return Filling(block, committed)


def greedy(model: BlockModel, block: Block, mask: int, target: Block) -> Filling:
    """Every guess that is the target's; where there is none the surest one, which is wrong."""
    committed = []
    while places := open_places(block, mask):
        tokens, probs = model(block)
        ranked = surest_first(places, probs)
        committed.append([place for place in ranked if tokens[place] == target[place]] or ranked[:1])
        block = filled(block, committed[-1], tokens)
    return Filling(block, committed)


def recursive(model: BlockModel, block: Block, mask: int, target: Block, search: str = "first_all") -> Filling:
    """The largest prefix of the right guesses, surest first, from which `greedy` ends in the target.

    search: "exhaustive" tries all prefixes, the longest first. "first_all" tries the whole list and then, by bisection, the
    others, as if every prefix of a safe one were safe. "binary", the paper's, is bisection alone.
    """
    committed = []
    while places := open_places(block, mask):
        tokens, probs = model(block)
        ranked = surest_first(places, probs)
        right = [place for place in ranked if tokens[place] == target[place]]

        def safe(count: int) -> bool:
            return greedy(model, filled(block, right[:count], tokens), mask, target).block == target  # noqa: B023

        count = 1
        if search == "exhaustive":
            count = next((count for count in range(len(right), 1, -1) if safe(count)), 1)
        elif search == "first_all" and right and safe(len(right)):
            count = len(right)
        else:
            low, high = 1, len(right) - (search == "first_all")
            while low <= high:
                middle = (low + high) // 2
                if safe(middle):
                    count, low = middle, middle + 1
                else:
                    high = middle - 1
        committed.append(right[:count] or ranked[:1])
        block = filled(block, committed[-1], tokens)
    return Filling(block, committed)
