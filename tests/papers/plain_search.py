"""Speed of light of block diffusion: the fewest forwards that fill a block with the result of serial denoising.

Source: "Nemotron-Labs-Diffusion", section 4. Nothing is cached, and every search tries what its definition says, in order. A block is a tuple of ids, `mask` at masked positions; `model(block)` gives a guess and its probability
for every position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Block = tuple[int, ...]
BlockModel = Callable[[Block], tuple[Sequence[int], Sequence[float]]]


class Filling(NamedTuple):
    """How a scheme filled a block."""

    block: Block  # at the end
    committed: list[list[int]]  # positions filled after each forward, most confident first


def open_positions(block: Block, mask: int) -> list[int]:
    return [position for position, token in enumerate(block) if token == mask]


def surest_first(positions: Sequence[int], probs: Sequence[float]) -> list[int]:
    """The lower one first on ties.

    >>> surest_first([0, 1, 2], [0.5, 0.9, 0.5])
    [1, 0, 2]
    """
    return sorted(positions, key=lambda position: (-probs[position], position))


def filled(block: Block, positions: Sequence[int], tokens: Sequence[int]) -> Block:
    """`block` with the guesses `tokens` at `positions`."""
    return tuple(tokens[position] if position in positions else token for position, token in enumerate(block))


def serial(model: BlockModel, block: Block, mask: int) -> Filling:
    """The most confident guess, one per forward. Its final block is the *target* of the other schemes."""
    committed = []
    while positions := open_positions(block, mask):
        tokens, probs = model(block)
        committed.append(surest_first(positions, probs)[:1])
        block = filled(block, committed[-1], tokens)
    return Filling(block, committed)


def greedy(model: BlockModel, block: Block, mask: int, target: Block) -> Filling:
    """Every guess that equals the target's; if there is none, the most confident one, which is wrong."""
    committed = []
    while positions := open_positions(block, mask):
        tokens, probs = model(block)
        ranked = surest_first(positions, probs)
        committed.append([position for position in ranked if tokens[position] == target[position]] or ranked[:1])
        block = filled(block, committed[-1], tokens)
    return Filling(block, committed)


class Within:
    """Whether `greedy` ends in the target from a block, as far as `budget` forwards tell; otherwise it does not. Blocks that serial
    denoising, an iteration or an earlier simulation has met cost nothing, and a simulation ends where no guess is right."""

    def __init__(self, model: BlockModel, mask: int, target: Block, budget: int) -> None:
        self.model, self.mask, self.target, self.left = model, mask, target, budget
        block = tuple(mask for _ in target)
        self.met = {block}
        for step in serial(model, block, mask).committed:
            block = filled(block, step, target)
            self.met.add(block)

    def safe(self, block: Block) -> bool:
        while positions := open_positions(block, self.mask):
            if block not in self.met:
                if self.left == 0:
                    return False
                self.left -= 1
                self.met.add(block)
            tokens, _ = self.model(block)
            right = [position for position in positions if tokens[position] == self.target[position]]
            if not right:
                return False
            block = filled(block, right, tokens)
        return block == self.target


def recursive(
    model: BlockModel, block: Block, mask: int, target: Block, search: str = "first_all", budget: int | None = None
) -> Filling:
    """The largest prefix of the right guesses, most confident first, from which `greedy` ends in the target.

    search: "exhaustive" tries all prefixes, the longest first. "first_all" tries the whole list and then, by bisection, the
    others, as if every prefix of a safe one were safe. "binary", the paper's, is bisection alone.

    budget: simulated forwards; a candidate that needs more is unsafe, and the search goes on. None: any number.
    """
    committed: list[list[int]] = []
    bounded = None if budget is None else Within(model, mask, target, budget)
    while positions := open_positions(block, mask):
        tokens, probs = model(block)
        ranked = surest_first(positions, probs)
        right = [position for position in ranked if tokens[position] == target[position]]
        if bounded is not None:
            bounded.met.add(block)

        def safe(count: int) -> bool:
            if bounded is not None:
                return bounded.safe(filled(block, right[:count], tokens))  # noqa: B023
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
