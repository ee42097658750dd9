"""The repetition penalty of every method on a KV cache: a wrapper of the model, whose logits are penalised.

A row is penalised for the tokens that it attends to, so it has the same distribution in a forward per token, in a verified draft,
and in a batch. The tokens of cached rows are kept next to their K and V. The plain form is reference/repetition.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check, check_fits_float, check_type
from pdkernels.decoding._cache_rows import CacheRows


def checked_penalty(op: str, penalty: float) -> float:
    check_type(type(penalty) in (int, float), op, "repetition_penalty", "be a number", type(penalty).__name__)
    check(0 < penalty < float("inf"), op, "repetition_penalty", "be finite and above 0", penalty)
    check_fits_float(op, "repetition_penalty", penalty)
    return float(penalty)


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """`logits` ``(..., V)`` with the tokens of `seen`, bool of the same shape, less likely by `penalty`; at least float32.

    >>> penalised(torch.tensor([2.0, -2.0, 1.0]), torch.tensor([True, True, False]), 2.0)
    tensor([ 1., -4.,  1.])
    """
    # Rounded to 16 bits again, penalised logits would tie with nearby ones.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def tokens_seen(tokens: Tensor, visible: Tensor, vocabulary: int, mask_token: int | None) -> Tensor:
    """Which ids are among those of `tokens` ``(batch, T)`` that a row sees, ``(batch, R, T)``: bool ``(batch, R, V)``; no mask is."""
    if mask_token is not None:
        visible = visible & (tokens != mask_token)[:, None]
    batch, rows, _ = visible.shape
    seen = torch.zeros(batch, rows, vocabulary, dtype=torch.uint8, device=tokens.device)
    index = tokens.clamp(0, vocabulary - 1)[:, None].expand_as(visible)
    return seen.scatter_reduce_(2, index, visible.to(torch.uint8), "amax").bool()


class TextCache:
    """A cache that also keeps the tokens of its rows, `text` ``(batch, capacity + 1)``, in the slots of their K and V."""

    def __init__(self, cache: Any, batch: int, capacity: int) -> None:
        self.inner = cache
        self.text = torch.zeros(batch, capacity + 1, dtype=torch.int64, device=cache.lengths.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def slots(self, lengths: Tensor, rows: int) -> Tensor:
        """The slots of new rows, ``(batch, rows)``; rows past the capacity are padding, in the last slot."""
        after = lengths[:, None] + torch.arange(rows, device=lengths.device)
        return after.clamp(max=self.text.shape[1] - 1)

    def commit_(self, counts: Tensor, source_index: Tensor | None = None) -> None:
        """Like `commit_` of the cache, and moves the tokens with their rows."""
        if source_index is None:  # an argument that caches of most methods need not have
            self.inner.commit_(counts)
        else:
            chosen = self.text.gather(1, self.slots(self.inner.lengths, 1) + source_index.clamp(min=0))
            slots = self.slots(self.inner.lengths, source_index.shape[1])
            kept = torch.arange(source_index.shape[1], device=counts.device) < counts[:, None]
            self.text.scatter_(1, slots, torch.where(kept, chosen, self.text.gather(1, slots)))
            self.inner.commit_(counts, source_index)

    def copy_row_(self, row: int, other: TextCache, other_row: int, length: int) -> None:
        """Like `copy_row_` of the cache, including the tokens."""
        self.inner.copy_row_(row, other.inner, other_row, length)
        self.text[row, :length] = other.text[other_row, :length]


class PenalisedModel:
    """A wrapper that a decoder uses as the model. Its hidden rows are logits, so that each is penalised where it is computed.

    The cost is that the head runs on every row of a forward, and all logits are in memory at once.
    """

    def __init__(self, model: Any, penalty: float) -> None:
        self.model, self._penalty = model, penalty
        self._rows: Tensor = torch.empty(0)  # the tokens of the last prelude

    def __getattr__(self, name: str) -> Any:
        if name == "statistics":  # they are taken of logits
            raise AttributeError(name)
        return getattr(self.model, name)

    def new_cache(self, batch: int, capacity: int, **options: Any) -> TextCache:
        return TextCache(self.model.new_cache(batch, capacity, **options), batch, capacity)

    def __call__(self, tokens: Tensor, *, cache: Any, rows: Tensor | None = None, **options: Any) -> Tensor:
        inner, seen = self._begin(tokens, cache, options.get("mask"), rows)
        return penalised(self.model(tokens, cache=inner, rows=rows, **options), seen, self._penalty)

    def hidden(self, tokens: Tensor, *, cache: Any, **options: Any) -> Tensor:
        inner, seen = self._begin(tokens, cache, options.get("mask"), None)
        return penalised(self.model.logits(self.model.hidden(tokens, cache=inner, **options)), seen, self._penalty)

    def logits(self, hidden: Tensor) -> Tensor:
        """A copy of the hidden rows, which are logits already, because the caller may write to them."""
        return hidden.clone()

    def prelude(self, tokens: Tensor, context: Any) -> Tensor:
        self._rows = tokens
        embedding: Tensor = self.model.prelude(tokens, context)
        return embedding

    def context(self, rows: int, cache: Any = None, counts: Tensor | None = None) -> Any:
        self._cache = cache
        return self.model.context(rows, cache.inner, counts)

    def coda(self, state: Tensor, context: Any, rows: Tensor | None = None) -> Tensor:
        _, seen = self._begin(self._rows, self._cache, None, rows)
        chosen = () if rows is None else (rows,)
        return penalised(self.model.coda(state, context, *chosen), seen, self._penalty)

    def _begin(self, tokens: Tensor, cache: Any, mask: Any, rows: Tensor | None) -> tuple[Any, Tensor]:
        """The cache for the model, and the ids that the rows see ``(batch, R, V)``; notes the tokens of the new rows."""
        whole, lengths, length = cache, cache.lengths, tokens.shape[1]
        index = None
        if isinstance(cache, CacheRows):
            whole, index = cache.whole, cache.index
        texts = whole.text if index is None else whole.text.index_select(0, index)
        config, mask_token = self.model.config, getattr(self.model, "mask_token", None)
        slots = whole.slots(lengths, length)
        known = torch.arange(texts.shape[1], device=tokens.device) < lengths[:, None]
        before = tokens_seen(texts, known[:, None], config.vocab_size, mask_token)
        # What is written after the lengths counts from its commit on, if it comes to that.
        texts.scatter_(1, slots, tokens.to(torch.int64))
        if index is not None:
            whole.text.index_copy_(0, index, texts)
        if mask is None:
            visible = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        else:
            visible = mask.dense()
        visible = visible.expand(len(tokens), -1, -1)
        if rows is not None:
            visible = visible.gather(1, rows[..., None].expand(-1, -1, length))
        own = tokens_seen(tokens.to(torch.int64), visible, config.vocab_size, mask_token)
        return cache if index is not None else cache.inner, before | own


def penalised_rows(logits: Tensor, texts: Sequence[Tensor], mask_token: int, penalty: float) -> Tensor:
    """Logits ``(batch, R, V)`` of rows that see a whole canvas ``(batch, L)``; `texts` are those of the parts of the batch."""
    parts = [
        tokens_seen(text, torch.ones_like(text[:, None], dtype=torch.bool), logits.shape[-1], mask_token)
        for text in texts
    ]
    return penalised(logits, torch.cat(parts).expand(-1, logits.shape[1], -1), penalty)
