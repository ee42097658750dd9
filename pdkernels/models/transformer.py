"""One lean decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU; Qwen2 and Llama are instances.

It knows our caches and nothing of decoding: a forward appends the new tokens' K and V behind the cached prefix and the
decoder decides how many of them become part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from pdkernels._validation import INDEX_DTYPES, check, check_index, check_type, fail, message
from pdkernels.masks import TilePlan
from pdkernels.models.attention import Visibility, attend, cached_visibility, uncached_visibility
from pdkernels.models.rope import RopeStyle, Rotation, YarnScaling, rope_tables, rotate

if TYPE_CHECKING:
    from pdkernels.cache import ContiguousKVCache, PagedKVCache
    from pdkernels.models.tokenizers import Tokenizer

    Cache: TypeAlias = ContiguousKVCache | PagedKVCache


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and variants of a `Transformer`. `head_dim` does not have to be `hidden_size / heads`.

    >>> TransformerConfig(vocab_size=257, hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16,
    ...                   intermediate_size=96).group_size
    2
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_style: RopeStyle = "half"
    yarn: YarnScaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    tied_head: bool = True
    max_positions: int = 2048
    """Positions the model was trained for: a figure for users, not a limit that is enforced."""

    def __post_init__(self) -> None:
        op = "TransformerConfig"
        for name in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size",
                     "max_positions"):
            value = getattr(self, name)
            check_type(type(value) is int, op, name, "be an int", type(value).__name__)
            check(value >= 1, op, name, "be at least 1", value)
        check(self.heads % self.kv_heads == 0, op, "kv_heads", f"divide heads ({self.heads})", self.kv_heads)
        check(self.head_dim % 2 == 0, op, "head_dim", "be even (RoPE rotates pairs)", self.head_dim)
        check(self.rope_style in ("half", "interleaved"), op, "rope_style", "be 'half' or 'interleaved'",
              repr(self.rope_style))
        check(self.rope_theta > 0, op, "rope_theta", "be positive", self.rope_theta)
        check(self.norm_eps >= 0, op, "norm_eps", "not be negative", self.norm_eps)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm: statistics in fp32 (fp64 for fp64 input), cast to the dtype of `x`, then the weight."""
    return F.rms_norm(x, weight.shape, None, eps) * weight


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and a residual.

    Projections of the same input are one matrix. Its parameters stand here without modules around them, whose calls
    take a noticeable share of a small model's step.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.heads * config.head_dim
        qkv_width = width + 2 * config.kv_heads * config.head_dim
        self.attention_norm = nn.Parameter(torch.empty(hidden))
        self.qkv = nn.Parameter(torch.empty(qkv_width, hidden))
        self.register_parameter("qkv_bias", nn.Parameter(torch.empty(qkv_width)) if config.qkv_bias else None)
        self.output = nn.Parameter(torch.empty(hidden, width))
        self.mlp_norm = nn.Parameter(torch.empty(hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * config.intermediate_size, hidden))
        self.down = nn.Parameter(torch.empty(hidden, config.intermediate_size))

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        visibility: Visibility,
        index: int,
        cache: Cache | None,
        counts: torch.Tensor | None,
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads = config.heads, config.kv_heads
        qkv = F.linear(rms_norm(x, self.attention_norm, config.norm_eps), self.qkv, self.qkv_bias)
        qkv = qkv.view(*x.shape[:2], heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv.split((heads + kv_heads, kv_heads), -2)
        q, k = rotate(qk, rotation, config.rope_style).split((heads, kv_heads), -2)
        if rotation.query_scale is not None:
            q = q * rotation.query_scale.to(q.dtype)
        if cache is not None:
            cache.append_(index, k, v, counts)
            k, v = cache.layer(index, visibility.keys)
        x = x + F.linear(attend(q, k, v, visibility).flatten(-2), self.output)
        gate, up = F.linear(rms_norm(x, self.mlp_norm, config.norm_eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Transformer(nn.Module):
    """A decoder-only language model on our KV caches.

    `tokenizer` (or None) turns text into ids and back; `end_tokens` are the ids that end a text. Parameters may be
    fp64, fp32, bf16 or fp16 (`model.to(dtype)`); in fp64 everything is fp64, norm statistics and RoPE included.

    >>> config = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=8,
    ...                            intermediate_size=24)
    >>> model = Transformer(config).requires_grad_(False)
    >>> tokens = torch.tensor([[1, 2, 3, 4]])
    >>> logits = model(tokens)
    >>> logits.shape
    torch.Size([1, 4, 11])
    >>> cache = model.new_cache(batch=1, capacity=8)
    >>> first = model(tokens[:, :3], cache=cache)
    >>> cache.commit_(torch.tensor([3]))
    >>> last = model(tokens[:, 3:], cache=cache)
    >>> torch.allclose(torch.cat((first, last), 1), logits, atol=1e-5)
    True
    """

    def __init__(
        self, config: TransformerConfig, *, tokenizer: Tokenizer | None = None, end_tokens: Sequence[int] = ()
    ) -> None:
        super().__init__()
        check_type(isinstance(config, TransformerConfig), "Transformer", "config", "be a TransformerConfig",
                   type(config).__name__)
        for token in end_tokens:
            check(0 <= token < config.vocab_size, "Transformer", "end_tokens",
                  f"be ids below vocab_size ({config.vocab_size})", token)
        self.config = config
        self.tokenizer = tokenizer
        self.end_tokens = tuple(end_tokens)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        head = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.register_parameter("head", head)
        # RoPE tables are no buffers: they follow neither `.to(dtype)` (bf16 models rotate in fp32) nor the state dict.
        self._tables: dict[tuple[torch.device, torch.dtype], Rotation] = {}
        self.initialize_()

    @torch.no_grad()
    def initialize_(self) -> None:
        """Random weights: N(0, 0.02^2), and less into the residual stream the more layers add to it."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("output", "down"))
                parameter.normal_(std=0.02 / math.sqrt(2 * self.config.layers) if deep else 0.02)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        kind: Literal["contiguous", "paged"] = "contiguous",
        page_size: int = 16,
    ) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, in the model's dtype and on its device.

        A paged one has pages for all of them, but hands none out before `cache.reserve_`.
        """
        from pdkernels.cache import ContiguousKVCache, PagedKVCache

        op, config = "Transformer.new_cache", self.config
        check(kind in ("contiguous", "paged"), op, "kind", "be 'contiguous' or 'paged'", repr(kind))
        if kind == "contiguous":
            return ContiguousKVCache(config.layers, batch, capacity, config.kv_heads, config.head_dim,
                                     dtype=self.dtype, device=self.device)
        check(page_size >= 1, op, "page_size", "be at least 1", page_size)
        pages = -(-capacity // page_size)
        return PagedKVCache(config.layers, batch, batch * pages, page_size, config.kv_heads, config.head_dim,
                            max_pages_per_sequence=pages, dtype=self.dtype, device=self.device)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        cache: Cache | None = None,
        counts: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | TilePlan | None = None,
        rows: torch.Tensor | Sequence[int] | slice | None = None,
    ) -> torch.Tensor:
        """Logits `(batch, T, vocab_size)` of `tokens` `(batch, T)`, int32 or int64.

        Without a cache: a full forward, causal or under `mask` (bool, True = visible, `(T, T)` or `(batch, T, T)`; or the
        `TilePlan` of a mask, which is never made dense), at `positions` (`(T,)` or `(batch, T)`; default 0..T-1).

        With a cache: row i of sequence b stands at position `cache.lengths[b] + i`, its K and V are appended there, and
        it sees the whole prefix and the rows up to itself. Lengths do not change: `cache.commit_` says which rows stay.
        `counts` `(batch,)` int32 or int64: only the rows i < counts[b] count; the others are padding, which is not
        stored and whose logits mean nothing.

        `rows`: compute logits only for these of the T rows, `(batch, len(rows), vocab_size)`: row indices for all
        sequences (ints, a slice, or a `(R,)` tensor) or for each of them (a `(batch, R)` tensor).

        Raises ValueError for shapes and values, TypeError for dtypes. On CUDA nothing waits for the device, unless
        `rows` are ints, which have to be copied there. Compiled code does not look at values: there `positions` must lie
        below `max_positions` or T, and `rows` below T.
        """
        self._validate(tokens, cache, counts, positions, mask)
        if cache is None:
            return self._run(tokens, uncached_visibility(tokens.shape[1], mask),
                             self._uncached_rotation(tokens, positions), None, None, rows)
        # The cache keeps no graph, so neither does a forward on it.
        with torch.no_grad():
            visibility, rotation = self._on_cache(tokens.shape[1], cache, counts)
            return self._run(tokens, visibility, rotation, cache, counts, rows)

    def _run(
        self,
        tokens: torch.Tensor,
        visibility: Visibility,
        rotation: Rotation,
        cache: Cache | None,
        counts: torch.Tensor | None,
        rows: torch.Tensor | Sequence[int] | slice | None,
    ) -> torch.Tensor:
        try:
            x = F.embedding(tokens, self.embedding)
        except IndexError:
            expectation = f"hold ids in [0, {self.config.vocab_size})"
            actual = f"{int(tokens.min())}..{int(tokens.max())}"
            raise ValueError(message("Transformer", "tokens", expectation, actual)) from None
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, visibility, index, cache, counts)
        if rows is not None:
            x = _select_rows(x, rows)
        head = self.embedding if self.head is None else self.head
        return F.linear(rms_norm(x, self.norm, self.config.norm_eps), head)

    def _validate(
        self,
        tokens: torch.Tensor,
        cache: Cache | None,
        counts: torch.Tensor | None,
        positions: torch.Tensor | None,
        mask: torch.Tensor | TilePlan | None,
    ) -> None:
        op = "Transformer"
        check(tokens.dim() == 2, op, "tokens", "have shape (batch, length)", tuple(tokens.shape))
        check_type(tokens.dtype in INDEX_DTYPES, op, "tokens", "be int64 or int32", tokens.dtype)
        check(tokens.device == self.device, op, "tokens", f"be on the model's device ({self.device})", tokens.device)
        batch, length = tokens.shape
        if cache is None:
            check(counts is None, op, "counts", "be None without a cache", "a tensor", "Pass a cache too.")
            if positions is not None:
                if positions.shape not in ((length,), (batch, length)):
                    fail(op, "positions", f"have shape ({length},) or ({batch}, {length})", tuple(positions.shape))
                check_type(positions.dtype in INDEX_DTYPES, op, "positions", "be int64 or int32", positions.dtype)
            if isinstance(mask, TilePlan):
                if (mask.q_len, mask.kv_len) != (length, length):
                    fail(op, "mask", f"be a plan of {length} x {length} tokens", f"{mask.q_len} x {mask.kv_len}")
                if mask.batch not in (None, batch):
                    fail(op, "mask", f"be one plan, or {batch} stacked ones", f"{mask.batch} stacked ones")
                if mask.device != self.device:
                    fail(op, "mask", f"be on the model's device ({self.device})", mask.device)
            elif mask is not None:
                check_type(isinstance(mask, torch.Tensor), op, "mask", "be a bool tensor or a TilePlan",
                           type(mask).__name__, "A segment mask has both: mask.dense() and mask.plan().")
                if mask.shape not in ((length, length), (batch, length, length)):
                    fail(op, "mask", f"have shape ({length}, {length}) or ({batch}, {length}, {length})",
                         tuple(mask.shape))
                check_type(mask.dtype == torch.bool, op, "mask", "be bool (True = visible)", mask.dtype)
            return
        for name, value in (("positions", positions), ("mask", mask)):
            check(value is None, op, name, "be None with a cache", "a plan" if isinstance(value, TilePlan) else "a tensor",
                  "Cached rows stand behind the prefix and are causal.")
        check(cache.batch == batch, op, "tokens", f"have the batch size of the cache ({cache.batch})", batch)
        if counts is not None:
            check_index(op, "counts", counts, (batch,), cache.lengths.device)

    def _rope(self, limit: int) -> Rotation:
        """The table of at least `limit` positions; it grows by doubling and is shared by all forwards."""
        config = self.config
        key = (self.device, torch.float64 if self.dtype == torch.float64 else torch.float32)
        table = self._tables.get(key)
        if table is None or len(table.cos) < limit:
            size = max(1 << max(limit - 1, 0).bit_length(), min(config.max_positions, 4096))
            # Not an inference tensor, even if made during inference: training may use it later.
            with torch.inference_mode(False), torch.no_grad():
                table = rope_tables(size, config.head_dim, theta=config.rope_theta, style=config.rope_style,
                                    yarn=config.yarn, dtype=key[1], device=key[0])
            self._tables[key] = table
        return table

    def _uncached_rotation(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> Rotation:
        length = tokens.shape[1]
        if positions is None:
            return self._rope(length).span(0, length)
        limit = max(self.config.max_positions, length)
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            low, high = (int(value) for value in positions.aminmax())
            check(low >= 0, "Transformer", "positions", "not be negative", low)
            limit = high + 1
        return self._rope(limit).at(positions)

    def _on_cache(self, rows: int, cache: Cache, counts: torch.Tensor | None) -> tuple[Visibility, Rotation]:
        """What the new rows see, and the rotation of their positions. The host reads lengths only on the CPU."""
        lengths = host_counts = None
        if cache.lengths.device.type == "cpu":
            lengths = cache.lengths.tolist()
            host_counts = None if counts is None else counts.tolist()
        visibility = cached_visibility(cache, lengths, host_counts, rows)
        # Padding rows may stand behind the capacity, never behind capacity + rows.
        table = self._rope(cache.capacity + rows)
        if lengths is not None and lengths.count(lengths[0]) == len(lengths):
            return visibility, table.span(lengths[0], rows)
        return visibility, table.at(cache.lengths[:, None] + torch.arange(rows, device=cache.lengths.device))


def _select_rows(x: torch.Tensor, rows: torch.Tensor | Sequence[int] | slice) -> torch.Tensor:
    if isinstance(rows, slice):
        return x[:, rows]
    op, (batch, length, _) = "Transformer", x.shape
    if not isinstance(rows, torch.Tensor):
        for row in rows:
            check(-length <= row < length, op, "rows", f"lie in [{-length}, {length})", row)
        rows = torch.tensor([row % length for row in rows], dtype=torch.int64, device=x.device)
        return x.index_select(1, rows)
    check_type(rows.dtype in INDEX_DTYPES, op, "rows", "be int64 or int32", rows.dtype)
    if rows.device.type == "cpu" and rows.numel() and not torch.compiler.is_compiling():
        low, high = (int(value) for value in rows.aminmax())
        check(low >= 0 and high < length, op, "rows", f"lie in [0, {length})", f"{low}..{high}")
    if rows.dim() == 1:
        return x.index_select(1, rows)
    check(rows.dim() == 2 and rows.shape[0] == batch, op, "rows", f"have shape (R,) or ({batch}, R)", tuple(rows.shape))
    return x.gather(1, rows.long()[..., None].expand(-1, -1, x.shape[-1]))
