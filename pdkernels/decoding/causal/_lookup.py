"""Prompt-lookup drafts: the tokens that followed earlier occurrences of a text's last tokens.

The search is a few elementwise operations over each sequence's own tokens, so it needs no host, can be captured in a graph with the
rest of a step, and gives the same result alone and in a batch. A step reads `REACH` + 3 times the 8 bytes of every position;
attention reads far more of each (46 kB in SmolLM2-135M). The plain form is reference/jacobi_lookup.py.
"""

from __future__ import annotations

import torch

REACH = 5  # maximum number of tokens compared
LEAST = 2  # a match of one token is too weak
GROWTH = 3  # tokens drafted per matching token
POOL = 4  # rejected tails kept

_NOTHING, _MISSING = -1, -2  # no token here; nothing to compare with


class Lookup:
    """The searched tokens of `batch` sequences: the last `POOL` rejected tails, then `text` ``(batch, width)``, written by its
    owner.

    >>> found = Lookup(batch=1, width=9, slots=5, device=torch.device("cpu"))
    >>> found.text[0, :5] = torch.tensor([1, 2, 3, 1, 2])
    >>> found.draft(torch.tensor([5]))
    (tensor([[3, 1, 2, 3]]), tensor([4]))
    """

    def __init__(self, batch: int, width: int, slots: int, device: torch.device) -> None:
        gap = slots + 1  # an entry and at least one _NOTHING after it, which stops every match and draft
        self._start = REACH - 1 + POOL * gap
        self.tokens = torch.full((batch, self._start + width), _NOTHING, dtype=torch.int64, device=device)
        self._pool = self.tokens[:, REACH - 1 : self._start].unflatten(1, (POOL, gap))
        self.text = self.tokens[:, self._start :]
        self._after = torch.arange(REACH, self.tokens.shape[1], device=device)  # index after each possible match
        self._slot = torch.arange(slots - 1, device=device)
        self._last = torch.arange(-REACH, 0, device=device)
        self.nothing = self.tokens.new_full((batch, slots), _NOTHING)

    def clear(self) -> None:
        """Forgets everything."""
        self.tokens.fill_(_NOTHING)

    def keep(self, tails: torch.Tensor, kept: torch.Tensor) -> None:
        """Puts `tails` ``(batch, slots)``, -1 where they are shorter, into the pools of the sequences for which `kept` ``(batch,)``."""
        newest = torch.nn.functional.pad(tails, (0, 1), value=_NOTHING)[:, None]
        self._pool.copy_(torch.where(kept[:, None, None], torch.cat([self._pool[:, 1:], newest], 1), self._pool))

    def draft(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts after the first `lengths` ``(batch,)`` tokens of each text: ``(batch, slots - 1)`` ids, and how many count.

        The longest match of the last tokens wins, then the text over the pool, then the newer match. A draft that reaches the end
        of the text continues with itself, so that a repeating text is drafted at full length.
        """
        ends = self._start + lengths[:, None]
        source = ends + self._last
        last = self.tokens.gather(1, source).masked_fill(source < self._start, _MISSING)
        starts = len(self._after)
        matched = torch.zeros_like(self.tokens[:, :starts], dtype=torch.int32)
        for token in range(REACH):  # oldest first, so that the run left over ends at the last token
            matched = (matched + 1) * (self.tokens[:, token : token + starts] == last[:, token : token + 1])
        # Something must follow, within the text.
        matched = matched * ((self.tokens[:, REACH:] != _NOTHING) & (self._after < ends))
        size = self.tokens.shape[1]
        best = (matched * size + self._after).amax(1, keepdim=True)
        length, after = best // size, best % size

        followed = self.tokens.gather(1, after + self._slot % (ends - after).clamp(min=1))
        there = (followed != _NOTHING).long().cumprod(1).sum(1)
        grown = torch.where(length < REACH, GROWTH * length, len(self._slot)) * (length >= LEAST)
        return followed.clamp(min=0), torch.minimum(there, grown[:, 0])
