"""A canvas with a feature cache: most steps of a masked-diffusion model recompute only a few rows and reuse the others.

Source: "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching", and the released code. The
plain form is reference/dllm_cache.py. State that the released code stores but never reads is left out:

- For a prompt only K and V are cached; its residual stream is recomputed when needed. Models whose rows predict the
  next token need its last row in every step. For that row the cache keeps what the layers after the first add to it.
- K is cached after the rotation, because a row never moves.
- The first layer is computed for all new rows in every step, as in the current revision. For the prompt it would give
  the same K and V again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch

from pdkernels import _memory
from pdkernels._validation import check, check_index, check_type, sentence
from pdkernels.backends import backend_of
from pdkernels.cache import PagedKVCache
from pdkernels.models.architectures.recompute import RecomputedRows, recomputed_rows
from pdkernels.models.architectures.transformer import Transformer
from pdkernels.models.capabilities import rows_ahead
from pdkernels.ops.feature_cache import add_cached_rows_, gather_rows, select_stale_rows_

_OP = "FeatureCache"

Baseline = Literal["last", "recomputed"]


class _Step(NamedTuple):
    """The inputs of a step, for all layers."""

    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    counts: torch.Tensor | None
    """How many new rows are not cut off; None: all."""
    new_rows: torch.Tensor
    """`(batch, generated)`, their numbers from 0; -1 for rows that are cut off."""
    base: RecomputedRows
    """For no rows; layers fill in the slots."""

    def recomputed_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Positions of new rows, given by number; -1 stays."""
        return torch.where(rows >= 0, rows + self.prompt_lengths[:, None], -1)


@runtime_checkable
class SomeHeads(Protocol):
    """A model that holds only some of the heads."""

    def with_all_heads(self, kv: torch.Tensor) -> torch.Tensor:
        """Keys or values ``(..., own KV heads, head_dim)`` combined with those of the others: ``(..., all KV heads,
        head_dim)``."""
        ...


class FeatureCache:
    """K and V of a canvas, and the last outputs of attention and feed-forward for each new row, in every layer.

    A canvas is a prompt and the `generated` positions after it. Steps count from 1, for all sequences of the batch
    together. Step s computes the prompt if ``(s - 1) % prompt_interval == 0``, and the new rows if
    ``(s - 1) % gen_interval == 0``, so step 1 computes everything. In other steps each layer after the first recomputes
    only the share `transfer_ratio` of the new rows whose values V have changed most; the other rows add their cached
    outputs to the residual stream.

    Args:
        model: bidirectional.
        batch: sequences.
        prompt_capacity: tokens of the longest prompt.
        generated: positions after each prompt.
        prompt_interval, gen_interval: steps from one refresh to the next (the paper's K_p and K_r).
        transfer_ratio: share of the new rows that a step between two refreshes recomputes (rho), 0 .. 1, rounded down;
            with 0 the values are not compared at all.
        baseline: "last" compares values with those of the last step, as published; "recomputed" compares them with
            those of the step that last recomputed the row, which are then also the values that other rows attend to.
        page_size: rows per page of the KV cache; None keeps it contiguous.

    Attributes:
        step: steps so far.

    Raises:
        ValueError, TypeError: arguments.

    >>> from pdkernels.models import TransformerConfig
    >>> config = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=16,
    ...                            intermediate_size=24, attention="bidirectional", predicts="own")
    >>> model = Transformer(config, mask_token=10).requires_grad_(False)
    >>> cache = FeatureCache(model, 1, 2, 3, prompt_interval=25, gen_interval=5, transfer_ratio=0.5)
    >>> canvas, prompt = torch.tensor([[1, 2, 10, 10, 10]]), torch.tensor([2])
    >>> torch.allclose(model.logits(cache.forward(canvas, prompt)), model(canvas)[:, 2:], atol=1e-5)
    True
    >>> canvas[0, 3] = 7
    >>> cache.forward(canvas, prompt).shape  # one of the new rows, apart from the first layer
    torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        model: Transformer,
        batch: int,
        prompt_capacity: int,
        generated: int,
        *,
        prompt_interval: int,
        gen_interval: int,
        transfer_ratio: float,
        baseline: Baseline = "last",
        page_size: int | None = None,
    ) -> None:
        sizes = {
            "batch": batch,
            "prompt_capacity": prompt_capacity,
            "generated": generated,
            "prompt_interval": prompt_interval,
            "gen_interval": gen_interval,
        }
        for name, size in sizes.items():
            check_type(type(size) is int, _OP, name, "be an int", type(size).__name__)
            check(size >= 1, _OP, name, "be at least 1", size)
        check_type(
            type(transfer_ratio) in (int, float), _OP, "transfer_ratio", "be a number", type(transfer_ratio).__name__
        )
        check(0 <= transfer_ratio <= 1, _OP, "transfer_ratio", "be in 0 .. 1", transfer_ratio)
        check(baseline in get_args(Baseline), _OP, "baseline", "be 'last' or 'recomputed'", repr(baseline))
        check_type(isinstance(model, Transformer), _OP, "model", "be a Transformer", type(model).__name__)
        attention = model.config.attention
        check(attention == "bidirectional", _OP, "model", "be bidirectional", f"attention {attention!r}")
        if model.cache_dtype not in (None, model.dtype):
            fault = (
                f"values are compared with those of earlier steps, which a cache in {model.cache_dtype} does not hold"
            )
            raise NotImplementedError(sentence(_OP, fault, "Set model.cache_dtype to None."))
        self.step = 0
        self._model, self._generated = model, generated
        self._intervals = prompt_interval, gen_interval
        self._ratio, self._update = transfer_ratio, "all" if baseline == "last" else "selected"
        self._backend = backend_of(model.dtype)
        self._shift = rows_ahead(model)
        capacity = prompt_capacity + generated
        if page_size is None:
            self._kv = model.new_cache(batch, capacity)
        else:
            self._kv = model.new_cache(batch, capacity, kind="paged", page_size=page_size)
            assert isinstance(self._kv, PagedKVCache)
            self._kv.reserve_([capacity] * batch)
        features = (model.config.layers, batch, generated, model.config.hidden_size)
        self._attention, self._feed_forward = (_memory.zeros(features, model.dtype, model.device) for _ in range(2))
        self._prompt_rows = torch.arange(prompt_capacity, device=model.device)
        self._new_rows = torch.arange(generated, device=model.device)
        self._after_first: torch.Tensor | None = (
            None  # the sum that the layers after the first add to the last row of the prompt
        )

    @torch.no_grad()
    def forward(
        self, tokens: torch.Tensor, prompt_lengths: torch.Tensor, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs one step over the canvases and returns for each new position the hidden state that predicts it.

        Args:
            tokens: ``(batch, L)`` int32 or int64, the prompts with their new positions; any ids past those
                are ignored.
            prompt_lengths: ``(batch,)`` int32 or int64, 1 .. `prompt_capacity`, the same in all steps.
            visible: ``(batch,)`` int32 or int64: the length to which each canvas is cut, between the ends of the prompt
                and of
                    the canvas. Rows past the cut keep their cached features until a later step recomputes them; their
                    hidden states are meaningless. None: no cut. The first step must not cut.

        Returns:
            ``(batch, generated, hidden_size)`` for `Transformer.logits`: row j predicts position ``prompt_lengths +
            j``.

        Raises:
            ValueError, TypeError: arguments; values only on the CPU.
        """
        self._check(tokens, prompt_lengths, visible)
        model, ends = self._model, prompt_lengths + self._generated if visible is None else visible
        prompt_due, new_due = (self.step % interval == 0 for interval in self._intervals)
        self.step += 1
        # The layers choose the rows that are computed.
        nowhere = prompt_lengths.new_empty(len(tokens), 0)
        base = recomputed_rows(
            self._kv,
            model._rope(self._kv.capacity),
            model.config.rope_style,
            nowhere.shape,
            torch.zeros_like(prompt_lengths),
            nowhere,
            None,
            ends,
        )
        rows = self._new_rows.expand(len(tokens), -1)
        counts = None if visible is None else visible - prompt_lengths
        if counts is not None:
            rows = torch.where(rows < counts[:, None], rows, -1)
        step = _Step(tokens, prompt_lengths, counts, rows, base)
        return self._everything(step) if prompt_due and new_due else self._some(step, prompt_due, new_due)

    def _check(self, tokens: torch.Tensor, prompt_lengths: torch.Tensor, visible: torch.Tensor | None) -> None:
        maximum, generated = len(self._prompt_rows), self._generated
        batch = self._kv.batch
        check_index(_OP, "tokens", tokens, (batch, maximum + generated), self._model.device)
        check_index(_OP, "prompt_lengths", prompt_lengths, (batch,), tokens.device)
        if visible is not None:
            check_index(_OP, "visible", visible, (batch,), tokens.device)
        if tokens.device.type != "cpu":
            return
        low, high = (int(value) for value in prompt_lengths.aminmax())
        check(
            low >= self._shift and high <= maximum,
            _OP,
            "prompt_lengths",
            f"lie in [{self._shift}, {maximum}]",
            f"{low}..{high}",
        )
        if visible is not None:
            minimum = 0 if self.step else generated
            low, high = (int(value) for value in (visible - prompt_lengths).aminmax())
            check(
                low >= minimum and high <= generated,
                _OP,
                "visible",
                f"be {minimum} to {generated} positions after the prompt",
                f"{low} to {high}",
            )

    def _everything(self, step: _Step) -> torch.Tensor:
        """Computes all rows as `Transformer.recompute` does, and keeps the features of the new rows."""
        model, tokens = self._model, step.tokens
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        rows = step.base._replace(slots=torch.where(slots < step.base.visible[:, None], slots, -1))
        new = step.recomputed_rows(step.new_rows)
        x = model.embed(tokens)
        for index, layer in enumerate(model.layers):
            added = layer.project_out(rows.attend_(layer.project(layer.normed(x)), index))
            x = x + self._keep(self._attention[index], added, new)
            x = x + self._keep(self._feed_forward[index], layer.feed_forward(x), new)
            if index == 0:
                first = x
        if self._shift:
            last = step.prompt_lengths[:, None] - 1
            self._remember(self._gather(first, last), self._gather(x, last))
        return self._gather(x, step.prompt_lengths[:, None] - self._shift + self._new_rows)

    def _some(self, step: _Step, prompt_due: bool, new_due: bool) -> torch.Tensor:
        """Computes all new rows or those that changed. Of the prompt it computes all rows when due, or the last in the
        first layer."""
        model, lengths = self._model, step.prompt_lengths[:, None]
        new = model.embed(step.tokens.gather(1, lengths + self._new_rows))
        old, slots = None, lengths - 1
        if prompt_due:
            slots = torch.where(self._prompt_rows < lengths, self._prompt_rows, -1)
        if prompt_due or self._shift:
            old = model.embed(step.tokens.gather(1, slots.clamp(min=0)))
        last = lengths - 1 if prompt_due else torch.zeros_like(lengths)
        for index in range(len(model.layers)):
            new, old = self._layer(index, step, new, new_due or index == 0, old, slots)
            if index == 0 and old is not None:
                first = self._gather(old, last)
            if not prompt_due:
                old = None
        if not self._shift:
            return new
        if old is not None:  # the prompt was due
            end = self._gather(old, last)
            self._remember(first, end)
        else:
            assert self._after_first is not None
            end = (first + self._after_first).to(first.dtype)
        return torch.cat([end, new[:, :-1]], 1)

    def _layer(
        self, index: int, step: _Step, new: torch.Tensor, all_rows: bool, old: torch.Tensor | None, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs a layer on the residual streams of all or some new rows, and of the prompt's rows at `slots`."""
        layer, qkv, at, chosen = self._model.layers[index], [], [], None
        if old is not None:
            qkv.append(layer.project(layer.normed(old)))
            at.append(slots)
        normed = layer.normed(new)
        if all_rows:
            chosen = step.new_rows
            qkv.append(layer.project(normed))
        elif self._ratio > 0:
            v = layer.project(normed, "v")
            chosen = self._moved_(v, index, step)
            if chosen is not None:
                qkv.append(torch.cat([layer.project(self._gather(normed, chosen), "qk"), self._gather(v, chosen)], 2))
        if chosen is not None:
            at.append(step.recomputed_rows(chosen))
        if at:  # all K and V are stored before any row reads them
            added = layer.project_out(step.base._replace(slots=torch.cat(at, 1)).attend_(torch.cat(qkv, 1), index))
        if old is not None:
            old, added = old + added[:, : old.shape[1]], added[:, old.shape[1] :]
            old = old + layer.feed_forward(old)
        if chosen is None:
            return self._add(self._add(new, self._attention[index]), self._feed_forward[index]), old
        new = self._add(new, self._attention[index], added, chosen)
        update = layer.feed_forward(new if all_rows else self._gather(new, chosen))
        return self._add(new, self._feed_forward[index], update, chosen), old

    def _moved_(self, v: torch.Tensor, layer: int, step: _Step) -> torch.Tensor | None:
        """Indices of the rows whose values differ most from the cached ones, which are replaced by `v`; None: no
        row."""
        max_selected = int(self._generated * self._ratio)
        quota = None if step.counts is None else (step.counts.double() * self._ratio).long()
        starts, fresh, cached, table, update = (
            step.prompt_lengths,
            v,
            self._kv.v[layer],
            self._kv.block_table,
            self._update,
        )
        if isinstance(self._model, SomeHeads):
            # The similarity is over all heads, on copies; selected rows get their new values when they are stored.
            slots = (starts[:, None] + self._new_rows).clamp(max=self._kv.capacity - 1)[..., None, None]
            values = self._kv.layer(layer, self._kv.capacity)[1]
            values = values.gather(1, slots.expand(-1, -1, *values.shape[2:]))
            if update == "all":
                select_stale_rows_(
                    v, cached, starts, max_selected=0, counts=step.counts, block_table=table, backend=self._backend
                )
            fresh, cached = (x.contiguous() for x in self._model.with_all_heads(torch.stack((v, values))))
            starts, table, update = torch.zeros_like(starts), None, "none"
        rows = select_stale_rows_(
            fresh,
            cached,
            starts,
            max_selected=max_selected,
            quota=quota,
            counts=step.counts,
            update=update,
            block_table=table,
            backend=self._backend,
        )
        return rows if max_selected else None

    def _keep(self, cached: torch.Tensor, added: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Caches the rows of `added` at `positions` ``(batch, generated)`` and returns it."""
        cached.copy_(torch.where((positions >= 0)[..., None], self._gather(added, positions), cached))
        return added

    def _remember(self, first: torch.Tensor, end: torch.Tensor) -> None:
        """Caches the prompt's last row after the last layer minus after the first layer, without rounding."""
        wide = torch.promote_types(end.dtype, torch.float32)
        self._after_first = end.to(wide) - first.to(wide)

    def _gather(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return gather_rows(x, rows, backend=self._backend)

    def _add(
        self, x: torch.Tensor, cached: torch.Tensor, rows: torch.Tensor | None = None, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        return add_cached_rows_(x, cached, rows, index, backend=self._backend)
