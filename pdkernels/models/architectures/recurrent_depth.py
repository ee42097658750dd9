"""A recurrent-depth model: a few layers before and after a core block that runs any number of times.

    e = prelude(tokens);  state = random;  state = core(state, e), repeatedly;  logits = coda(state)

The KV cache has one slot per layer, however often the core runs: every recurrence overwrites the same rows after the
cached prefix, and those of the last recurrence stay if they are committed. Later tokens therefore attend to the K and V
of the last recurrence in all of their own recurrences, while tokens of one forward attend to each other recurrence by
recurrence. With more than one recurrence, splitting a text into two forwards changes its logits.

Source: Geiping et al., "Scaling up test-time compute with latent reasoning: a recurrent depth approach", section 3
(Huginn-0125).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from pdkernels._validation import check, check_index, check_type, message
from pdkernels.backends import backend_of
from pdkernels.cache import Cache
from pdkernels.models.architectures.attention import cached_visibility, check_tokens, uncached_visibility
from pdkernels.models.architectures.caches import new_cache
from pdkernels.models.architectures.config import RecurrentDepthConfig
from pdkernels.models.architectures.fused import add_linear, add_norm, linear, rms_norm
from pdkernels.models.architectures.recurrent_layer import ForwardContext, RecurrentLayer
from pdkernels.models.architectures.rope import RopeTables, Rotation
from pdkernels.models.architectures.transformer import select_rows
from pdkernels.ops.recurrence import recurrence_inject

if TYPE_CHECKING:
    from pdkernels.models.text.tokenizers import Tokenizer

__all__ = ["STATE_STD", "RecurrentDepth", "RecurrentDepthConfig"]

STATE_STD = math.sqrt(0.4)
"""Standard deviation of initial states, before the truncation at three of them: that of the weights, sqrt(2 / (5 E)),
times sqrt(E)."""


class RecurrentDepth(nn.Module):
    """A recurrent-depth language model on our KV caches. A forward runs the whole model; decoders and training call its
    parts.

    `tokenizer` (or None) turns text into ids and back; `end_tokens` are the ids that end a text. Parameters may be
    fp64, fp32, bf16 or fp16 (`model.to(dtype)`). The language model head is the embedding.

    >>> config = RecurrentDepthConfig(vocab_size=11, hidden_size=16, heads=2, head_dim=8, intermediate_size=24, prelude_layers=1,
    ...                               core_layers=1, coda_layers=1, mean_recurrence=4)
    >>> model = RecurrentDepth(config).requires_grad_(False)
    >>> tokens = torch.tensor([[1, 2, 3, 4]])
    >>> logits = model(tokens)
    >>> logits.shape
    torch.Size([1, 4, 11])
    >>> cache = model.new_cache(batch=1, capacity=8)
    >>> torch.allclose(model(tokens, cache=cache), logits, atol=1e-5)
    True
    >>> cache.commit_(torch.tensor([4]))
    >>> model(torch.tensor([[5]]), cache=cache, recurrences=8).shape
    torch.Size([1, 1, 11])
    """

    mask_token = None
    plan_tokens = None

    def __init__(
        self, config: RecurrentDepthConfig, *, tokenizer: Tokenizer | None = None, end_tokens: Sequence[int] = ()
    ) -> None:
        super().__init__()
        check_type(
            isinstance(config, RecurrentDepthConfig),
            "RecurrentDepth",
            "config",
            "be a RecurrentDepthConfig",
            type(config).__name__,
        )
        for token in end_tokens:
            check(
                0 <= token < config.vocab_size,
                "RecurrentDepth",
                "end_tokens",
                f"be ids below vocab_size ({config.vocab_size})",
                token,
            )
        self.config, self.tokenizer, self.end_tokens = config, tokenizer, tuple(end_tokens)
        self.generation_config: dict[str, Any] = {}
        hidden = config.hidden_size
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, hidden))
        # The first half of its columns takes the state, the second the embedding.
        self.adapter = nn.Parameter(torch.empty(hidden, 2 * hidden))
        self.prelude_layers = _layers(config, config.prelude_layers)
        self.core_layers = _layers(config, config.core_layers)
        self.coda_layers = _layers(config, config.coda_layers)
        self.norm = nn.Parameter(torch.empty(hidden))
        self._tables = RopeTables(config.head_dim, config.max_positions, theta=config.rope_theta, style="interleaved")
        if not self.embedding.is_meta:  # nothing to fill, and the calls would import large parts of torch
            self.initialize_()

    @torch.no_grad()
    def initialize_(self) -> None:
        """Initialises weights with a truncated N(0, 2 / (5 E)). Projections into the residual stream are smaller, by
        the unrolled depth."""
        config = self.config
        std = math.sqrt(2 / (5 * config.hidden_size))
        depth = config.prelude_layers + config.mean_recurrence * config.core_layers + config.coda_layers
        for name, parameter in self.named_parameters():
            if name.endswith("qk_bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                scaled = std / math.sqrt(2 * depth) if name.endswith(("output", "down")) else std
                nn.init.trunc_normal_(parameter, std=scaled, a=-3 * scaled, b=3 * scaled)
            else:
                parameter.fill_(1.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def exit_weight(self) -> torch.Tensor:
        """Weight of the norm that ends a recurrence, which `core_parts` leaves to `pdkernels.recurrence_exit`."""
        return self.core_layers[-1].norm_4

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        kind: Literal["contiguous", "paged"] = "contiguous",
        page_size: int = 16,
        kept: int = 1,
    ) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, with one slot per layer for any number of
        recurrences.

        A paged cache has pages for all tokens, but assigns none before `cache.reserve_`. With `kept` above 1, the
        core's layers have `kept` slots each: recurrence t writes and reads slot ``t % kept``
        (`ForwardContext.recurrence`).
        """
        return new_cache(
            self, batch, capacity, kind, page_size, self.config.layers + (kept - 1) * self.config.core_layers
        )

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        cache: Cache | None = None,
        counts: torch.Tensor | None = None,
        rows: torch.Tensor | Sequence[int] | slice | None = None,
        recurrences: int | None = None,
        seed: int | torch.Tensor = 0,
        init_scale: float = 1.0,
    ) -> torch.Tensor:
        """Logits `(batch, T, vocab_size)` of `tokens` `(batch, T)`, int32 or int64, after `recurrences` of the core.

        With a cache, row i of sequence b is at position `cache.lengths[b] + i`. Its K and V are appended there, and it
        attends to the prefix and to the rows up to itself. Lengths do not change: `cache.commit_` decides which rows
        stay. A forward has no autograd graph; training calls the parts.

        Args:
            counts: `(batch,)` rows of each sequence. The others are padding, which is not stored and whose logits are
                meaningless.
            rows: compute logits only for these of the T rows, `(batch, len(rows), vocab_size)`: indices for all
                sequences (ints, a slice, or a `(R,)` tensor) or for each of them (a `(batch, R)` tensor).
            recurrences: None: `config.mean_recurrence`.
            seed: of the initial states, which depend on positions, not on the rest of the forward; a `(batch,)` tensor
                has one for each sequence.
            init_scale: factor of the initial states; 0 starts from zeros.

        Raises:
            ValueError: shapes and values.
            TypeError: dtypes.
        """
        op = "RecurrentDepth"
        check_tokens(op, tokens, self.device)
        if cache is not None:
            check(
                cache.batch == len(tokens),
                op,
                "tokens",
                f"have the batch size of the cache ({cache.batch})",
                len(tokens),
            )
        steps = self.config.mean_recurrence if recurrences is None else recurrences
        check_type(type(steps) is int, op, "recurrences", "be an int", type(steps).__name__)
        check(steps >= 1, op, "recurrences", "be at least 1", steps)
        check(init_scale >= 0, op, "init_scale", "not be negative", init_scale)
        with torch.no_grad():
            context = self.context(tokens.shape[1], cache, counts)
            state, term = self.begin(self.prelude(tokens, context), context, seed, init_scale)
            for recurrence in range(steps):
                state = self.core(state, term, context._replace(recurrence=recurrence))
            return self.coda(state, context, rows)

    # ---- the parts

    def begin(
        self, embedding: torch.Tensor, context: ForwardContext, seed: int | torch.Tensor = 0, init_scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of the recurrences: initial states of all rows, which depend on their positions, and the
        embedding's term.

        Both are `(batch, T, hidden_size)`; the state has no graph, the term does.
        """
        batch, rows, hidden = embedding.shape
        zeros = torch.zeros(batch, dtype=torch.int64, device=self.device)
        cursor = zeros if context.cache is None else context.cache.lengths
        width = torch.full_like(zeros, rows) if context.counts is None else context.counts
        injected = recurrence_inject(
            None,
            embedding.detach(),
            None,
            zeros[:, None].expand(-1, rows),
            cursor,
            width,
            zeros,
            zeros,
            seed=seed,
            init_std=STATE_STD * init_scale,
            backend=backend_of(self.dtype),
        )
        return injected[..., :hidden], self.embedding_term(embedding)

    def context(self, rows: int, cache: Cache | None = None, counts: torch.Tensor | None = None) -> ForwardContext:
        """The context of `rows` new tokens of each sequence: after `cache.lengths`, or at 0 without a cache; always
        causal.

        `counts` `(batch,)`: rows i >= counts[b] are padding, which is not stored. Nothing is committed: the caller
        moves the lengths by `cache.commit_` or `pdkernels.recurrence_advance_`.
        """
        op = "RecurrentDepth.context"
        check(rows >= 1, op, "rows", "be at least 1", rows)
        if cache is None:
            check(counts is None, op, "counts", "be None without a cache", "a tensor", "Pass a cache too.")
            table = self._rope(rows)
            return ForwardContext(table, table.span(0, rows), uncached_visibility(None), None, None)
        if counts is not None:
            check_index(op, "counts", counts, (cache.batch,), cache.lengths.device)
        lengths = cache.lengths.tolist() if cache.lengths.device.type == "cpu" else None
        visibility = cached_visibility(cache, lengths, counts, rows, None)
        # Padding rows may lie past the capacity, but not past capacity + rows.
        table = self._rope(cache.capacity + rows)
        if lengths is not None and lengths.count(lengths[0]) == len(lengths):
            rotation = table.span(lengths[0], rows)
        else:
            rotation = table.at(cache.lengths[:, None] + torch.arange(rows, device=self.device))
        return ForwardContext(table, rotation, visibility, cache, counts)

    def prelude(self, tokens: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The embedding e `(batch, T, hidden_size)` of `tokens` `(batch, T)`, which every recurrence reads."""
        try:
            x = self._look_up(tokens) * self.config.embedding_scale
        except IndexError:
            expectation = f"hold ids in [0, {self.config.vocab_size})"
            actual = f"{int(tokens.min())}..{int(tokens.max())}"
            raise ValueError(message("RecurrentDepth", "tokens", expectation, actual)) from None
        return self._run(self.prelude_layers, x, context, 0)

    def embedding_term(self, embedding: torch.Tensor) -> torch.Tensor:
        """The part of the core's input that comes from e, equal in all recurrences: ``e @ W_e^T``, `(batch, T,
        hidden_size)`."""
        return linear(embedding, self.adapter[:, self.config.hidden_size :])

    def core(self, state: torch.Tensor, term: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The state after one more recurrence; `state` and `term`, the embedding's, are `(batch, T, hidden_size)`."""
        x, residual = self.core_parts(state, term, context)
        return add_norm(x, residual, self.exit_weight, None, self.config.norm_eps)[0]

    def core_parts(
        self, state: torch.Tensor, term: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A recurrence up to its last norm: ``core(...) == rms_norm(x + residual) * exit_weight`` for the two it
        returns."""
        hidden = self.config.hidden_size
        x = add_linear(term, state, self.adapter[:, :hidden])
        slot = self.config.prelude_layers + context.recurrence % self._kept(context) * self.config.core_layers
        return self._run_parts(self.core_layers, x, context, slot)

    def coda(
        self, state: torch.Tensor, context: ForwardContext, rows: torch.Tensor | Sequence[int] | slice | None = None
    ) -> torch.Tensor:
        """Logits `(batch, T, vocab_size)` of a state `(batch, T, hidden_size)`, or only of `rows`, as in a forward."""
        x = rms_norm(state, self.norm, self.config.norm_eps)
        if self.coda_layers:
            slot = self.config.prelude_layers + self._kept(context) * self.config.core_layers
            x = self._run(self.coda_layers, x, context, slot)
        if rows is not None:
            x = select_rows("RecurrentDepth", x, rows)
        return self._project(rms_norm(x, self.norm, self.config.norm_eps))

    def _kept(self, context: ForwardContext) -> int:
        """The number of recurrences with separate K and V in the cache."""
        extra = 0 if context.cache is None else context.cache.layers - self.config.layers
        return 1 + extra // self.config.core_layers

    def _look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.embedding)

    def _project(self, normed: torch.Tensor) -> torch.Tensor:
        return linear(normed, self.embedding)

    def _run(
        self, layers: Sequence[RecurrentLayer], x: torch.Tensor, context: ForwardContext, slot: int
    ) -> torch.Tensor:
        x, residual = self._run_parts(layers, x, context, slot)
        return add_norm(x, residual, layers[-1].norm_4, None, self.config.norm_eps)[0]

    def _run_parts(
        self, layers: Sequence[RecurrentLayer], x: torch.Tensor, context: ForwardContext, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs all layers except for the last norm. The last norm of a layer and the first of the next are fused."""
        eps = self.config.norm_eps
        y, residual = layers[0](x, rms_norm(x, layers[0].norm_1, eps), context, slot)
        for index in range(1, len(layers)):
            x, normed = add_norm(y, residual, layers[index - 1].norm_4, layers[index].norm_1, eps)
            y, residual = layers[index](x, normed, context, slot + index)
        return y, residual

    def _rope(self, limit: int) -> Rotation:
        return self._tables.covering(limit, self.device, self.dtype)


def _layers(config: RecurrentDepthConfig, count: int) -> Sequence[RecurrentLayer]:
    return cast(Sequence[RecurrentLayer], nn.ModuleList(RecurrentLayer(config) for _ in range(count)))
