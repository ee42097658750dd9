"""Searches for the smallest number of forwards that fills a block, over a function from blocks to guesses, called by yielding.

A search yields a block (a tuple of ids) and is sent the guesses for it, so a driver can answer many searches in one
forward. Answers are cached: simulations meet the same blocks repeatedly.

Source: Nemotron-Labs-Diffusion, section 4. The plain form is tests/papers/plain_search.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pdkernels._validation import check

SCHEMES = ("serial", "greedy", "first_all", "exhaustive", "binary")
"""The schemes that fill a block; recursive compaction is named after its search.

"first_all" tries all right positions, then prefixes by bisection; "exhaustive" tries every prefix, the longest first; "binary",
the paper's, is bisection alone. Safety is not monotone, so bisection may miss the longest safe prefix. Plain bisection may even
commit an untested position of a block that serial denoising never meets, and end in another text; the other two are always exact.
"""

Block: TypeAlias = "tuple[int, ...]"


class Guesses(NamedTuple):
    """The result of a forward for every position of a block."""

    tokens: Sequence[int]
    probs: Sequence[float]


Asking: TypeAlias = "Generator[Block, Guesses, BlockLimit]"


@dataclass(frozen=True)
class Filling:
    """How a scheme filled a block.

    Attributes:
        committed: positions filled after each forward, most confident first.
        exact: whether the block ends as serial denoising ends.
        simulated: forwards that were computed only to decide what to commit.
        unsafe: iterations in which a candidate counted as unsafe because no budget was left to simulate.
    """

    committed: list[list[int]]
    exact: bool
    simulated: int = 0
    unsafe: int = 0

    @property
    def iterations(self) -> int:
        return len(self.committed)


@dataclass(frozen=True)
class BlockLimit:
    """A block, the result of serial denoising, and what other schemes needed for it.

    Attributes:
        target: the whole block after serial denoising.
        order: its positions in the order in which they were filled.
        fillings: by scheme.
        length: how many of the block's tokens belong to the text: those after an end token do not.
    """

    target: Block
    order: list[int]
    fillings: dict[str, Filling] = field(repr=False)
    length: int = 0


class _Budget(Exception):
    """No simulated forwards are left."""


class _Searcher:
    """The state of the searches over one block."""

    def __init__(self, mask: int, budget: int) -> None:
        self.mask, self.budget = mask, budget
        self.known: dict[Block, Guesses] = {}
        self.simulated, self.spent = 0, False
        self.asked: set[Block] = set()  # by the current scheme, whose cost must not depend on what other schemes asked

    def begin(self, order: Sequence[int], target: Block) -> None:
        """Starts a new scheme, which knows only the blocks of serial denoising."""
        self.simulated = 0
        self.asked = {
            tuple(self.mask if position in order[count:] else token for position, token in enumerate(target))
            for count in range(len(order))
        }

    def guesses(self, block: Block, *, simulation: bool = False) -> Generator[Block, Guesses, Guesses]:
        if simulation and block not in self.asked:
            if self.simulated >= self.budget:
                raise _Budget
            self.simulated += 1
        self.asked.add(block)
        if block not in self.known:
            self.known[block] = yield block
        return self.known[block]

    def ranked(self, block: Block, probs: Sequence[float]) -> list[int]:
        """Masked positions, most confident first, the lower one on ties."""
        positions = [position for position, token in enumerate(block) if token == self.mask]
        return sorted(positions, key=lambda position: (-probs[position], position))

    def serial(self, block: Block) -> Generator[Block, Guesses, tuple[Block, list[int]]]:
        order = []
        while self.mask in block:
            tokens, probs = yield from self.guesses(block)
            order += self.ranked(block, probs)[:1]
            block = _filled(block, order[-1:], tokens)
        return block, order

    def greedy(
        self, block: Block, target: Block, *, simulation: bool = False
    ) -> Generator[Block, Guesses, tuple[bool, list[list[int]]]]:
        """Whether it ends in the target, and what it committed; a simulation stops at the first wrong position."""
        committed = []
        while self.mask in block:
            tokens, probs = yield from self.guesses(block, simulation=simulation)
            ranked = self.ranked(block, probs)
            right = [position for position in ranked if tokens[position] == target[position]]
            if simulation and not right:
                break
            committed.append(right or ranked[:1])
            block = _filled(block, committed[-1], tokens)
        return block == target, committed

    def recursive(self, block: Block, target: Block, search: str) -> Generator[Block, Guesses, Filling]:
        """While only the most confident positions were committed, the block is one of serial denoising, whose next position is
        right. Once a longer prefix was found safe, all right positions are safe, because that is what `greedy` fills next."""
        committed: list[list[int]] = []
        unsafe, verified = 0, False
        while self.mask in block:
            tokens, probs = yield from self.guesses(block)
            ranked = self.ranked(block, probs)
            right = [position for position in ranked if tokens[position] == target[position]]
            count = len(right)
            if not verified or search == "binary":
                self.spent = False
                count, found = yield from self.safe_prefix(block, right, tokens, target, search)
                verified, unsafe = verified or found, unsafe + self.spent
            # Only plain bisection meets a block without a right position.
            committed.append(right[:count] or ranked[:1])
            block = _filled(block, committed[-1], tokens)
        return Filling(committed, block == target, self.simulated, unsafe)

    def safe_prefix(
        self, block: Block, right: list[int], tokens: Sequence[int], target: Block, search: str
    ) -> Generator[Block, Guesses, tuple[int, bool]]:
        """How many of `right` to commit, and whether `greedy` was found to end in the target from there."""

        def safe(count: int) -> Generator[Block, Guesses, bool]:
            try:
                found, _ = yield from self.greedy(_filled(block, right[:count], tokens), target, simulation=True)
            except _Budget:  # the candidate is taken for unsafe, and the search goes on with shorter ones
                self.spent, found = True, False
            return found

        if search == "exhaustive":
            for count in range(len(right), 0, -1):
                if (yield from safe(count)):
                    return count, True
            return 1, False
        if search == "first_all" and (yield from safe(len(right))):
            return len(right), True
        best, low, high = 0, 1, len(right) - (search == "first_all")
        while low <= high:
            middle = (low + high) // 2
            if (yield from safe(middle)):
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return max(best, 1), best > 0


def _filled(block: Block, positions: Sequence[int], tokens: Sequence[int]) -> Block:
    changed = list(block)
    for position in positions:
        changed[position] = tokens[position]
    return tuple(changed)


def searching(
    block: Block, mask: int, schemes: Sequence[str], budget: int, length: Callable[[Block], int] = len
) -> Asking:
    """A generator that yields blocks, is sent `Guesses`, and returns the `BlockLimit`."""
    searcher = _Searcher(mask, budget)
    target, order = yield from searcher.serial(block)
    fillings = {}
    for scheme in schemes:
        searcher.begin(order, target)
        if scheme == "serial":
            fillings[scheme] = Filling([[position] for position in order], True)
        elif scheme == "greedy":
            exact, committed = yield from searcher.greedy(block, target)
            fillings[scheme] = Filling(committed, exact)
        else:
            fillings[scheme] = yield from searcher.recursive(block, target, scheme)
    return BlockLimit(target, order, fillings, length(target))


def limit_of_block(
    model: Callable[[Block], tuple[Sequence[int], Sequence[float]]],
    block: Sequence[int],
    mask: int,
    schemes: Sequence[str] = SCHEMES,
    budget: int = 5000,
) -> BlockLimit:
    """What schemes need for one block of a model that is a function.

    Args:
        model: returns a guess, never the mask, and its probability for every position of a block. Filled positions are ignored.
        block: ids, with the mask at open positions.
        mask: the mask id.
        schemes: names from `SCHEMES`.
        budget: simulated forwards per scheme; repeated ones are free.

    Raises:
        ValueError: an unknown scheme, a negative budget.

    Example: the second guess changes once the first position is filled.
        >>> def model(block):
        ...     return ([1, 2], [0.9, 0.8]) if block[0] == 0 else ([1, 3], [1.0, 0.5])
        >>> limit = limit_of_block(model, (0, 0), 0, ("serial", "greedy", "first_all"))
        >>> limit.target, limit.order
        ((1, 3), [0, 1])
        >>> {scheme: (filling.committed, filling.exact) for scheme, filling in limit.fillings.items()}
        {'serial': ([[0], [1]], True), 'greedy': ([[0], [1]], True), 'first_all': ([[0], [1]], True)}
    """
    checked_schemes("papers.limit_of_block", schemes, budget)
    search = searching(tuple(block), mask, schemes, budget)
    try:
        asked = next(search)
        while True:
            asked = search.send(Guesses(*model(asked)))
    except StopIteration as stop:
        found: BlockLimit = stop.value
        return found


def checked_schemes(op: str, schemes: Sequence[str], budget: int) -> None:
    check(len(schemes) > 0, op, "schemes", "name at least one", "none")
    for scheme in schemes:
        check(scheme in SCHEMES, op, "schemes", f"be of {', '.join(SCHEMES)}", repr(scheme))
    check(budget >= 0, op, "budget", "not be negative", budget)
