"""DFlash heads: a drafter that fills a whole block of masks in one forward, on keys and values made from its target's
hidden states.

Source: "DFlash" (arXiv 2602.06036). Row i of the context is the features of the target's row i, projected to K and V in
every layer; it is no row of the residual. The block holds the known token and masks. Its rows see the whole context and
each other; in a layer with a window of w the last w rows of the context, and of the block, unless the head says
otherwise, what comes before them (speculators, models/dflash/attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from pdkernels._validation import check, check_flag, check_type, message
from pdkernels.cache import Cache
from pdkernels.masks import TilePlan, causal, full
from pdkernels.models.architectures.attention import Seen, Visibility, rotated
from pdkernels.models.architectures.caches import expect_
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.fused import linear, rms_norm
from pdkernels.models.architectures.layer import Layer, Matrix
from pdkernels.models.architectures.taps import checked_taps
from pdkernels.models.architectures.whole_step import run_layers
from pdkernels.models.architectures.windows import Window
from pdkernels.models.drafters.head import DrafterConfig, DrafterHead
from pdkernels.models.drafters.rows import new_rows, rotation_at, tables_of

_OP = "models.DFlashConfig"


@dataclass(frozen=True)
class DFlashConfig(DrafterConfig):
    """Sizes and variants of a `DFlashHead`."""

    body: TransformerConfig
    """Of its layers. `vocab_size` and `hidden_size` are those of the target."""
    taps: tuple[int, ...]
    """Layers of the target whose inputs it reads (`Transformer.tapped`)."""
    block_size: int
    """Rows of its forward: the known token and masks."""
    mask_token: int
    draft_vocab_size: int
    """Tokens that it can draft."""
    sample_from_anchor: bool = False
    """Whether a row predicts the token after its own; otherwise a mask predicts its own token, and the known token
    nothing."""
    own_embedding: bool = False
    """False: tokens have the target's embedding."""
    own_head: bool = True
    """False: rows are multiplied by the target's head."""
    whole_blocks: bool = False
    """Whether rows see their whole block in layers with a window too; otherwise they see it up to themselves there. Of
    the context they see the last rows, as many as `body.windows` says for the layer."""

    def __post_init__(self) -> None:
        body = self.body
        check_type(isinstance(body, TransformerConfig), _OP, "body", "be a TransformerConfig", type(body).__name__)
        checked_taps(_OP, self.taps, 2**20)
        for name in ("block_size", "mask_token", "draft_vocab_size"):
            value = getattr(self, name)
            check_type(type(value) is int, _OP, name, "be an int", type(value).__name__)
        for name in ("sample_from_anchor", "own_embedding", "own_head", "whole_blocks"):
            check_flag(_OP, name, getattr(self, name))
        chunked = [window for window in body.windows if window is not None and window.chunked]
        check(not chunked, _OP, "body.windows", "slide", chunked)
        size, drafted = body.vocab_size, self.draft_vocab_size
        check(2 <= self.block_size <= 256, _OP, "block_size", "be in 2 .. 256", self.block_size)
        check(0 <= self.mask_token < size, _OP, "mask_token", f"be in 0 .. {size - 1}", self.mask_token)
        check(1 <= drafted <= size, _OP, "draft_vocab_size", f"be in 1 .. {size}", drafted)
        check(self.own_head or drafted == size, _OP, "own_head", "be True where fewer tokens are drafted", False)

    @property
    def first(self) -> int:
        """The first row of a block that guesses."""
        return 0 if self.sample_from_anchor else 1


class DFlashHead(DrafterHead):
    """A drafter for the method "dflash". Row i of its cache is made from the target's row i.

    Attributes:
        vocabulary: ``(draft_vocab_size,)`` int64, the target's id of each token that it can draft.

    >>> body = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=24)
    >>> head = DFlashHead(DFlashConfig(body, taps=(1, 2), block_size=4, mask_token=10, draft_vocab_size=5)).requires_grad_(False)
    >>> cache = head.new_cache(batch=1, capacity=8)
    >>> head.read(head.fused(torch.randn(1, 3, 2, 16)), cache=cache)
    >>> cache.commit_(torch.tensor([3]))
    >>> hidden = head(torch.randn(1, 4, 16), cache=cache)
    >>> head.logits(hidden).shape
    torch.Size([1, 4, 5])
    """

    method = "dflash"
    """The decoding method that it is for."""
    in_order = False
    """Whether a guess depends on those before it (`walk`)."""
    whole_rows = False
    """Whether `walk` reads all rows of a block, however few guesses are wanted."""
    head: Matrix | None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        body = config.body
        width = body.hidden_size
        embedding = nn.Parameter(torch.empty(body.vocab_size, width)) if config.own_embedding else None
        self.register_parameter("embedding", embedding)
        self.fc: Matrix = nn.Parameter(torch.empty(width, len(config.taps) * width))
        self.hidden_norm = nn.Parameter(torch.empty(width))
        self.layers = nn.ModuleList(self.new_layer() for _ in range(body.layers))
        self.norm = nn.Parameter(torch.empty(width))
        head = nn.Parameter(torch.empty(config.draft_vocab_size, width)) if config.own_head else None
        self.register_parameter("head", head)
        self.register_buffer("vocabulary", torch.arange(config.draft_vocab_size))
        self.tables = tables_of(body)
        if not self.norm.is_meta:
            self.initialize_()

    def new_layer(self) -> Layer:
        return Layer(self.config.body)

    def fused(self, features: Tensor) -> Tensor:
        """What it reads of the target's `features` ``(batch, T, taps, hidden_size)``: ``(batch, T, hidden_size)``."""
        return rms_norm(linear(features.flatten(-2), self.fc), self.hidden_norm, self.config.body.norm_eps)

    @property
    def cached_windows(self) -> Sequence[Window | None]:
        # All rows of a block see as many rows of the context as the window has.
        return [None if window is None else Window(window.size + 1) for window in self.config.body.windows]

    @torch.no_grad()
    def read(self, hidden: Tensor, *, cache: Cache, counts: Tensor | None = None) -> None:
        """Stores K and V of the `fused` features ``(batch, T, hidden_size)`` after the committed rows; `commit_` then
        keeps them.

        Only the first `counts` ``(batch,)`` rows of each sequence are stored.
        """
        body, rows = self.config.body, hidden.shape[1]
        expect_(cache, rows, counts)
        positions = cache.lengths[:, None] + torch.arange(rows, device=cache.lengths.device)
        rotation = rotation_at(self.tables, hidden, cache.capacity + rows, positions)
        for index, layer in enumerate(self.layers):
            k, v = cast(Layer, layer).project(hidden)[:, :, body.heads :].split(body.kv_heads, 2)
            cache.append_(index, rotated(k.contiguous(), rotation, body.rope_style), v.contiguous(), counts)

    @torch.no_grad()
    def forward(self, embedded: Tensor, *, cache: Cache) -> Tensor:
        """The rows ``(batch, T, hidden_size)`` of a block after the committed ones, for `logits`. They are not to be
        committed.

        Args:
            embedded: ``(batch, T, hidden_size)``, the embeddings of the known token and of masks.
            cache: of `new_cache`, with the rows that it has `read`.
        """
        body, count = self.config.body, embedded.shape[1]
        rows = new_rows(body, self.tables, embedded, count, cache, mask=_whole(count, embedded.device))
        if any(body.windows):
            rows = rows._replace(seen=self._seen(rows.visibility, count, cache))
        results = run_layers(self, embedded, rows, 0, body.layers)
        return self.run(embedded, rows.attend_) if results is None else results[0]

    def _seen(self, visibility: Visibility, count: int, cache: Cache) -> tuple[Seen, ...]:
        """What rows see in each layer: all rows of a block begin with the same row of the context."""
        seen = []
        for window in self.config.body.windows:
            if window is None:
                seen.append(Seen(visibility))
                continue
            begin = (cache.lengths - window.size).clamp(min=0)[:, None]
            plan = _whole(count, cache.device) if self.config.whole_blocks else _up_to_itself(count, cache.device)
            if isinstance(visibility.mask, TilePlan):
                seen.append(Seen(Visibility(plan), begin))
                continue
            cached = torch.arange(visibility.prefix, device=cache.device)
            context = (cached >= begin) & (cached < cache.lengths[:, None])
            columns = [context[:, None].expand(-1, count, -1), plan.dense().expand(len(begin), -1, -1)]
            seen.append(Seen(visibility._replace(mask=torch.cat(columns, -1)[:, None])))
        return tuple(seen)

    def run(self, embedded: Tensor, attend_: Callable[..., Tensor]) -> Tensor:
        """A forward whose attention is ``attend_(qkv, layer=index)``."""
        x: Tensor = embedded
        added: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, added = layer(x, added, partial(attend_, layer=index), None)
        assert added is not None
        return x + added

    def logits(self, hidden: Tensor, head: Any = None) -> Tensor:
        """``(..., draft_vocab_size)`` of rows of a forward. `head`: the target's matrix, for a drafter without its
        own."""
        return self.scores(self.normed(hidden), head)

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows of a forward after the last norm."""
        return rms_norm(hidden, self.norm, self.config.body.norm_eps)

    def scores(self, normed: Tensor, head: Any = None) -> Tensor:
        """`logits` of rows after the last norm."""
        matrix = head if self.head is None else self.head
        assert matrix is not None
        return linear(normed, cast(Matrix, matrix))

    def walk(self, hidden: Tensor, known: Tensor, head: Any = None, before: Tensor | None = None) -> Walk:
        """What gives the logits of a block's guesses one after the other, for a drafter whose guesses are `in_order`.

        Args:
            hidden: ``(batch, rows, hidden_size)``, the first rows of a forward.
            known: ``(batch, 1)`` int64, the known token.
            head: as for `logits`.
            before: ``(batch, 1)`` int64, the token before the known one; None: the known one.
        """
        raise NotImplementedError(message(type(self).__name__, "in_order", "be True", self.in_order, "Use `logits`."))


class Walk(Protocol):
    """The guesses of a block in their order: the logits ``(batch, 1, draft_vocab_size)`` of guess `number`, from 0 on,
    after the token `previous` ``(batch, 1)``, an id of the target's."""

    def __call__(self, number: int, previous: Tensor) -> Tensor: ...


@lru_cache(None)
def _whole(rows: int, device: torch.device) -> TilePlan:
    """Kept, because a drafter has one size of blocks, and a graph may have captured it."""
    return full(rows).plan(64, 64, device)


@lru_cache(None)
def _up_to_itself(rows: int, device: torch.device) -> TilePlan:
    return causal(rows).plan(64, 64, device)
