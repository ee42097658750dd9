"""The fakes of tests/reference/tri_mode.py behind the interface of `Transformer`, cache included, and what their tests share.

A cache row holds a token id (K) and its position (V), so that a wrong commit gives wrong tokens. Every forward builds the
whole input of the uncached model again out of what the cache holds.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.decoding import generate
from pdkernels.masks import TilePlan
from pdkernels.models.transformer import Transformer, TransformerConfig
from pdkernels.reference.sampling import law, without
from tests.reference.tri_mode import MASK, Call, Recorded


class Cached:
    """`fake` on a cache. With `adapter` it is told which rows are adapted."""

    tokenizer = None

    def __init__(self, fake: Recorded, size: int, adapter: bool = False) -> None:
        self.fake, self.has_adapter = fake, adapter
        self.config = SimpleNamespace(vocab_size=size)
        self.mask_token, self.end_tokens = size - 1, ()
        self.head_rows: list[int] = []  # rows of each call of the head
        self.cache: Any = None

    def new_cache(self, batch: int, capacity: int, *, kind: str = "contiguous", page_size: int = 16) -> Any:
        if kind == "contiguous":
            self.cache = ContiguousKVCache(1, batch, capacity, 1, 1)
        else:
            pages = -(-capacity // page_size)
            self.cache = PagedKVCache(1, batch, batch * pages, page_size, 1, 1, max_pages_per_sequence=pages)
        return self.cache

    def __call__(self, tokens: Tensor, *, rows: Any = None, **options: Any) -> Tensor:
        out = self.hidden(tokens, **options)
        if isinstance(rows, slice):
            out = out[:, rows]
        elif rows is not None:
            out = out.gather(1, rows[..., None].expand(-1, -1, out.shape[-1]))
        return self.logits(out)

    def logits(self, hidden: Tensor) -> Tensor:
        self.head_rows.append(hidden.shape[1])
        return hidden.clone()

    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: Any,
        counts: Tensor | None = None,
        mask: TilePlan | Tensor | None = None,
        positions: Tensor | None = None,
        adapted: bool | Tensor = False,
    ) -> Tensor:
        batch, width = tokens.shape
        assert self.has_adapter or adapted is False
        lengths = cache.lengths.tolist()
        valid = [width] * batch if counts is None else counts.tolist()
        tail = torch.ones(width, width, dtype=torch.bool).tril() if mask is None else mask
        tail = (tail.dense() if isinstance(tail, TilePlan) else tail).expand(batch, width, width)
        places = (torch.arange(width) if positions is None else positions).expand(batch, width) + cache.lengths[:, None]
        gate = torch.full((), adapted).expand(batch, width) if isinstance(adapted, bool) else adapted.expand(batch, width)
        k, v = cache.layer(0, max(lengths))
        out = torch.full((batch, width, self.config.vocab_size), torch.nan, dtype=torch.float64)
        for b, length in enumerate(lengths):
            assert v[b, :length].flatten().tolist() == list(range(length)), "a cache row stands in the wrong place"
            end = width if mask is not None else valid[b]
            visible = torch.ones(length + end, length + end, dtype=torch.bool).tril()
            visible[length:, length:] = tail[b, :end, :end]
            ids = [int(token) for token in k[b, :length].flatten().tolist()] + tokens[b, :end].tolist()
            rows = torch.cat([torch.zeros(length, dtype=torch.bool), gate[b, :end]])
            call = Call(ids, [*range(length), *places[b, :end].tolist()], visible, rows if self.has_adapter else None)
            out[b, :end] = self.fake.logits(call)[length:]
        cache.append_(0, tokens[..., None, None].float(), places[..., None, None].float(), counts)
        return out


def lowest_confidence() -> float:
    """Of a `ScriptedTriMode`: the model's least sure guess, the mask token ruled out."""
    row = torch.zeros(1, MASK + 1, dtype=torch.float64)
    row[0, 0] = 2.0
    return float(law(without(row, MASK), 1.0)[0, 0])


def small_transformer(seed: int, size: int = 13, adapter: bool = False) -> Transformer:
    """Random fp64 weights, large enough that tokens depend on the whole context; the last id is the mask."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        vocab_size=size, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=24
    )
    model = Transformer(config, mask_token=size - 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    if adapter:
        model.attach_adapter_([(torch.randn(3, 32), torch.randn(16, 3)) for _ in range(2)], scale=0.5)
    return model.requires_grad_(False)


def plain(model: Transformer) -> Any:
    """The interface of the reference decoders."""
    return lambda tokens, positions, mask: model(tokens, positions=positions, mask=mask)


def drafter(model: Transformer) -> Any:
    """The same with the adapter; None for a model without."""
    if not model.has_adapter:
        return None
    return lambda tokens, positions, mask, adapted: model(tokens, positions=positions, mask=mask, adapted=adapted)


class KeepsCache:
    """Remembers the cache that a generation made."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        return self.model(*arguments, **options)

    def new_cache(self, *arguments: Any, **options: Any) -> Any:
        self.cache = self.model.new_cache(*arguments, **options)
        return self.cache


def assert_cache_is_causal(model: Transformer, cache: Any, sequences: list[list[int]]) -> None:
    """K and V of every committed token are those that a causal forward computes."""
    for index, sequence in enumerate(sequences):
        length = int(cache.lengths[index])
        assert length >= 1
        fresh = model.new_cache(1, length)
        model(torch.tensor([sequence[:length]]), cache=fresh)
        for layer in range(model.config.layers):
            for actual, expected in zip(cache.layer(layer, length), fresh.layer(layer, length), strict=True):
                torch.testing.assert_close(actual[index], expected[0], rtol=1e-10, atol=1e-10)


def reads_of_the_device(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> int:
    """How often a decoding loop brings something to the host while it generates."""
    reads = 0
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        plain_form = getattr(torch.Tensor, name)

        def counted(self: Tensor, *rest: Any, _form: Any = plain_form, **more: Any) -> Any:
            nonlocal reads
            reads += "pdkernels/decoding" in sys._getframe(1).f_code.co_filename
            return _form(self, *rest, **more)

        monkeypatch.setattr(torch.Tensor, name, counted)
    generate(*arguments, **options)
    return reads
