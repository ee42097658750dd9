"""A drafter's forwards on the CPU as ops: the layers of one as one op, as those of a `Transformer`
(`pdkernels.models.architectures.whole_step`), and a chain of greedy guesses, each made from the one before, as another.

Every guess is a forward of one row through a layer or two. Between such forwards Python takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from pdkernels._attention import PlanArguments
from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.models.architectures import whole_step
from pdkernels.models.architectures.attention import plan_of
from pdkernels.models.architectures.transformer import Transformer
from pdkernels.models.architectures.whole_step import Binding, Parts
from pdkernels.ops.library import LIBRARY, NAMESPACE, counts_writes, run_counted, schema_of

OP = "draft_chain_"


class ChainArguments(NamedTuple):
    """The arguments of the op; `ChainInputs` in python_bindings/draft_chain.h."""

    bound: Tensor
    hidden: Tensor
    """``(batch, 1, hidden_size)``, the rows that the first guess is made from; then those of the last one."""
    lengths: Tensor
    """``(batch,)`` int64, cached rows, to which those of the chain are added."""
    k_cache: Tensor
    v_cache: Tensor
    busy: Tensor
    """``(batch,)`` int64: 1 where the rows of the chain are stored, or 0."""
    block_table: Tensor | None
    cos: Tensor
    sin: Tensor
    vocabulary: Tensor
    guesses: int
    plan: PlanArguments


_WRITTEN = ["hidden", "lengths", "k_cache", "v_cache"]
LIBRARY.define(f"{OP}({schema_of(ChainArguments, mutated=_WRITTEN)}) -> Tensor guesses")
_run = getattr(getattr(torch.ops, NAMESPACE), OP).default
_WRITES = counts_writes(_run)


class DrafterBinding(Binding):
    """The parameters of a drafter, with the embedding and the head that it has of its target."""

    def __init__(self) -> None:
        super().__init__()
        self.target: Transformer | None = None
        """Whose embedding and head it shares; None: rows of the embedding are given, and logits are not asked for."""

    def parts(self, model: Any) -> Parts:
        bindable: Parts = model.parts()
        if self.target is None:
            return bindable
        target, (embedding, head) = self.target, (bindable.embedding, bindable.head)
        shared = target.embedding if target.head is None else target.head
        return bindable._replace(
            embedding=target.embedding if embedding is None else embedding, head=shared if head is None else head
        )

    def holders(self, model: Any) -> Sequence[nn.Module]:
        return () if self.target is None else (self.target,)


def chained(head: Any, target: Any) -> DrafterBinding | None:
    """A binding for `draft_chain`; None: the target's embedding or head is more than a matrix."""
    shares = head.embedding is None or head.head is None
    if shares and not (type(target) is Transformer and target.is_plain and target.config.embedding_scale == 1):
        return None
    if head.head is None and target.config.logits_softcap is not None:
        return None
    binding = DrafterBinding()
    binding.target = target if shares else None
    return binding


def draft_chain(
    head: Any, binding: DrafterBinding, hidden: Tensor, cache: Any, busy: Tensor, guesses: int
) -> Tensor | None:
    """Greedy guesses ``(batch, guesses)`` of a drafter, as the target's ids, each made from the one before; None: they
    must be made one by one.

    Args:
        head: an `EagleHead` or `MtpHead`.
        binding: of the drafter, for this target.
        hidden: ``(batch, 1, hidden_size)``, its last rows.
        cache: its own. The rows of the guesses are stored after those of `cache.lengths`, which stay as they are.
        busy: ``(batch,)`` int64, 1 for sequences whose rows are stored, or 0.
    """
    if type(cache) not in (ContiguousKVCache, PagedKVCache) or not torch.is_inference_mode_enabled():
        return None
    if not head.is_plain:
        return None
    rotation, plan = head.tables.covering(cache.capacity + 1, hidden.device, hidden.dtype), plan_of(cache, 1, None)
    if plan is None or not whole_step.serves(hidden, cast(Any, cache), rotation):
        return None
    bound = binding.of(head)
    if bound is None:
        return None
    arguments = (
        *(bound, hidden.clone(), cache.lengths.clone(), cache.k, cache.v, busy, cache.block_table),
        *(rotation.cos, rotation.sin, head.vocabulary, guesses, *plan.arguments),
    )
    try:
        tokens: Tensor = run_counted(_run, arguments, _WRITES)
    except RuntimeError:  # the parts say what does not fit
        return None
    return tokens
