"""The filters of every method on a KV cache: a wrapper of the model, whose logits are filtered row by row.

A row is filtered for the tokens that it attends to, so it has the same distribution in a forward per token, in a
verified draft, and in a batch. The tokens of cached rows are kept next to their K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels.generation.cache_rows import CacheRows
from pdkernels.generation.filters import Filters
from pdkernels.generation.prefixes import Prefixes
from pdkernels.models.architectures.taps import Tapped


class TextCache:
    """A cache that also keeps the tokens of its rows, `text` ``(batch, capacity + 1)``, in the slots of their K and V,
    and the lengths of the prompts, `prompts` ``(batch,)``: what an empty cache commits first."""

    def __init__(self, cache: Any, batch: int, capacity: int) -> None:
        self.inner = cache
        self.text = torch.zeros(batch, capacity + 1, dtype=torch.int64, device=cache.lengths.device)
        self.prompts = torch.zeros(batch, dtype=torch.int64, device=cache.lengths.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def another(self) -> Callable[[int, int], TextCache] | None:
        """As that of a `WindowedCache`; None: the cache is another one."""
        make = getattr(self.inner, "another", None)
        return None if make is None else lambda batch, capacity: TextCache(make(batch, capacity), batch, capacity)

    def slots(self, lengths: Tensor, rows: int) -> Tensor:
        """The slots of new rows, ``(batch, rows)``; rows past the capacity are padding, in the last slot."""
        after = lengths[:, None] + torch.arange(rows, device=lengths.device)
        return after.clamp(max=self.text.shape[1] - 1)

    def commit_(self, counts: Tensor, source_index: Tensor | None = None) -> None:
        """Like `commit_` of the cache, and moves the tokens with their rows."""
        lengths = self.inner.lengths
        self.prompts.copy_(torch.where(lengths == 0, counts, self.prompts))
        if source_index is None:  # an argument that caches of most methods need not have
            self.inner.commit_(counts)
        else:
            chosen = self.text.gather(1, self.slots(self.inner.lengths, 1) + source_index.clamp(min=0))
            slots = self.slots(self.inner.lengths, source_index.shape[1])
            committed = torch.arange(source_index.shape[1], device=counts.device) < counts[:, None]
            self.text.scatter_(1, slots, torch.where(committed, chosen, self.text.gather(1, slots)))
            self.inner.commit_(counts, source_index)

    def copy_row_(self, row: int, other: TextCache, other_row: int, length: int) -> None:
        """Like `copy_row_` of the cache, including the tokens."""
        self.inner.copy_row_(row, other.inner, other_row, length)
        self.text[row, :length] = other.text[other_row, :length]
        self.prompts[row] = other.prompts[other_row]

    def move_row_(self, row: int, other: TextCache, other_row: int, length: int) -> None:
        """Like `move_row_` of a paged cache, including the tokens."""
        self.inner.move_row_(row, other.inner, other_row, length)
        self.text[row, :length] = other.text[other_row, :length]
        self.prompts[row] = other.prompts[other_row]

    def tell_(self, row: int, tokens: Sequence[int], prompt: int) -> None:
        """Says what the first rows of a sequence are, whose prompt has `prompt` tokens."""
        self.text[row, : len(tokens)] = torch.tensor(tokens, device=self.text.device)
        self.prompts[row] = prompt


class FilteredModel:
    """A wrapper that a decoder uses as the model. Its hidden rows are logits, so that each is filtered where it is
    computed.

    The cost is that the head runs on every row of a forward, and all logits are in memory at once.
    """

    packs_rows = False  # filters are for rows of a batch

    def __init__(self, model: Any, filters: Filters) -> None:
        self.model, self.filters = model, filters
        self.keeps_plain = False
        self.plain: Tensor | None = None
        """The logits of the last forward before the filters, if `keeps_plain`."""
        self._rows: Tensor = torch.empty(0)  # the tokens of the last prelude

    @property
    def model_itself(self) -> Any:
        """The model that is wrapped."""
        return getattr(self.model, "model_itself", self.model)

    def __getattr__(self, name: str) -> Any:
        if name == "statistics":  # they are taken of logits
            raise AttributeError(name)
        return getattr(self.model, name)

    def new_cache(self, batch: int, capacity: int, **options: Any) -> TextCache:
        return TextCache(self.model.new_cache(batch, capacity, **options), batch, capacity)

    def __call__(self, tokens: Tensor, *, cache: Any, rows: Tensor | None = None, **options: Any) -> Tensor:
        inner, prefixes = self._begin(tokens, cache, options, rows)
        return self._filtered(self.model(tokens, cache=inner, rows=rows, **options), prefixes)

    def hidden(self, tokens: Tensor, *, cache: Any, **options: Any) -> Tensor:
        inner, prefixes = self._begin(tokens, cache, options, None)
        return self._filtered(self.model.logits(self.model.hidden(tokens, cache=inner, **options)), prefixes)

    def tapped(self, tokens: Tensor, taps: Sequence[int], *, cache: Any, **options: Any) -> Tapped:
        inner, prefixes = self._begin(tokens, cache, options, None)
        hidden, features = self.model.tapped(tokens, taps, cache=inner, **options)
        return Tapped(self._filtered(self.model.logits(hidden), prefixes), features)

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
        _, prefixes = self._begin(self._rows, self._cache, {}, rows)
        chosen = () if rows is None else (rows,)
        return self._filtered(self.model.coda(state, context, *chosen), prefixes)

    def _filtered(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        if self.keeps_plain:
            self.plain = logits
        return self.filters.apply(logits, prefixes)

    def _begin(self, tokens: Tensor, cache: Any, options: dict[str, Any], rows: Tensor | None) -> tuple[Any, Prefixes]:
        """The cache for the model, and what the rows see; notes the tokens of the new rows."""
        base, lengths, length = cache, cache.lengths, tokens.shape[1]
        index = None
        if isinstance(cache, CacheRows):
            base, index = cache.whole, cache.index
        texts = base.text if index is None else base.text.index_select(0, index)
        prompts = base.prompts if index is None else base.prompts.index_select(0, index)
        config, mask_token = self.model.config, getattr(self.model, "mask_token", None)
        slots = base.slots(lengths, length)
        tokens = tokens.to(torch.int64)
        # What is written after the lengths counts from its commit on, if it comes to that.
        texts.scatter_(1, slots, tokens)
        if index is not None:
            base.text.index_copy_(0, index, texts)
        mask, offsets = options.get("mask"), options.get("positions")
        if mask is None:
            visible = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        else:
            visible = mask.dense()
        visible = visible.expand(len(tokens), -1, -1)
        place = torch.arange(length, device=tokens.device) if offsets is None else offsets
        place = lengths[:, None] + place
        guessing = torch.zeros_like(tokens, dtype=torch.bool) if mask_token is None else tokens == mask_token
        if rows is not None:
            visible = visible.gather(1, rows[..., None].expand(-1, -1, length))
            place, guessing = place.gather(1, rows), guessing.gather(1, rows)
        slot = torch.arange(texts.shape[1], device=tokens.device)
        # Where a prompt runs in pieces, those after the first one are not generated either.
        cached, new = slot < lengths[:, None], (lengths > 0) & (lengths >= prompts)
        number = (place + 1 - guessing.long() - prompts[:, None]).clamp(min=0).masked_fill(~new[:, None], 0)
        prefixes = Prefixes(
            texts,
            cached if mask_token is None else cached & (texts != mask_token),
            slot >= prompts[:, None],
            lengths,
            tokens,
            visible,
            new,
            number,
            guessing,
            config.vocab_size,
            mask_token,
            index,
        )
        if self.filters.allowed is not None:
            prefixes = prefixes.read()
        return cache if index is not None else cache.inner, prefixes
