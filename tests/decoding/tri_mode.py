"""The fakes of tests/reference/tri_mode.py behind the interface of `Transformer`, cache included, and what their tests share.

A cache row holds a token id (K) and its position (V), so that a wrong commit gives wrong tokens. Every forward builds the
whole input of the uncached model again out of what the cache holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.decoding import DecodeResult, generate
from pdkernels.masks import TilePlan
from pdkernels.models.transformer import Transformer, TransformerConfig
from pdkernels.reference.sampling import distribution, without
from tests.decoding.fake_models import SCRIPTS
from tests.reference.tri_mode import MASK, SKILLS, Call, Recorded, ScriptedTriMode

seeds = st.integers(0, 2**64 - 1)
page_sizes = st.sampled_from([None, None, 1, 3, 16])


def prompts(size: int) -> st.SearchStrategy[list[list[int]]]:
    """A batch, without the mask token."""
    return st.lists(st.lists(st.integers(0, size - 2), min_size=1, max_size=6), min_size=1, max_size=3)


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
        gate = (
            torch.full((), adapted).expand(batch, width) if isinstance(adapted, bool) else adapted.expand(batch, width)
        )
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
    return float(distribution(without(row, MASK), 1.0)[0, 0])


def small_transformer(seed: int, size: int = 13, adapter: bool = False, head_dim: int = 8) -> Transformer:
    """Random fp64 weights, large enough that tokens depend on the whole context; the last id is the mask."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        vocab_size=size, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=head_dim, intermediate_size=24
    )
    model = Transformer(config, mask_token=size - 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    if adapter:
        model.attach_adapter_([(torch.randn(3, 4 * head_dim), torch.randn(16, 3)) for _ in range(2)], scale=0.5)
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


# ---- what all methods promise


def assert_same(
    result: DecodeResult,
    expected: list[Any],
    lockstep: bool,
    accepted: Callable[[Any], int] = lambda step: step.accepted,
) -> None:
    """A batch is what the reference gives for each of its sequences.

    With `lockstep` all take part in the same forwards; else the number of passes depends on the model, and they wait for each
    other. `accepted` is the count that a step of the reference's trace stands for.
    """
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    stats = result.stats
    assert stats.accepted == [[accepted(step) for step in one.trace] for one in expected]
    assert [[tuple(step) for step in steps] for steps in stats.trace] == [
        [tuple(step) for step in one.trace] for one in expected
    ]
    forwards = [one.forwards for one in expected]
    assert stats.forwards == max(forwards) if lockstep else max(forwards) <= stats.forwards <= sum(forwards)
    if sum(forwards):
        assert stats.tokens_per_forward == stats.tokens / sum(forwards)


def assert_alone_as_in_a_batch(batch: list[list[int]], method: str, **options: Any) -> None:
    model = small_transformer(1)
    options |= {"temperature": 0.7, "trace": True}
    together = generate(model, batch, method, **options)
    for index, prompt in enumerate(batch):
        alone = generate(model, prompt, method, **options)
        assert torch.equal(alone.tokens, together.tokens[index])
        assert alone.stats.accepted[0] == together.stats.accepted[index]
        assert alone.stats.trace[0] == together.stats.trace[index]


def assert_shorter_is_the_beginning(limit: int, more: int, method: str, **options: Any) -> None:
    model = small_transformer(2)
    short, long = (
        generate(model, [1, 2], method, max_new_tokens=n, seed=3, **options).tokens for n in (limit, limit + more)
    )
    assert len(short) == limit and torch.equal(short, long[:limit])


def assert_streaming_tells_drafts_apart(method: str) -> None:
    """Every token is heard once."""
    heard: list[list[int]] = [[], []]
    drafts = [0, 0]

    def listen(sequence: int, ids: list[int], accepted: int) -> None:
        assert 0 <= len(ids) - accepted <= 1  # at most one token a step is the verifier's own
        heard[sequence] += ids
        drafts[sequence] += accepted

    model = Cached(ScriptedTriMode(SCRIPTS["sticky"], SKILLS["patchy"]), MASK + 1)
    result = generate(model, [[1, 2], [5]], method, max_new_tokens=30, on_tokens=listen)
    assert heard == [tokens.tolist() for tokens in result.tokens]
    assert drafts == [sum(accepted) - len(accepted) for accepted in result.stats.accepted] and min(drafts) > 0


def assert_end_tokens_of_the_model(method: str) -> None:
    """They are the default."""
    model = Cached(ScriptedTriMode(SCRIPTS["position"]), MASK + 1)
    model.end_tokens = (4,)
    stopped = generate(model, [3], method, max_new_tokens=40).tokens.tolist()
    assert stopped[-1] == 4 and 4 not in stopped[:-1] and len(stopped) < 40
    assert len(generate(model, [3], method, max_new_tokens=40, end_tokens=()).tokens) == 40
