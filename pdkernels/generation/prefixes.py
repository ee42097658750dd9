"""What each row of a forward sees: the tokens of its own prefix, those of the prompt and generated ones told apart.

A row of a draft comes after the draft tokens before it, a candidate after its own branch, a position of a canvas beside
all that is filled. Filters that depend on tokens (`_filters.py`) read them from here, so a draft is verified with the
distributions that `autoregressive` has after the same tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FEW = 64  # more new tokens than this are counted over the vocabulary; fewer are compared with each other


class Seen(NamedTuple):
    """What a grammar needs to know of `Prefixes`, on the host."""

    text: list[list[int]]
    filled: list[list[bool]]
    """Of canvases alone."""
    prompts: list[int]
    """The number of tokens of each prompt."""
    length: list[int]
    tokens: list[list[int]]
    visible: list[list[list[bool]]]
    new: list[bool]
    number: list[list[int]]
    guessing: list[list[bool]]
    sequences: list[int]


class Prefixes(NamedTuple):
    """The prefixes of the rows of a forward, ``(batch, R)`` rows after a text of their sequence.

    All tensors are on the device; `generated_ids` and `ids` read them. Rows of padding, and of sequences that are done,
    have some prefix.
    """

    text: Tensor
    """``(batch, S)`` int64: the tokens that all rows of a sequence see, in their order."""
    filled: Tensor
    """``(batch, S)`` bool: which of `text` are tokens; not masks, and nothing after the end."""
    generated: Tensor
    """``(batch, S)`` bool: which of these are not the prompt's."""
    length: Tensor
    """``(batch,)`` int64: the text is ``text[:length]``."""
    tokens: Tensor
    """``(batch, T)`` int64: the new tokens of the forward."""
    visible: Tensor
    """``(batch, R, T)`` bool: which of them a row sees, its own included."""
    new: Tensor
    """``(batch,)`` bool: whether the new tokens are generated ones; not so in the forward over the prompts."""
    number: Tensor
    """``(batch, R)`` int64: how many tokens are generated before the position that a row predicts."""
    guessing: Tensor
    """``(batch, R)`` bool: rows of a mask, which predict its own position: guesses of a draft, or for a block."""
    vocabulary: int
    mask_token: int | None
    sequences: Tensor | None = None
    """``(batch,)`` int64: numbers of the sequences, if they are not all of the batch."""
    seen: Seen | None = None

    def read(self) -> Prefixes:
        """With `seen`. The host waits here, so this comes before a forward: then what it computes from them overlaps
        with the forward on a GPU."""
        batch, new = self.tokens.shape
        numbers = list(range(batch)) if self.sequences is None else self.sequences.tolist()
        seen = Seen(
            self.text.tolist(),
            self.filled.tolist() if new == 0 else [],
            (~self.generated).sum(1).tolist(),
            self.length.tolist(),
            self.tokens.tolist(),
            self.visible.tolist(),
            self.new.tolist(),
            self.number.tolist(),
            self.guessing.tolist(),
            numbers,
        )
        return self._replace(seen=seen)

    def counted(self) -> tuple[Tensor, Tensor | None]:
        """`counts` and `recent` of `LogitFilters`: those of the texts, ``(batch, V)``, and of the new tokens that each
        row sees, ``(batch, R, T)``. If they are many, all is in the counts, ``(batch, R, V)``."""
        ids = self.text.clamp(0, self.vocabulary - 1)
        # The last column is for what does not count.
        table = ids.new_zeros(len(ids), self.vocabulary + 1, dtype=torch.int32)
        table.scatter_add_(1, ids, (self.filled & self.generated).int())
        prompt = self.filled & (table.gather(1, ids) == 0)
        table.scatter_(1, ids.masked_fill(~prompt, self.vocabulary), -1)
        tokens, visible = self.tokens.clamp(0, self.vocabulary - 1), self.visible
        if self.mask_token is not None:
            visible = visible & (self.tokens != self.mask_token)[:, None]
        if tokens.shape[1] <= _FEW:
            entries = torch.where(self.new[:, None], tokens, -2 - tokens)[:, None]
            recent = torch.where(visible, entries, -1) if tokens.shape[1] else None
            return table[:, : self.vocabulary], recent
        rows = table[:, None].repeat(1, visible.shape[1], 1)
        ids = tokens[:, None].expand_as(visible)
        new = visible & self.new[:, None, None]
        of_prompt = new & (rows.gather(2, ids) < 0)  # until now
        rows.scatter_(2, ids.masked_fill(~of_prompt, self.vocabulary), 0)
        rows.scatter_add_(2, ids.masked_fill(~new, self.vocabulary), new.int())
        prompt = visible & (rows.gather(2, ids) == 0)
        rows.scatter_(2, ids.masked_fill(~prompt, self.vocabulary), -1)
        return rows[..., : self.vocabulary], None

    def tail(self, count: int) -> Tensor:
        """The last `count` tokens of each prefix, -1 before its first one: int64 ``(batch, R, count)``."""
        tokens, visible, text = self.tokens, self.visible, self.text
        rank = visible.long().cumsum(-1)
        # `place` counts from the first new token: the text comes before it.
        place = visible.sum(-1)[..., None] - torch.arange(count, 0, -1, device=tokens.device)
        index = (rank[:, :, None] == place[..., None] + 1).int().argmax(-1)
        there = self.length[:, None, None] + place
        before = _rows_of(text, there.clamp(0, text.shape[1] - 1)).masked_fill(there < 0, -1)
        return torch.where(place >= 0, _rows_of(tokens, index), before)

    def ids(self) -> list[list[list[int]]]:
        """The whole prefix of each row, for each sequence, on the host."""
        texts = [row[:end] for row, end in zip(self.text.tolist(), self.length.tolist(), strict=True)]
        return [
            [text + [token for token, seen in zip(new, sees, strict=True) if seen] for sees in rows]
            for text, new, rows in zip(texts, self.tokens.tolist(), self.visible.tolist(), strict=True)
        ]

    def generated_ids(self) -> list[list[list[int]]]:
        """The same without the prompt: what is generated before the token that a row predicts."""
        numbers = self.number.tolist()
        return [
            [ids[len(ids) - number :] if number else [] for ids, number in zip(rows, counts, strict=True)]
            for rows, counts in zip(self.ids(), numbers, strict=True)
        ]


def _rows_of(values: Tensor, index: Tensor) -> Tensor:
    """`values` ``(batch, T)`` at ``(batch, R, n)``."""
    return values.gather(1, index.flatten(1)).view_as(index)
