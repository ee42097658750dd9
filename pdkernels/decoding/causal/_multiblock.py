"""One sequence's active blocks, on the host: the input of the next forward, and the update from its predictions.

Between two forwards only a few dozen token ids move, by rules with many cases, so they stay in Python lists. All of
it together took 1.4 % of the time of a forward of `tiny-code` on a CPU when this was written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Limits(NamedTuple):
    block_size: int
    blocks: int  # maximum number of active blocks, including the real one
    spawn_at: int  # accepted tokens of the newest block at which the next one opens
    pool_size: int
    rows: int  # maximum number per forward, including the draft


class PseudoBlock(NamedTuple):
    """A block after the real one. Together the lists are the block; `accepted` holds the tokens that the model has
    confirmed so far."""

    accepted: list[int]
    draft: list[int]

    def verified(self, answers: Sequence[int]) -> PseudoBlock:
        """The block after a forward that predicted the next token after each draft token except the last.

        The first draft token is accepted without a test; the real block will test them all again.

        >>> PseudoBlock([1], [2, 3, 4, 5]).verified([3, 7, 8])
        PseudoBlock(accepted=[1, 2, 3], draft=[7, 8])
        """
        if not self.draft:
            return self
        count = 1
        while count < len(self.draft) and self.draft[count] == answers[count - 1]:
            count += 1
        return PseudoBlock(self.accepted + self.draft[:count], list(answers[count - 1 :]))


class Progress:
    """The real block, the pseudo blocks after it, and the pool of rejected sequences that may still turn out right.

    `rows` are what the next forward tries for the real block: its draft, then other candidates of the same length.
    All start with the token known to be right. :meth:`advance` continues from the row that wins.
    """

    def __init__(self, prompt: Sequence[int], draft: list[int], max_new_tokens: int, limits: Limits) -> None:
        self.history = list(prompt)  # and what was committed after it
        self.rows = [draft]
        self.pseudo: list[PseudoBlock] = []
        self._limits = limits
        self._block_start = len(prompt)
        # The last requested token needs no forward: blocks divide the positions before it.
        self._end = len(prompt) + max_new_tokens - 1
        self._pool: deque[list[int]] = deque(maxlen=limits.pool_size)

    @property
    def left(self) -> int:
        """Tokens that forwards still have to confirm."""
        return self._end - len(self.history)

    def following(self) -> tuple[list[int], list[int]]:
        """The pseudo blocks' tokens, and the positions, counted from the start of a row, whose predictions they need.

        Tokens after the last such position are left out: no row that is read sees them.
        """
        tokens: list[int] = []
        read_positions: list[int] = []
        start = len(self.rows[0])
        for block in self.pseudo:
            first = start + len(tokens) + len(block.accepted)
            read_positions += range(first, first + len(block.draft) - 1)
            tokens += block.accepted + block.draft
        return tokens[: read_positions[-1] + 1 - start] if read_positions else [], read_positions

    def advance(
        self, row: list[int], accepted: int, predictions: list[int], answers: list[int], random_words: list[int]
    ) -> None:
        """Processes a forward that neither ended nor completed the sequence, and prepares the next one.

        Args:
            row: the index of the winning row of `rows`.
            accepted: the number of its accepted tokens.
            predictions: the model's own next token after each of its tokens.
            answers: those at the positions returned by :meth:`following`.
            random_words: `block_size` of them, for slots without a prediction.
        """
        length = len(self.history)
        self.history += row[:accepted]
        fresh = [self.history[word % length] for word in random_words]
        consumed = 0
        for number, block in enumerate(self.pseudo):
            count = max(0, len(block.draft) - 1)
            self.pseudo[number] = block.verified(answers[consumed : consumed + count])
            consumed += count

        draft = predictions[accepted - 1 : -1]  # empty if the block is complete
        rejected = draft[1:]
        if draft:
            standing = [token for block in self.pseudo for token in block.accepted + block.draft]
            self._pool.append(self.history[self._block_start :] + draft + standing)
        self._spawn(draft, fresh)
        if not draft:
            draft = self._next_block(predictions[-1], fresh)
        # The draft itself is the tail that this forward rejected, so the pool is searched before it is added.
        self.rows = self._with_candidates(draft)
        if rejected:
            self._pool.append(rejected)

    def _length_at(self, position: int) -> int:
        return min(self._limits.block_size, self._end - position)

    def _spawn(self, draft: list[int], fresh: list[int]) -> None:
        """Opens a block after the newest one, once enough of its tokens are accepted: a copy of the real draft, then
        fillers."""
        under_way = 1 + len(self.pseudo)
        newest = len(self.pseudo[-1].accepted) if self.pseudo else len(self.history) - self._block_start
        block_length = self._length_at(self._block_start + self._limits.block_size * under_way)
        if newest >= self._limits.spawn_at and under_way < self._limits.blocks and block_length > 0:
            self.pseudo.append(PseudoBlock([], (draft + fresh[len(draft) :])[:block_length]))

    def _next_block(self, next_token: int, fresh: list[int]) -> list[int]:
        """The draft of the block that becomes real: its pseudo block preceded by the known token, or fillers."""
        self._block_start = len(self.history)
        if not self.pseudo:
            return [next_token, *fresh[1:]][: self._length_at(self._block_start)]
        block = self.pseudo.pop(0)
        return [next_token, *(block.accepted + block.draft)[1:]]

    def _with_candidates(self, draft: list[int]) -> list[list[int]]:
        """`draft`, and what followed its first token in sequences of the pool, newest first, without duplicates."""
        rows = [draft]
        for entry in reversed(self._pool):
            if len(rows) == self._limits.rows:
                break
            if draft[0] in entry:
                position = entry.index(draft[0])
                candidate = entry[position : position + len(draft)]
                candidate += draft[len(candidate) :]
                if candidate not in rows:
                    rows.append(candidate)
        return rows
