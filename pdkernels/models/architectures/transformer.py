"""A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and SwiGLU; Qwen2, Qwen3 and Llama are
instances.

A forward appends the K and V of new tokens after the cached prefix, and the decoder then decides how many of them
become part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from pdkernels._attention import takes_head_dim
from pdkernels._validation import INDEX_DTYPES, KERNEL_DTYPES, check, check_index, check_type, fail, message, sentence
from pdkernels.backends import backend_of
from pdkernels.cache import Cache, PagePool
from pdkernels.masks import TilePlan
from pdkernels.models.architectures import fused, packing, whole_step
from pdkernels.models.architectures.attention import (
    NewRows,
    Visibility,
    cached_visibility,
    check_mask,
    check_positions,
    check_tokens,
    seen_by_layer,
    uncached_visibility,
)
from pdkernels.models.architectures.caches import new_cache, new_pool
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.experts import ExpertLayer
from pdkernels.models.architectures.fused import linear, rms_norm
from pdkernels.models.architectures.layer import Layer, Matrix
from pdkernels.models.architectures.lora import AdaptedRows, LoraAdapter
from pdkernels.models.architectures.recompute import RecomputedRows, recomputed_rows
from pdkernels.models.architectures.rope import RopeTables, Rotation
from pdkernels.models.architectures.taps import Tapped, checked_taps
from pdkernels.models.plan_tokens import PlanTokens, checked_plan_tokens
from pdkernels.ops.linear_token_statistics import linear_token_statistics
from pdkernels.ops.token_statistics import TokenStatistics, token_statistics

if TYPE_CHECKING:
    from pdkernels.models.text.tokenizers import Tokenizer

__all__ = ["Transformer", "TransformerConfig", "select_rows"]


# What an instance may have replaced.
_PARTS = ("forward", "hidden", "embed", "logits", "_forward", "_look_up", "_rope", "_run", "_run_layers")


class Transformer(nn.Module):
    """A decoder-only language model on our KV caches.

    `tokenizer` (or None) turns text into ids and back; `end_tokens` are the ids that end a text; `mask_token` (or None)
    is the id of a masked position, for models that were trained to fill those in; `plan_tokens` (or None) are the
    control tokens of a model that plans its text. `adapters` are those of `pdkernels.models.load_adapter`, and `layout`
    (or None) says what they call the parameters. Parameters may be fp64, fp32, bf16 or fp16 (`model.to(dtype)`); in
    fp64 everything is fp64, norm statistics and RoPE included.

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

    head: Matrix | None
    matrices: tuple[str, ...] = packing.MATRICES
    """Those that `quantized` packs; a class that can be packed says so itself."""
    keeps_rows = True  # `recompute` does not change other rows of the cache
    cache_dtype: torch.dtype | None = None
    """Of the caches that `new_cache` makes; None: that of the model. With torch.int8 they hold rows of
    `pdkernels.kv_quantize`, with torch.float16 rows in half the bits of a float32 model."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        tokenizer: Tokenizer | None = None,
        end_tokens: Sequence[int] = (),
        mask_token: int | None = None,
        plan_tokens: PlanTokens | None = None,
    ) -> None:
        super().__init__()
        op = "Transformer"
        check_type(isinstance(config, TransformerConfig), op, "config", "be a TransformerConfig", type(config).__name__)
        vocabulary = f"below vocab_size ({config.vocab_size})"
        for token in end_tokens:
            check(0 <= token < config.vocab_size, op, "end_tokens", f"be ids {vocabulary}", token)
        valid = mask_token is None or 0 <= mask_token < config.vocab_size
        check(valid, op, "mask_token", f"be an id {vocabulary}", mask_token)
        self.config = config
        self.tokenizer = tokenizer
        self.end_tokens = tuple(end_tokens)
        self.generation_config: dict[str, Any] = {}
        """The fields of the checkpoint's generation_config.json, whose filters and stops `generate` follows."""
        self.mask_token = mask_token
        self.plan_tokens = checked_plan_tokens(op, plan_tokens, config.vocab_size, mask_token)
        # Matrices may be replaced by quantised ones.
        self.embedding: Matrix = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = cast(Sequence[Layer], nn.ModuleList(map(self._new_layer, range(config.layers))))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        head = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.register_parameter("head", head)
        self._tables = RopeTables(
            config.head_dim,
            config.max_positions,
            theta=config.rope_theta,
            style=config.rope_style,
            scaling=config.rope_scaling,
        )
        self.binding = whole_step.Binding()
        self.adapters: dict[str, LoraAdapter] = {}
        self.layout: Any = None
        self._window_tables = None
        if config.window_rope_theta is not None:
            self._window_tables = RopeTables(
                config.head_dim, config.max_positions, theta=config.window_rope_theta, style=config.rope_style
            )
        if not self.norm.is_meta:  # nothing to fill, and the calls would import large parts of torch
            self.initialize_()

    def _new_layer(self, index: int) -> Layer:
        return (ExpertLayer if self.config.has_experts(index) else Layer)(self.config)

    @torch.no_grad()
    def initialize_(self) -> None:
        """Initialises weights with N(0, 0.02^2); projections into the residual stream are smaller with more layers."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() >= 2:
                deep = name.endswith(("output", "down"))
                parameter.normal_(std=0.02 / math.sqrt(2 * self.config.layers) if deep else 0.02)
            else:
                parameter.fill_(1.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.device

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        kind: Literal["contiguous", "paged"] = "contiguous",
        page_size: int = 16,
        dtype: torch.dtype | None = None,
        pool: PagePool | None = None,
        drafts: int | None = None,
    ) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, on the model's device.

        A paged cache has pages for all tokens, but assigns none before `cache.reserve_`. `dtype` is that of the model,
        torch.int8 for rows of 8 bits, which take about half the memory of 16 bits, or of a float32 model on a CPU
        torch.float16; None: `cache_dtype`. With a `pool`, of `new_pool`, its pages come from there.

        `drafts`: rows of a forward that may be rejected. Layers with windows then keep only what rows to come can see
        (`pdkernels.cache.WindowedCache`), without a pool. None: they keep all rows.
        """
        return new_cache(self, batch, capacity, kind, page_size, None, dtype, pool, self.config.windows, drafts)

    def new_pool(self, num_pages: int, page_size: int, *, window_pages: Mapping[int, int] | None = None) -> PagePool:
        """Pages that several caches of this model share (`new_cache`).

        `window_pages`: how many the layers with a window of each size have for themselves; of a text these hold what
        rows to come can see (`pdkernels.cache.WindowedPool`). Layers whose window it does not name keep all rows.
        """
        return new_pool(self, num_pages, page_size, window_pages)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        cache: Cache | None = None,
        counts: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | TilePlan | None = None,
        rows: torch.Tensor | Sequence[int] | slice | None = None,
        adapted: bool | torch.Tensor = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `(batch, T, vocab_size)` of `tokens` `(batch, T)`, int32 or int64.

        Without a cache: a full forward, as `config.attention` says or under `mask` (bool, True = visible, `(T, T)` or
        `(batch, T, T)`; or the `TilePlan` of a mask, which is never made dense), at `positions` (`(T,)` or `(batch,
        T)`; default 0..T-1).

        With a cache: row i of sequence b is at position `cache.lengths[b] + i`. Its K and V are appended there, and it
        attends to the prefix and to the rows up to itself. Lengths do not change: `cache.commit_` decides which rows
        stay. `counts` `(batch,)` int32 or int64: rows i >= counts[b] are padding, which is not stored and whose logits
        are meaningless. A `mask` (as above) replaces causal attention among the T rows; all of them attend to the whole
        prefix. With a mask, `counts` is the number of rows that are stored, 0 for a forward that only reads. The other
        rows are not padding: they are visible where the mask shows them, and their logits are valid. `positions` are
        offsets from `cache.lengths`, at most to position capacity + T - 1; K and V are always stored in
        the order of the rows. The cache is read in place, even if it is paged. In fp64, with head dimensions that are
        not a multiple of 8 in 16 .. 512 and with a bool `mask`, every layer copies it in every forward: give decoders
        plans.

        `rows`: compute logits only for these of the T rows, `(batch, len(rows), vocab_size)`: row indices for all
        sequences (ints, a slice, or a `(R,)` tensor) or for each of them (a `(batch, R)` tensor).

        `adapted`: which rows use the adapter (`attach_adapter_`) in their attention's output projection: all (True),
        none, or those of a bool `(T,)` or `(batch, T)`.

        `cu_seqlens` ``(batch + 1,)`` int32 or int64, on a cache whose model `packs_rows`: sequences have different
        numbers of new tokens, and `tokens` ``(1, rows)`` are those of all of them, one sequence after the other, from
        row ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. They are causal, all are stored, and every row has the bits that
        it has in a padded batch. The host reads `cu_seqlens`. It excludes `counts`, `positions`, `mask` and `adapted`.

        Raises ValueError for shapes and values, TypeError for dtypes. On CUDA nothing waits for the device, unless
        `rows` are ints, which must be copied there. Compiled code does not look at values: there `positions` must lie
        below `max_positions` or T, and `rows` below T.
        """
        refused = False
        if cache is not None and rows is None and cu_seqlens is None and positions is None and adapted is False:
            results = self._whole(tokens, cache, counts, mask, with_logits=True)
            if results is not None:
                return results[1]
            refused = not torch.compiler.is_compiling() and self._is_unchanged
        if refused:  # `hidden` would ask again
            x = self._forward(tokens, cache, counts, positions, mask, adapted, {})
        else:
            options = {"cache": cache, "counts": counts, "positions": positions, "mask": mask, "adapted": adapted}
            x = self.hidden(tokens, **options, **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}))  # type: ignore[arg-type]
        if rows is not None:
            x = select_rows("Transformer", x, rows)
        if cache is None:
            return self.logits(x)
        with torch.no_grad():
            return self.logits(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The language model head: logits `(..., vocab_size)` of rows of `hidden`."""
        head: Matrix = self.embedding if self.head is None else self.head
        logits = linear(rms_norm(hidden, self.norm, self.config.norm_eps), head)
        return fused.capped(logits, self.config.logits_softcap)

    def statistics(self, hidden: torch.Tensor, **options: Any) -> TokenStatistics:
        """`pdkernels.token_statistics`, with its `options`, of the `logits` of rows of `hidden`, which are never
        stored."""
        if self.config.logits_softcap is not None:
            return token_statistics(self.logits(hidden), backend=backend_of(self.dtype), **options)
        head: Matrix = self.embedding if self.head is None else self.head
        normed = rms_norm(hidden, self.norm, self.config.norm_eps)
        return linear_token_statistics(normed, head, backend=backend_of(self.dtype), **options)

    def hidden(
        self,
        tokens: torch.Tensor,
        *,
        cache: Cache | None = None,
        counts: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | TilePlan | None = None,
        adapted: bool | torch.Tensor = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The input of `logits` for all rows, `(batch, T, hidden_size)`, of a forward with these arguments, for callers
        that choose the rows later."""
        if cu_seqlens is not None:
            alone = counts is None and positions is None and mask is None and adapted is False
            check(alone, "Transformer", "cu_seqlens", "come without counts, positions, mask and adapted", "with them")
            return self._packed(tokens, cache, cu_seqlens)
        if cache is not None and positions is None and adapted is False:
            results = self._whole(tokens, cache, counts, mask, with_logits=False)
            if results is not None:
                return results[0]
        return self._forward(tokens, cache, counts, positions, mask, adapted, {})

    @property
    def is_plain(self) -> bool:
        """Whether a call is a forward of this class, and nothing else."""
        if type(self) is not Transformer or not vars(self).keys().isdisjoint({*_PARTS, "_compiled_call_impl"}):
            return False
        same_class = _OWN_PARTS == [vars(Transformer)[name] for name in _PARTS]
        return same_class and not (self._forward_hooks or self._forward_pre_hooks)

    @property
    def _is_unchanged(self) -> bool:
        """Whether no part of a forward is another one in this instance."""
        return type(self) is Transformer and vars(self).keys().isdisjoint(_PARTS)

    def _whole(
        self,
        tokens: torch.Tensor,
        cache: Cache,
        counts: torch.Tensor | None,
        mask: torch.Tensor | TilePlan | None,
        with_logits: bool,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """`whole_step.run_forward`, where no part of the forward is another one."""
        if torch.compiler.is_compiling() or not self._is_unchanged:
            return None
        with nullcontext() if torch.is_inference_mode_enabled() else torch.no_grad():
            return whole_step.run_forward(self, tokens, cache, counts, mask, with_logits, taps)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Transformer:
        self.binding.drop()  # or what moves would stay where it was too
        for adapter in self.adapters.values():
            adapter.apply_(fn)
        return cast(Transformer, super()._apply(fn, recurse))  # type: ignore[no-untyped-call]

    @property
    def packs_rows(self) -> bool:
        """Whether a forward on a cache takes `cu_seqlens`."""
        dtype = self.cache_dtype or self.dtype
        return (
            dtype in (*KERNEL_DTYPES, torch.int8)
            and takes_head_dim(self.config.head_dim)
            and not any(self.config.windows)
            and self.config.attention_softcap is None
            and (self.config.experts is None or not self.config.experts.pool)
        )

    def _packed(self, tokens: torch.Tensor, cache: Cache | None, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """`hidden` of packed rows."""
        op = "Transformer"
        check_tokens(op, tokens, self.device)
        if cache is None or not self.packs_rows:
            fail(op, "cu_seqlens", "come with a cache, for a model that packs_rows", "without")
        check_index(op, "cu_seqlens", cu_seqlens, (cache.batch + 1,), cache.lengths.device)
        begins = cu_seqlens.tolist()
        counts = [after - before for before, after in pairwise(begins)]
        fits = begins[0] == 0 and min(counts) >= 0 and tokens.shape == (1, begins[-1])
        check(fits, op, "cu_seqlens", f"ascend from 0 to the rows of tokens {tuple(tokens.shape)}", begins)
        with torch.no_grad():
            sequence = torch.repeat_interleave(cu_seqlens.diff(), output_size=begins[-1])
            row = torch.arange(begins[-1], device=tokens.device) - cu_seqlens[sequence]
            plan = cached_visibility(cache, None, None, max(counts), None)
            rotation = self._rotation(self._rope(cache.capacity + max(counts)), (cache.lengths[sequence] + row)[None])
            lora = AdaptedRows.of(cache.adapters, 0, begins, tokens.device)
            rows = self._new_rows(rotation, plan, cache)._replace(cu_seqlens=cu_seqlens, lora=lora)
            return self._run(tokens, rows, None)

    def tapped(
        self,
        tokens: torch.Tensor,
        taps: Sequence[int],
        *,
        cache: Cache | None = None,
        counts: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | TilePlan | None = None,
        adapted: bool | torch.Tensor = False,
    ) -> Tapped:
        """`hidden`, and what flows into layers on the way there: the features that drafters read.

        Args:
            tokens: as in a forward, like the other arguments.
            taps: layers, counted from 0, whose inputs are returned, in this order; the number of layers means what the
                last one returns. These are the `hidden_states` of transformers, but for the last one, which
                transformers norms.

        Returns:
            The result of `hidden`, with the same bits, and the features ``(batch, T, len(taps), hidden_size)``.

        Example:
            >>> config = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=16,
            ...                            intermediate_size=24)
            >>> model = Transformer(config).requires_grad_(False)
            >>> tokens = torch.tensor([[1, 2, 3]])
            >>> hidden, features = model.tapped(tokens, [0, 1, 2])
            >>> features.shape, torch.equal(features[:, :, 0], model.embed(tokens)), torch.equal(features[:, :, 2], hidden)
            (torch.Size([1, 3, 3, 16]), True, True)
        """
        taps = checked_taps("Transformer.tapped", taps, self.config.layers)
        if cache is not None and positions is None and adapted is False:
            results = self._whole(tokens, cache, counts, mask, False, taps)
            if results is not None:
                return Tapped(results[0], results[2])
        states: dict[int, torch.Tensor | None] = dict.fromkeys(taps)
        hidden = self._forward(tokens, cache, counts, positions, mask, adapted, states)
        return Tapped.of(hidden, states, taps)

    def _forward(
        self,
        tokens: torch.Tensor,
        cache: Cache | None,
        counts: torch.Tensor | None,
        positions: torch.Tensor | None,
        mask: torch.Tensor | TilePlan | None,
        adapted: bool | torch.Tensor,
        states: dict[int, torch.Tensor | None],
    ) -> torch.Tensor:
        """The input of `logits`. `states` gets the inputs of the layers that are its keys."""
        self._validate(tokens, cache, counts, positions, mask)
        gate = None if adapted is False else self.layers[0].gate(adapted, tokens.shape)
        if cache is None:
            visibility = uncached_visibility(mask, causal=self.config.attention == "causal")
            rows = self._new_rows(self._uncached_rotation(tokens, positions), visibility)
            rows = rows.pooled(self.config.experts, tokens, None, positions)
            return self._run(tokens, self._windowed(rows, tokens.shape[1], None, positions), gate, states)
        # The cache has no autograd graph, so a forward on it has none either.
        with torch.no_grad():
            visibility, rotation = self._on_cache(tokens.shape[1], cache, counts, positions, mask)
            lora = AdaptedRows.of(cache.adapters, tokens.shape[1], None, tokens.device)
            rows = self._new_rows(rotation, visibility, cache, counts)._replace(lora=lora)
            rows = rows.pooled(self.config.experts, tokens, cache.lengths, positions, counts if mask is None else None)
            return self._run(tokens, self._windowed(rows, tokens.shape[1], cache.lengths, positions), gate, states)

    def recompute(
        self,
        tokens: torch.Tensor,
        cache: Cache,
        starts: torch.Tensor,
        *,
        slots: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Runs `tokens` `(batch, R)` at any positions of the cache and overwrites their slots. Every row attends to all
        visible positions.

        Row r of sequence b is at position and slot ``starts[b] + slots[b, r]``. All K and V are stored first; then
        every row attends to the first ``visible[b]`` positions of its sequence, whichever forward wrote them.
        `cache.lengths` is neither used nor changed. For all rows of a text, with all its positions visible, this is a
        forward of a bidirectional model without a cache; with fewer rows the other positions keep their K and V.

        Args:
            tokens: int32 or int64.
            cache: a paged one must own the pages of all positions that are written or visible.
            starts: `(batch,)` int32 or int64.
            slots: `(batch, R)` int32 or int64, distinct within a sequence; -1: the row is padding. None: 0 .. R-1.
            counts: `(batch,)` int32 or int64: rows r >= counts[b] are padding. None: no padding.
            visible: `(batch,)` int32 or int64, 0 .. capacity.

        Returns:
            `(batch, R, hidden_size)`, for `select_rows` and `logits`. Padding is not stored and its rows are
            meaningless.

        Raises:
            ValueError: shapes; on the CPU also positions outside the cache, before anything is written.
            TypeError: dtypes.

        On CUDA nothing waits for the device. There is no autograd graph; for training use a forward without a cache.

        Example:
            >>> config = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=16,
            ...                            intermediate_size=24, attention="bidirectional", predicts="own")
            >>> model = Transformer(config, mask_token=10).requires_grad_(False)
            >>> canvas, four = torch.tensor([[1, 2, 10, 10]]), torch.tensor([4])
            >>> cache = model.new_cache(batch=1, capacity=4)
            >>> hidden = model.recompute(canvas, cache, torch.tensor([0]), visible=four)
            >>> torch.allclose(model.logits(hidden), model(canvas), atol=1e-5)
            True
            >>> model.recompute(torch.tensor([[7]]), cache, torch.tensor([2]), visible=four).shape
            torch.Size([1, 1, 16])
        """
        check_tokens("Transformer.recompute", tokens, self.device)
        config = self.config
        specials = config.query_scale, config.window_rope_theta, config.attention_softcap
        if config.sinks or any(each is not None for each in specials):
            fault = "layers with sinks, with a cap, or with a rotation or a scale of their own cannot compute rows anew"
            raise NotImplementedError(sentence("Transformer.recompute", fault, "Use a method for causal models."))
        with torch.no_grad():
            table = self._rope(cache.capacity)
            recomputed = recomputed_rows(
                cache, table, self.config.rope_style, tokens.shape, starts, slots, counts, visible, self.config.windows
            )
            return self._run(tokens, recomputed.pooled(self.config.experts), None)

    def attach_adapter_(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float = 1.0) -> None:
        """Gives every layer's output projection W a low-rank alternative ``W + scale * b @ a``, for the rows that a
        forward adapts.

        Self-speculation drafts with it and verifies without. The pairs become parameters (`adapter_in`, `adapter_out`
        of each layer, the scale inside the latter): they follow `.to` and are in the state dict.

        Args:
            pairs: for each layer a ``(rank, heads * head_dim)`` and b ``(hidden_size, rank)``.
            scale: factor of the product; LoRA's alpha / rank.

        Raises:
            ValueError: wrong shapes, or not one pair per layer.
        """
        expectation = f"be one pair for each of {len(self.layers)} layers"
        check(len(pairs) == len(self.layers), "Transformer.attach_adapter_", "pairs", expectation, len(pairs))
        for layer, (a, b) in zip(self.layers, pairs, strict=True):
            layer.attach_adapter_(a, b * scale)

    @property
    def has_adapter(self) -> bool:
        """Whether a forward may adapt rows."""
        return self.layers[0].adapter_in is not None

    def quantized(
        self, format: str = "int8", *, group: int | None = None, skip: str | Collection[str] = ()
    ) -> Transformer:
        """The same model with quantised matrices, see `pdkernels.quantize`. What stays as numbers is shared."""
        rebuilt = "matrices" in vars(type(self))
        check_type(rebuilt, packing.OP, "model", "be a Transformer", type(self).__name__)
        model = packing.quantized(self, format, group, skip)
        model.layout, model.adapters = self.layout, dict(self.adapters)
        return model

    def _new_rows(
        self, rotation: Rotation, visibility: Visibility, cache: Cache | None = None, counts: torch.Tensor | None = None
    ) -> NewRows:
        config = self.config
        return NewRows(
            rotation, config.rope_style, config.kv_heads, visibility, cache, counts, (), config.query_factor
        )._replace(softcap=config.attention_softcap)

    def _windowed(
        self, rows: NewRows, count: int, lengths: torch.Tensor | None, offsets: torch.Tensor | None
    ) -> NewRows:
        """The rows with what they see in each layer; `offsets` are their positions after `lengths`."""
        windows = self.config.windows
        if not any(windows):
            return rows
        visibility = rows.visibility
        if visibility.mask is None and not self._has_kernels():
            visibility = uncached_visibility(torch.ones(count, count, dtype=torch.bool, device=self.device).tril())
        seen = seen_by_layer(windows, visibility, count, self.device, lengths, offsets)
        if self._window_tables is not None:
            where = torch.arange(count, device=self.device) if offsets is None else offsets
            where = where if lengths is None else lengths[:, None] + where
            limit = max(self.config.max_positions, count) if rows.cache is None else rows.cache.capacity + count
            on_host = where.device.type == "cpu" and not torch.compiler.is_compiling()
            if rows.cache is None and where.numel() and on_host:
                limit = int(where.max()) + 1
            local = self._rotation(self._window_tables.covering(limit, self.device, self.dtype), where)
            seen = tuple(
                each if window is None else each._replace(rotation=local)
                for each, window in zip(seen, windows, strict=True)
            )
        return rows._replace(seen=seen)

    def _has_kernels(self) -> bool:
        return self.dtype in KERNEL_DTYPES and takes_head_dim(self.config.head_dim)

    def _run(
        self,
        tokens: torch.Tensor,
        rows: NewRows | RecomputedRows,
        gate: torch.Tensor | None,
        states: dict[int, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        x, first, layers, states = self.embed(tokens), 0, self.config.layers, states or {}
        if states and gate is None and isinstance(rows, NewRows):
            tapped = whole_step.run_layers(self, x, rows, 0, layers, [*states])
            if tapped is not None:
                states.update(zip(states, tapped[1].unbind(-2), strict=True))
                return tapped[0]
        for tap in sorted(states):
            x = states[tap] = self._run_layers(x, rows, gate, first, tap)
            first = tap
        return self._run_layers(x, rows, gate, first, layers)

    def _run_layers(
        self, x: torch.Tensor, rows: NewRows | RecomputedRows, gate: torch.Tensor | None, first: int, end: int
    ) -> torch.Tensor:
        """What layer `end` gets if layer `first` gets `x`."""
        if first == end:
            return x
        if gate is None and isinstance(rows, NewRows):
            results = whole_step.run_layers(self, x, rows, first, end)
            if results is not None:
                return results[0]
        added: torch.Tensor | None = None
        for index, layer in enumerate(islice(self.layers, first, end), first):
            lora = None if rows.lora is None else partial(rows.lora.add, layer=index)
            # Only layers with experts choose among them.
            pools = {"pools": rows.pools} if rows.pools is not None and self.config.has_experts(index) else {}
            x, added = layer(x, added, partial(rows.attend_, layer=index), gate, lora, **pools)
        assert added is not None
        return x + added

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of the embedding, `(batch, T, hidden_size)`, where the first layer starts."""
        try:
            return self._look_up(tokens)
        except IndexError:
            expectation = f"hold ids in [0, {self.config.vocab_size})"
            actual = f"{int(tokens.min())}..{int(tokens.max())}"
            raise ValueError(message("Transformer", "tokens", expectation, actual)) from None

    def _look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, scale = fused.embed(tokens, self.embedding, self.dtype), self.config.embedding_scale
        return rows if scale == 1 else rows * torch.tensor(scale, dtype=self.dtype, device=rows.device)

    def _validate(
        self,
        tokens: torch.Tensor,
        cache: Cache | None,
        counts: torch.Tensor | None,
        positions: torch.Tensor | None,
        mask: torch.Tensor | TilePlan | None,
    ) -> None:
        op = "Transformer"
        check_tokens(op, tokens, self.device)
        batch, length = tokens.shape
        if cache is None:
            check(counts is None, op, "counts", "be None without a cache", "a tensor", "Pass a cache too.")
        else:
            if cache.batch != batch:
                fail(op, "tokens", f"have the batch size of the cache ({cache.batch})", batch)
            if counts is not None:
                check_index(op, "counts", counts, (batch,), cache.lengths.device)
        if positions is not None:
            check_type(isinstance(positions, torch.Tensor), op, "positions", "be a tensor", type(positions).__name__)
            if positions.shape not in ((length,), (batch, length)):
                fail(op, "positions", f"have shape ({length},) or ({batch}, {length})", tuple(positions.shape))
            check_type(positions.dtype in INDEX_DTYPES, op, "positions", "be int64 or int32", positions.dtype)
        check_mask(op, mask, batch, length, self.device)

    def _rope(self, limit: int) -> Rotation:
        return self._tables.covering(limit, self.device, self.dtype)

    def _uncached_rotation(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> Rotation:
        length = tokens.shape[1]
        if positions is None:
            return self._rotation(self._rope(length), torch.arange(length, device=self.device))
        limit = max(self.config.max_positions, length)
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            low, high = (int(value) for value in positions.aminmax())
            check(low >= 0, "Transformer", "positions", "not be negative", low)
            limit = high + 1
        return self._rotation(self._rope(limit), positions)

    def _rotation(self, table: Rotation, positions: torch.Tensor) -> Rotation:
        return table.kept_for(positions) if fused.enabled(self.norm) else table.at(positions)

    def _on_cache(
        self,
        rows: int,
        cache: Cache,
        counts: torch.Tensor | None,
        offsets: torch.Tensor | None,
        mask: torch.Tensor | TilePlan | None,
    ) -> tuple[Visibility, Rotation]:
        """Visibility and rotation of the new rows. The host reads lengths only on the CPU."""
        lengths = cache.lengths.tolist() if cache.lengths.device.type == "cpu" else None
        visibility = cached_visibility(cache, lengths, counts, rows, mask)
        # Padding rows may lie past the capacity, but not past capacity + rows.
        table = self._rope(cache.capacity + rows)
        if offsets is None:
            return visibility, self._rotation(
                table, cache.lengths[:, None] + torch.arange(rows, device=cache.lengths.device)
            )
        positions = cache.lengths[:, None] + offsets
        if lengths is not None:
            check_positions("Transformer", positions, offsets, cache.capacity + rows)
        return visibility, self._rotation(table, positions)


_OWN_PARTS = [vars(Transformer)[name] for name in _PARTS]


def select_rows(op: str, x: torch.Tensor, rows: torch.Tensor | Sequence[int] | slice) -> torch.Tensor:
    """The rows of `x` `(batch, T, hidden_size)` requested from a forward of `op`: see `Transformer.forward`."""
    if isinstance(rows, slice):
        return x[:, rows]
    batch, length, _ = x.shape
    if not isinstance(rows, torch.Tensor):
        check_type(
            isinstance(rows, Sequence), op, "rows", "be a slice, a tensor or a list of ints", type(rows).__name__
        )
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
