"""One sequence's blocks under way, on the host: what the next forward reads, and what its answers make of them.

Between two forwards only a few dozen token ids move, by rules full of cases, so they stay in Python lists. All of
it together took 1.4 % of the time of a forward of `tiny-code` on a CPU when this was written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Limits(NamedTuple):
    block_size: int
    blocks: int  # under way at most, the real one included
    spawn_at: int  # accepted tokens of the newest block that open the next one
    pool_size: int
    rows: int  # per forward at most, the draft included


class PseudoBlock(NamedTuple):
    """A block after the real one. Both lists together are the block; `accepted` is what the model agreed with so far."""

    accepted: list[int]
    draft: list[int]

    def verified(self, answers: Sequence[int]) -> PseudoBlock:
        """The block after a forward that gave the model's own next tokens after each draft token but the last.

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
    """The real block, the pseudo blocks after it, and the pool of sequences that may come true after all.

    `rows` is what the next forward tries for the real block: its draft, then other candidates of the same length.
    All start with the token that is known to be right. Where the row that wins leaves off, :meth:`advance` takes over.
    """

    def __init__(self, prompt: Sequence[int], draft: list[int], max_new_tokens: int, limits: Limits) -> None:
        self.history = list(prompt)  # and what was committed after it
        self.rows = [draft]
        self.pseudo: list[PseudoBlock] = []
        self._limits = limits
        self._block_start = len(prompt)
        # The last token asked for needs no forward of its own: blocks divide the positions before it.
        self._end = len(prompt) + max_new_tokens - 1
        self._pool: deque[list[int]] = deque(maxlen=limits.pool_size)

    @property
    def left(self) -> int:
        """Tokens that forwards still have to confirm."""
        return self._end - len(self.history)

    def following(self) -> tuple[list[int], list[int]]:
        """The pseudo blocks' tokens, and the positions, counted from the start of a row, whose answers they wait for.

        Tokens after the last such position are left out: nothing that is read sees them.
        """
        tokens: list[int] = []
        wanted: list[int] = []
        start = len(self.rows[0])
        for block in self.pseudo:
            first = start + len(tokens) + len(block.accepted)
            wanted += range(first, first + len(block.draft) - 1)
            tokens += block.accepted + block.draft
        return tokens[: wanted[-1] + 1 - start] if wanted else [], wanted

    def advance(
        self, row: list[int], accepted: int, predictions: list[int], answers: list[int], words: list[int]
    ) -> None:
        """Takes in a forward that neither ended nor completed the sequence, and sets up the next one.

        Args:
            row: the one of `rows` that won.
            accepted: tokens of it that stand.
            predictions: the model's own next token after each of its tokens.
            answers: those at the positions that :meth:`following` names.
            words: `block_size` random words, for slots that nothing has predicted.
        """
        known = len(self.history)
        self.history += row[:accepted]
        fresh = [self.history[word % known] for word in words]
        taken = 0
        for number, block in enumerate(self.pseudo):
            count = max(0, len(block.draft) - 1)
            self.pseudo[number] = block.verified(answers[taken : taken + count])
            taken += count

        draft = predictions[accepted - 1 : -1]  # empty if the block is complete
        rejected = draft[1:]
        if draft:
            standing = [token for block in self.pseudo for token in block.accepted + block.draft]
            self._pool.append(self.history[self._block_start :] + draft + standing)
        self._spawn(draft, fresh)
        if not draft:
            draft = self._next_block(predictions[-1], fresh)
        # The draft itself is the tail that this forward rejected, so the pool is asked before that goes in.
        self.rows = self._with_candidates(draft)
        if rejected:
            self._pool.append(rejected)

    def _length_at(self, position: int) -> int:
        return min(self._limits.block_size, self._end - position)

    def _spawn(self, draft: list[int], fresh: list[int]) -> None:
        """Opens a block after the newest one, once that is settled far enough: a copy of the real draft, then fillers."""
        under_way = 1 + len(self.pseudo)
        newest = len(self.pseudo[-1].accepted) if self.pseudo else len(self.history) - self._block_start
        room = self._length_at(self._block_start + self._limits.block_size * under_way)
        if newest >= self._limits.spawn_at and under_way < self._limits.blocks and room > 0:
            self.pseudo.append(PseudoBlock([], (draft + fresh[len(draft) :])[:room]))

    def _next_block(self, next_token: int, fresh: list[int]) -> list[int]:
        """The draft of the block that becomes real: its pseudo block with the known token in front, or fillers."""
        self._block_start = len(self.history)
        if not self.pseudo:
            return [next_token, *fresh[1:]][: self._length_at(self._block_start)]
        block = self.pseudo.pop(0)
        return [next_token, *(block.accepted + block.draft)[1:]]

    def _with_candidates(self, draft: list[int]) -> list[list[int]]:
        """`draft`, and what followed its first token in sequences of the pool, newest first; nothing twice."""
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
