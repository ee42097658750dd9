"""Jacobi decoding of several blocks at once, with rejected drafts retried as candidates.

Source: "Jacobi Forcing" (arXiv 2512.14681), section 4 and algorithm 1 of its appendix A.

One block is real-active: tokens that the model confirms there are committed. The blocks after it are pseudo-active: they take
part in the same forward, conditioned on the unverified blocks before them, and are confirmed provisionally (accepted tokens
are kept, the first one without a test). When the real block is complete, the next one becomes real: it keeps its tokens as a
draft after the known next token, and every token is verified again. So the result is that of autoregressive decoding.

Rejection recycling: a forward that leaves the real block unfinished puts two sequences into a pool: all blocks as they
are, and the rejected tail of the real one. If an entry contains the next token, what follows it there becomes a candidate
for the real block. Candidates are branches of one forward: each sees the history and itself (and has its own copy of the
pseudo blocks after it); the branch with the most accepted tokens wins, the first on ties.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .autoregressive import Model
from .jacobi import accepted_length, fillers
from .masks import candidates as branch_mask
from .philox import random_words
from .sampling import OWN, draw
from .sampling import predictions as own_tokens


class PseudoBlock(NamedTuple):
    """Together the lists are the block, which only shifts: nothing refills it."""

    accepted: list[int]
    draft: list[int]

    def verified(self, answers: list[int]) -> PseudoBlock:
        """The block after a forward; `answers` are the model's own next tokens after each draft token."""
        if not self.draft:
            return self
        count = accepted_length(self.draft, answers, ())
        return PseudoBlock(self.accepted + self.draft[:count], answers[count - 1 : -1])


class MultiblockStep(NamedTuple):
    rows: list[list[int]]  # the real block's draft, then the candidates
    pseudo: list[PseudoBlock]  # after each of the rows
    row: int  # the row that won
    predictions: list[int]  # the model's own next token after each token of that row
    accepted: int  # how much of that row was committed


class JacobiMultiblockResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int  # the prompt's forward counts
    trace: list[MultiblockStep]  # every forward but the prompt's


def branch_predictions(
    model: Model, history: Sequence[int], branches: Sequence[Sequence[int]], temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """The model's own next tokens along each of the equally long `branches` after `history`, masked from each other: one
    forward."""
    start, count, length = len(history), len(branches), len(branches[0])
    tail, relative = branch_mask(count, length)
    mask = torch.ones(start + count * length, start + count * length, dtype=torch.bool).tril()
    mask[start:, start:] = tail
    positions = torch.cat([torch.arange(start), start + relative])
    ids = torch.tensor([[*history, *(token for branch in branches for token in branch)]])
    logits = model(ids, positions[None], mask)[0, start:]
    own = draw(logits, (positions[start:] + 1).tolist(), temperature, seed, OWN)
    return [own[first : first + length] for first in range(0, count * length, length)]


def continuation(entry: Sequence[int], draft: Sequence[int]) -> list[int] | None:
    """`entry` from the first occurrence of ``draft[0]`` on, cut to the draft's length, completed with the end of the draft.

    >>> continuation([7, 4, 5, 4], [4, 1, 2, 3]), continuation([7, 5], [4, 1])
    ([4, 5, 4, 3], None)
    """
    if draft[0] not in entry:
        return None
    found_at = entry.index(draft[0])
    found = list(entry[found_at : found_at + len(draft)])
    return found + list(draft[len(found) :])


def recycled(pool: Iterable[Sequence[int]], draft: Sequence[int], maximum: int) -> list[list[int]]:
    """At most `maximum` candidates for `draft`, the newest entry's first; no duplicates, and not the draft itself.

    >>> recycled([[4, 5], [4, 1, 2], [9, 4, 6]], [4, 1, 2], maximum=3)
    [[4, 6, 2], [4, 5, 2]]
    """
    rows: list[list[int]] = []
    for entry in reversed(list(pool)):
        row = continuation(entry, draft)
        if row is not None and row != draft and row not in rows:
            rows.append(row)
    return rows[:maximum]


def jacobi_multiblock(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    block_size: int = 8,
    blocks: int = 2,
    spawn_ratio: float = 0.85,
    pool_size: int = 4,
    verification_size: int = 4,
    end_tokens: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> JacobiMultiblockResult:
    """Decodes with up to `blocks` active blocks; with one block and one row this is :func:`.jacobi.jacobi` itself.

    Where paper and published code differ: the code ends its call with the first block and discards the promoted one;
    here it is continued (as in the paper's figure 3), and the pool with it. The newest block is the one that spawns
    (code; "some block" in the paper), and the pool also takes whole sequences (code; only rejected tails in algorithm 1).
    Unlike in the code, pseudo blocks follow the winning row and not the first one, fillers replace pad tokens, a single
    candidate is used, a duplicate is not, and candidates are also searched at the start of a block.

    Args:
        model: callable ``(tokens (1, T), positions (1, T), mask (T, T) bool) -> logits (1, T, V)``.
        prompt: token ids, at least one.
        max_new_tokens: stop after exactly this many new tokens, or earlier after an end token.
        block_size: tokens per block; the last block is limited by `max_new_tokens`.
        blocks: K, the maximum number of active blocks, including the real one.
        spawn_ratio: a block opens the next one when ``ceil(spawn_ratio * block_size)`` of its tokens are accepted.
        pool_size: sequences that are kept, the oldest dropped first; 0 for no recycling.
        verification_size: the maximum number of rows per forward, including the draft; 1 for no recycling.
        end_tokens: stop after one of these; it is kept as the last token.
        temperature: of sampling; 0 is greedy.
        seed: of sampling, and of the fillers (jacobi.py), which affect only the number of forwards.

    >>> chain = lambda tokens, positions, mask: torch.eye(9, dtype=torch.float64)[(positions + 1) % 9]
    >>> jacobi_multiblock(chain, [0, 1], 7, block_size=4)[:2]
    ([2, 3, 4, 5, 6, 7, 8], 4)
    """
    prompt, limit = list(prompt), max_new_tokens
    if limit == 0:
        return JacobiMultiblockResult([], 0, [])

    # The last requested token is never verified by its own forward: blocks divide the limit - 1 before it.
    def length_at(block_start: int) -> int:
        return min(block_size, limit - 1 - block_start)

    draft = _first_draft(model, prompt, max(1, length_at(0)), seed, temperature)
    candidates: list[list[int]] = []
    pseudo: list[PseudoBlock] = []
    pool: deque[list[int]] = deque(maxlen=pool_size)
    block_start = 0
    committed: list[int] = []
    trace: list[MultiblockStep] = []

    while True:
        if draft[0] in end_tokens or len(committed) + 1 == limit:
            return JacobiMultiblockResult([*committed, draft[0]], 1 + len(trace), trace)

        history = prompt + committed
        rows = [draft, *candidates]
        row, predictions, answers = _forward(model, history, rows, pseudo, temperature, seed)
        accepted = accepted_length(rows[row], predictions, end_tokens)
        trace.append(MultiblockStep(rows, pseudo, row, predictions, accepted))
        committed = committed + rows[row][:accepted]
        if committed[-1] in end_tokens:
            return JacobiMultiblockResult(committed, 1 + len(trace), trace)
        pseudo = [block.verified(own) for block, own in zip(pseudo, answers[row])]
        next_token = predictions[accepted - 1]
        draft = predictions[accepted - 1 : -1]  # empty if the block is complete
        rejected = predictions[accepted:-1]
        if draft:
            pool.append(
                committed[block_start:] + draft + [token for block in pseudo for token in block.accepted + block.draft]
            )

        fresh = _fresh(seed, len(trace), block_size, history)
        newest = len(pseudo[-1].accepted) if pseudo else len(committed) - block_start
        block_length = length_at(block_start + block_size * (1 + len(pseudo)))
        if newest >= math.ceil(spawn_ratio * block_size) and 1 + len(pseudo) < blocks and block_length > 0:
            pseudo.append(PseudoBlock([], (draft + fresh[len(draft) :])[:block_length]))
        if not draft:
            block_start = len(committed)
            if pseudo:
                block = pseudo.pop(0)
                draft = [next_token, *(block.accepted + block.draft)[1:]]
            else:
                draft = [next_token, *fresh[1:]][: max(1, length_at(block_start))]

        # The draft itself is the tail that this forward rejected, so the pool is searched before it is added.
        candidates = recycled(pool, draft, verification_size - 1)
        if rejected:
            pool.append(rejected)


def _first_draft(model: Model, prompt: list[int], length: int, seed: int, temperature: float = 0.0) -> list[int]:
    """From the prompt's forward: the exact first token, then guesses based on fillers."""
    return own_tokens(model, prompt + _fresh(seed, 0, length - 1, prompt), temperature, seed)[len(prompt) - 1 :]


def _fresh(seed: int, step: int, slots: int, history: Sequence[int]) -> list[int]:
    """The fillers of `step` (jacobi.py)."""
    return fillers(random_words(seed, torch.tensor(step), torch.tensor(0), torch.arange(slots)).tolist(), history)


def _forward(
    model: Model,
    history: Sequence[int],
    rows: list[list[int]],
    pseudo: list[PseudoBlock],
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[int, list[int], list[list[list[int]]]]:
    """The winning row, the predictions along it, and for each row the predictions along the draft of each pseudo block."""
    after = [token for block in pseudo for token in block.accepted + block.draft]
    predictions = branch_predictions(model, history, [row + after for row in rows], temperature, seed)
    answers: list[list[list[int]]] = []
    for row, own in zip(rows, predictions):
        start, of_row = len(row), []
        for block in pseudo:
            start += len(block.accepted)
            of_row.append(own[start : start + len(block.draft)])
            start += len(block.draft)
        answers.append(of_row)
    along = [prediction[: len(row)] for row, prediction in zip(rows, predictions)]
    lengths = [accepted_length(row, prediction, ()) if row else 0 for row, prediction in zip(rows, along)]
    winner = lengths.index(max(lengths))
    return winner, along[winner], answers
