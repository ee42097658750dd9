"""Drafts that are looked up: what followed a text's last tokens when they occurred before.

The search is a few elementwise operations over each sequence's own tokens, so it needs no host, is captured in a graph with the
rest of a step, and finds the same alone and in a batch. A step reads `REACH` + 3 times the 8 bytes of every position; attention
reads far more of each (46 kB in SmolLM2-135M). The plain form is reference/jacobi_lookup.py.
"""

from __future__ import annotations

import torch

REACH = 5  # tokens compared at most
LEAST = 2  # a match of one token says too little
GROWTH = 3  # tokens drafted for each token that matches
POOL = 4  # rejected tails kept

_NOTHING, _MISSING = -1, -2  # no token here; none to compare with


class Lookup:
    """What is searched for each of `batch` sequences: the last `POOL` rejected tails, then `text` ``(batch, width)``, which its owner writes.

    >>> found = Lookup(batch=1, width=9, slots=5, device=torch.device("cpu"))
    >>> found.text[0, :5] = torch.tensor([1, 2, 3, 1, 2])
    >>> found.draft(torch.tensor([5]))
    (tensor([[3, 1, 2, 3]]), tensor([4]))
    """

    def __init__(self, batch: int, width: int, slots: int, device: torch.device) -> None:
        gap = slots + 1  # an entry and at least one _NOTHING after it, which no match and no draft passes
        self._start = REACH - 1 + POOL * gap
        self._tokens = torch.full((batch, self._start + width), _NOTHING, dtype=torch.int64, device=device)
        self._pool = self._tokens[:, REACH - 1 : self._start].unflatten(1, (POOL, gap))
        self.text = self._tokens[:, self._start :]
        self._after = torch.arange(REACH, self._tokens.shape[1], device=device)  # index after each place of a match
        self._slot = torch.arange(slots - 1, device=device)
        self._last = torch.arange(-REACH, 0, device=device)
        self.nothing = self._tokens.new_full((batch, slots), _NOTHING)

    def clear(self) -> None:
        """Forgets everything."""
        self._tokens.fill_(_NOTHING)

    def keep(self, tails: torch.Tensor, kept: torch.Tensor) -> None:
        """Puts `tails` ``(batch, slots)``, -1 where they are shorter, into the pools of the sequences for which `kept` ``(batch,)``."""
        newest = torch.nn.functional.pad(tails, (0, 1), value=_NOTHING)[:, None]
        self._pool.copy_(torch.where(kept[:, None, None], torch.cat([self._pool[:, 1:], newest], 1), self._pool))

    def draft(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What to try after the first `lengths` ``(batch,)`` tokens of each text: ``(batch, slots - 1)`` ids, and how many count.

        The longest match of the last tokens counts, then the text before the pool, then what is newer. What followed in the text
        may run into the text's own end; it then goes on with what has been drafted, so that a loop is drafted at full length.
        """
        ends = self._start + lengths[:, None]
        source = ends + self._last
        last = self._tokens.gather(1, source).masked_fill(source < self._start, _MISSING)
        places = len(self._after)
        matched = torch.zeros_like(self._tokens[:, :places], dtype=torch.int32)
        for token in range(REACH):  # from the oldest on, so that what is left of a run ends at its place
            matched = (matched + 1) * (self._tokens[:, token : token + places] == last[:, token : token + 1])
        # Something has to follow, in the text before its end.
        matched = matched * ((self._tokens[:, REACH:] != _NOTHING) & (self._after < ends))
        size = self._tokens.shape[1]
        best = (matched * size + self._after).amax(1, keepdim=True)
        length, after = best // size, best % size

        followed = self._tokens.gather(1, after + self._slot % (ends - after).clamp(min=1))
        there = (followed != _NOTHING).long().cumprod(1).sum(1)
        grown = torch.where(length < REACH, GROWTH * length, len(self._slot)) * (length >= LEAST)
        return followed.clamp(min=0), torch.minimum(there, grown[:, 0])
