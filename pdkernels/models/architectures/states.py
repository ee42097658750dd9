"""The recurrent states of a forward: every layer's scan goes through here, on a cache or from a state of zeros.

A forward replays the committed rows of the last draft, writes each state once, and gives outputs for all new rows
without writing more. Rows are computed one after the other, as decoding would, so a row has the same bits however a
text was split into forwards.
"""

from __future__ import annotations

import weakref
from typing import Any, Literal

import torch
from torch import Tensor

from pdkernels._validation import check, message
from pdkernels.backends import backend_of
from pdkernels.cache.hybrid import HybridCache, StateShape, StateSlots, StateStep
from pdkernels.masks import TilePlan
from pdkernels.ops.recurrent_state import gated_delta_, selective_state_, short_conv_

Activation = Literal["none", "silu"]


class States:
    """The states of the layers in one forward over `rows` new rows.

    Args:
        cache: where they are kept; None: they begin with zeros, and are forgotten.
        batch, rows, device: of the forward.
        counts: ``(batch,)`` rows that may be committed; None: all.
        mask: the plan of the new rows. A row follows the last earlier row that it sees.
    """

    def __init__(
        self,
        cache: HybridCache | None,
        batch: int,
        rows: int,
        device: torch.device,
        counts: Tensor | None = None,
        mask: TilePlan | None = None,
    ) -> None:
        self.cache = cache
        self.shapes: dict[Any, StateShape] = {}
        """Those of this forward."""
        parents = None if mask is None else parents_of(mask)
        if cache is None:
            nothing = torch.zeros(batch, dtype=torch.int64, device=device)
            row_parents = None if parents is None else parents.expand(batch, rows).contiguous()
            # A tree has no last row, so none of it can become part of a state.
            self._step = StateStep(nothing, None, None, row_parents, 0 if row_parents is None else None)
        else:
            self._step = cache.begin_(rows, counts, parents=parents, compute_all=mask is not None)

    def _slots(self, name: Any, state: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor) -> StateSlots:
        """`inputs`: what is kept of the new rows, or tensors like it."""
        check(name not in self.shapes, "models.States", "name", "be that of one state", name)
        self.shapes[name] = StateShape(state, dtype, tuple((tuple(x.shape[2:]), x.dtype) for x in inputs))
        if self.cache is not None:
            return self.cache.states[name]
        batch, rows = inputs[0].shape[:2]
        most = 0 if self._step.keep == 0 else rows
        pending = tuple(x.new_empty(batch, most, *x.shape[2:]) for x in inputs)
        return StateSlots(inputs[0].new_empty((batch, *state), dtype=dtype), self._step.lengths.clone(), pending)

    def short_conv(
        self, name: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none"
    ) -> Tensor:
        """A causal convolution of x ``(batch, rows, channels)`` with weight ``(channels, width)``; see
        `pdkernels.short_conv_`."""
        slots = self._slots(name, (weight.shape[1] - 1, x.shape[2]), x.dtype, x)
        (pending,) = slots.pending
        out: Tensor = short_conv_(
            slots.state, slots.lengths, pending, x, weight, self._step.lengths, bias=bias, activation=activation,
            **self._options(x),
        )  # fmt: skip
        return out

    def _options(self, x: Tensor) -> dict[str, Any]:
        _, counts, pending_index, parents, keep = self._step
        step = {"counts": counts, "pending_index": pending_index, "parents": parents, "keep": keep}
        return {**step, "backend": backend_of(x.dtype)}

    def gated_delta(
        self,
        name: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        l2norm_eps: float | None,
        **gates: Any,
    ) -> Tensor:
        """The gated delta rule of q, k ``(batch, rows, key_heads, key_dim)`` and v ``(batch, rows, heads, value_dim)``;
        see `pdkernels.gated_delta_`."""
        exact = torch.promote_types(v.dtype, torch.float32)
        update = v.new_empty((), dtype=exact).expand(v.shape)
        slots = self._slots(name, (v.shape[2], k.shape[3], v.shape[3]), exact, k, update, g)
        pending_k, pending_update, pending_g = slots.pending
        out: Tensor = gated_delta_(
            slots.state, slots.lengths, pending_k, pending_update, pending_g, q, k, v, g, beta, self._step.lengths, l2norm_eps=l2norm_eps,
            **gates, **self._options(v),
        )  # fmt: skip
        return out

    def selective_state(
        self,
        name: Any,
        x: Tensor,
        dt: Tensor | None,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
    ) -> Tensor:
        """Mamba 2 of x ``(batch, rows, heads, head_dim)``, dt ``(batch, rows, heads)``, a ``(heads,)``, b and c
        ``(batch, rows, groups, state_size)``, or without dt lightning attention; see `pdkernels.selective_state_`."""
        exact, inputs = torch.promote_types(x.dtype, torch.float32), (x, b) if dt is None else (x, b, dt)
        slots = self._slots(name, (x.shape[2], b.shape[3], x.shape[3]), exact, *inputs)
        pending_x, pending_b, *optional = slots.pending
        pending_dt = optional[0] if optional else None
        out: Tensor = selective_state_(
            slots.state, slots.lengths, pending_x, pending_b, pending_dt, x, b, c, dt, a, self._step.lengths, D=d, dt_bias=dt_bias,
            dt_softplus=dt_softplus, dt_limit=dt_limit, **self._options(x),
        )  # fmt: skip
        return out


_PARENTS: weakref.WeakKeyDictionary[TilePlan, Tensor | None] = weakref.WeakKeyDictionary()


def parents_of(mask: TilePlan) -> Tensor | None:
    """The new row that each row of a plan follows, ``(rows,)`` or ``(batch, rows)``: the last earlier one that it sees,
    -1: none. None: every row follows the one before it.

    Raises:
        NotImplementedError: a mask under which a row sees a later one that does not see it: it would follow that one.

    >>> import pdkernels as pd
    >>> parents_of(pd.masks.causal(4).plan()), parents_of(pd.masks.quadratic(2, 2).plan()).tolist()
    (None, [-1, 0, 0, 2, 1, 4])
    """
    if mask not in _PARENTS:
        dense = mask.dense()
        if bool((dense.triu(1) & ~dense.mT).any()):
            expectation = "have rows that come after what they follow, for recurrent layers"
            raise NotImplementedError(message("models.States", "mask", expectation, "rows that see later ones"))
        order = torch.arange(mask.kv_len, device=dense.device)
        parents = torch.where(dense.tril(-1), order, -1).amax(-1) if mask.kv_len else order
        chain = bool((parents == order - 1).all())
        _PARENTS[mask] = None if chain else parents
    return _PARENTS[mask]
