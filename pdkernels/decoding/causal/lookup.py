"""Prompt-lookup drafts: the tokens that followed earlier occurrences of a text's last tokens.

One op searches each sequence's own tokens, so a step needs no host, can be captured in a graph, and gives the same
result alone and in a batch. It reads 8 bytes of every position; attention reads far more of each (46 kB in
SmolLM2-135M). The plain form is reference/lookup_draft.py.
"""

from __future__ import annotations

import torch

from pdkernels.ops import lookup_draft_

REACH = 5  # maximum number of tokens compared
LEAST = 2  # a match of one token is too weak
GROWTH = 3  # tokens drafted per matching token
POOL = 4  # rejected tails kept

_NOTHING = -1  # no token here


class Lookup:
    """The searched tokens of `batch` sequences: the last `POOL` rejected tails, then `text` ``(batch, width)``, written
    by its owner.

    >>> found = Lookup(batch=1, width=9, slots=5, device=torch.device("cpu"))
    >>> found.text[0, :4] = torch.tensor([1, 2, 3, 1])
    >>> draft, rows = torch.tensor([[2, 0, 0, 0, 0]]), torch.tensor([5])
    >>> found.draft_(draft, rows, torch.tensor([4]))
    >>> draft, rows
    (tensor([[2, 3, 1, 2, 3]]), tensor([5]))
    """

    def __init__(self, batch: int, width: int, slots: int, device: torch.device) -> None:
        gap = slots + 1  # an entry and at least one _NOTHING after it, which stops every match and draft
        self._start = POOL * gap
        self.tokens = torch.full((batch, self._start + width), _NOTHING, dtype=torch.int64, device=device)
        self._pool = self.tokens[:, : self._start].unflatten(1, (POOL, gap))
        self.text = self.tokens[:, self._start :]
        self.nothing = self.tokens.new_full((batch, slots), _NOTHING)

    def clear(self) -> None:
        """Forgets everything."""
        self.tokens.fill_(_NOTHING)

    def keep(self, tails: torch.Tensor, rejected: torch.Tensor) -> None:
        """Puts `tails` ``(batch, slots)``, -1 where they are shorter, into the pools of the sequences with `rejected`
        ``(batch,)``."""
        newest = torch.nn.functional.pad(tails, (0, 1), value=_NOTHING)[:, None]
        self._pool.copy_(torch.where(rejected[:, None, None], torch.cat([self._pool[:, 1:], newest], 1), self._pool))

    def draft_(self, draft: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Fills `draft` ``(batch, slots)`` after its first token, which becomes that at `lengths` ``(batch,)`` of each
        text, as far as something was found. `rows` ``(batch,)``, the most tokens of each draft, become how many it has;
        0 marks a finished sequence.

        The longest match of the last tokens wins, then the text over the pool, then the newer match. A draft that
        reaches the end of the text continues with itself, so that a repeating text is drafted at full length.
        """
        ends = lengths + self._start
        lookup_draft_(
            draft, rows, self.tokens, ends, start=self._start, max_match=REACH, min_match=LEAST, growth=GROWTH
        )
