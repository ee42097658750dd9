"""The training step of planned diffusion on one text, token by token: the mask, the targets, and the loss.

A text is a list of tokens with tables; nothing is packed, and a text whose earlier rounds are to be clean is run once for
each round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Logits = Callable[[Tensor, Tensor], Tensor]
"""(T,) ids and a (T, T) bool mask, True where a row sees a column, to (T, vocab) logits."""


class Text(NamedTuple):
    """A text of T tokens."""

    tokens: list[int]
    chunk: list[int]
    """0 outside chunks, else the number of the chunk, from 1; its tags belong to it."""
    round: list[int]
    """The round, from 0; a sync belongs to the round after it."""
    tag: list[bool]
    """Whether it is the first or the last token of a chunk."""
    prompt: int
    """Length of the prompt."""


def visible(text: Text, sparse: bool, causal: bool = False) -> Tensor:
    """(T, T) bool, the closed form over the tables, for texts whose rounds all end with a sync, except the last. Causal chunks are
    sparse ones that are written token by token."""
    chunk, number = text.chunk, text.round
    everything = range(len(text.tokens))

    def sees(q: int, k: int) -> bool:
        if chunk[k] == 0:
            return k <= q
        if number[k] < number[q]:
            return True
        if causal and k > q:
            return False
        return chunk[q] > 0 and (chunk[k] == chunk[q] if sparse or causal else number[k] == number[q])

    return torch.tensor([[sees(q, k) for k in everything] for q in everything])


def plan_labels(text: Text) -> dict[int, int]:
    """For the rows outside chunks, from the last of the prompt on: the index of the next token outside chunks."""
    indices = [i for i, chunk in enumerate(text.chunk) if chunk == 0]
    return {row: target for row, target in zip(indices, indices[1:]) if row >= text.prompt - 1}


def chunk_labels(text: Text, masked: Sequence[bool], predicts: str) -> dict[int, int]:
    """For the rows that are trained on masked content: the index of the token that they predict."""
    shift = {"own": 0, "next": 1}[predicts]
    indices = [i for i, chunk in enumerate(text.chunk) if chunk > 0 and not text.tag[i] and masked[i]]
    return {target - shift: target for target in indices}


def loss(
    logits_of: Logits,
    text: Text,
    masked: Sequence[bool],
    p_mask: Sequence[float],
    mask_token: int,
    *,
    sparse: bool,
    predicts: str = "own",
    past: str = "noisy",
) -> tuple[Tensor, Tensor, int]:
    """Equation 10: the sums over plan rows and over masked tokens, the latter over p_mask, and the tokens of the response."""
    clean = torch.tensor(text.tokens)
    see = visible(text, sparse)
    noisy = torch.tensor([mask_token if hidden else token for token, hidden in zip(text.tokens, masked)])
    own = {row: target for row, target in chunk_labels(text, masked, predicts).items()}
    if past == "noisy":
        plan_logits = logits_of(noisy, see)
        chunk_logits = {number: plan_logits for number in set(text.round)}
    else:
        plan_logits = logits_of(clean, see)
        noisy_logits = logits_of(noisy, see)
        chunk_logits = {number: noisy_logits for number in set(text.round)}
    if past == "clean":
        for number in set(text.round):
            current = torch.tensor([r == number for r in text.round])
            chunk_logits[number] = logits_of(torch.where(current, noisy, clean), see)
    zero = plan_logits.new_zeros(())
    plans = sum((F.cross_entropy(plan_logits[row], clean[target]) for row, target in plan_labels(text).items()), zero)
    chunks = zero
    for row, target in own.items():
        chunks = chunks + F.cross_entropy(chunk_logits[text.round[target]][row], clean[target]) / p_mask[target]
    return plans, chunks, len(text.tokens) - text.prompt


def loss_in_turn(logits_of: Logits, text: Text, ends: Sequence[int]) -> tuple[Tensor, int]:
    """All of the text token by token (Pasta-SFT): the sum over the rows of plans and chunks, and the tokens of the response. A chunk is
    trained up to the first of the tokens `ends`: filler, or its closing tag."""
    clean = torch.tensor(text.tokens)
    logits = logits_of(clean, visible(text, True, causal=True))
    targets = plan_labels(text)
    for row, number in enumerate(text.chunk):
        opens = number > 0 and (row == 0 or text.chunk[row - 1] != number)
        while opens and text.tokens[row] not in ends:
            targets[row] = row + 1
            row += 1
    total = logits.new_zeros(())
    for row, target in targets.items():
        total = total + F.cross_entropy(logits[row], clean[target])
    return total, len(text.tokens) - text.prompt
