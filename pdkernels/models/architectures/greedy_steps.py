"""Steps of greedy decoding as one op of the CPU, for a model whose forward is one (`whole_step`): the forward, the
choice, the commit and the next step's token.

Each forward reads all weights, so nothing of Python is left in the processor's caches after it: what runs between two
takes several times as long as it would in a loop. What nobody watches runs several steps at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels import _native
from pdkernels._attention import PlanArguments
from pdkernels.cache import ContiguousKVCache, PagedKVCache, WindowedCache
from pdkernels.models.architectures import whole_step
from pdkernels.models.architectures.attention import plan_of
from pdkernels.models.architectures.caches import expect_
from pdkernels.models.architectures.transformer import Transformer
from pdkernels.ops.library import LIBRARY, NAMESPACE, counts_writes, run_counted, schema_of

OP = "greedy_steps_"


class GreedyArguments(NamedTuple):
    """The arguments of the op; `GreedyInputs` in python_bindings/greedy_steps.h."""

    bound: Tensor
    table: Tensor
    """``(batch, columns)`` int64: what is pending, what was accepted, and in column `draft` the known token."""
    remaining: Tensor
    lengths: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor | None
    more_k: list[Tensor]
    """As in `LayersArguments` of whole_step.py, like the other lists."""
    more_v: list[Tensor]
    more_tables: list[Tensor]
    groups: list[int]
    ends: Tensor | None
    cos: Tensor
    sin: Tensor
    window_cos: Tensor | None
    window_sin: Tensor | None
    suppress: list[int]
    capacity: int
    draft: int
    steps: int
    plan: PlanArguments


_WRITTEN = ["table", "remaining", "lengths", "k_cache", "v_cache", "more_k", "more_v"]
LIBRARY.define(f"{OP}({schema_of(GreedyArguments, mutated=_WRITTEN)}) -> Tensor entries")
_run = getattr(getattr(torch.ops, NAMESPACE), OP).default
_WRITES = counts_writes(_run)


class GreedySteps:
    """The steps of one batch; all tensors keep their memory.

    Args:
        model, cache: a transformer, and a cache of it.
        table, draft, remaining, ends, suppress: of the op.
    """

    def __init__(
        self,
        model: Transformer,
        cache: ContiguousKVCache | PagedKVCache | WindowedCache,
        table: Tensor,
        draft: int,
        remaining: Tensor,
        ends: Tensor | None,
        suppress: tuple[int, ...],
    ) -> None:
        self._model, self._cache, self._table = model, cache, table
        self._remaining, self._ends = remaining, ends
        self._options = [*suppress], cache.capacity, draft

    def run(self, steps: int) -> list[list[list[int]]] | None:
        """Runs up to so many steps, fewer if nothing is pending any more, and returns the table after each of them.
        None: they must run part by part."""
        model, cache = self._model, self._cache
        if not model.is_plain or not torch.is_inference_mode_enabled() or cache.adapters is not None:
            return None
        plan, rotations = plan_of(cache, 1, None), whole_step.rotations(model, cache.capacity + 1)
        if plan is None or not whole_step.serves(self._table, cache, rotations[0]):
            return None
        bound = model.binding.of(model)
        if bound is None:
            return None
        expect_(cache, 1, None)
        written = self._table, self._remaining, cache.lengths
        before = [tensor.clone() for tensor in written] if steps > 1 else []
        arguments = (
            *(bound, self._table, self._remaining, cache.lengths, *whole_step.places(cache), self._ends),
            *(*whole_step.tables_of(*rotations), *self._options, steps, *plan.arguments),
        )
        try:
            entries: list[list[list[int]]] = run_counted(_run, arguments, _WRITES).tolist()
        except (RuntimeError, ValueError):  # the parts say what does not fit, after the steps before that one
            for tensor, values in zip(written, before):
                tensor.copy_(values)
            return None
        return entries


def greedy_steps(model: Any, cache: Any, *arguments: Any) -> GreedySteps | None:
    """`GreedySteps` with these arguments; None: the model or its cache is another one."""
    # What wraps a model may pass its attributes on.
    if type(model) is not Transformer or type(cache) not in (ContiguousKVCache, PagedKVCache, WindowedCache):
        return None
    # A cap can make the two largest logits one, and the op chooses among those before it.
    if model.config.logits_softcap is not None or not _native.has_native() or cache.device.type != "cpu":
        return None
    return GreedySteps(model, cache, *arguments)
