"""The end of a step in which every sequence has one known token, as one op of the CPU.

A step of a small model on a CPU takes as long as a hundred of PyTorch's small ops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels import _native, backends
from pdkernels._validation import KERNEL_DTYPES
from pdkernels.cache import ContiguousKVCache, PagedKVCache, WindowedCache
from pdkernels.generation.session import has_no_choice, is_end
from pdkernels.ops.library import LIBRARY, NAMESPACE, counts_writes, run_counted, schema_of

OP = "next_token_"


class NextTokenArguments(NamedTuple):
    """The arguments of the op; `NextTokenInputs` in python_bindings/next_token.h."""

    table: Tensor
    remaining: Tensor
    lengths: Tensor | None
    logits: Tensor
    tokens: Tensor | None
    """None: the most probable ones but for those of `suppress`."""
    ends: Tensor | None
    suppress: list[int]
    capacity: int
    draft: int
    """The column of the next step's token."""


LIBRARY.define(f"{OP}({schema_of(NextTokenArguments, mutated=['table', 'remaining', 'lengths'])}) -> ()")
_run = getattr(getattr(torch.ops, NAMESPACE), OP).default
_WRITES = counts_writes(_run)


def write_next_token_(
    entry: Any, remaining: Tensor, cache: Any, logits: Tensor, tokens: Tensor, ends: Tensor | None
) -> None:
    """Commits the row of each sequence that took part in a step, and makes `tokens` ``(batch, 1)``, chosen from
    `logits` ``(batch, 1, V)``, the known ones of the next step.

    `pending` of the `entry` is whether a sequence took part. One that ends with its token, or whose logits gave no
    choice, has nothing `remaining`. Rows of a finished sequence are ignored, whatever their logits are.
    """
    if _run_op(entry, remaining, cache, logits, tokens, ends, ()):
        return
    cache.commit_(entry.pending)
    no_choice = has_no_choice(logits, tokens)[:, 0] & (entry.pending > 0)
    entry.accepted.fill_(1).masked_fill_(no_choice, -1)
    remaining.sub_(entry.pending).masked_fill_(no_choice, 0)
    entry.draft.copy_(tokens.clamp(min=0))
    if ends is not None:
        remaining.masked_fill_(is_end(tokens[:, 0], ends), 0)
    entry.pending.copy_(remaining.clamp(max=1))


def write_likeliest_(
    entry: Any, remaining: Tensor, cache: Any, logits: Tensor, ends: Tensor | None, suppress: tuple[int, ...]
) -> bool:
    """`write_next_token_` for the most probable tokens other than those of `suppress`, where the op can; else False,
    and nothing is written."""
    return _run_op(entry, remaining, cache, logits, None, ends, suppress)


def _run_op(
    entry: Any,
    remaining: Tensor,
    cache: Any,
    logits: Tensor,
    tokens: Tensor | None,
    ends: Tensor | None,
    suppress: tuple[int, ...],
) -> bool:
    if type(logits) is not Tensor or logits.device.type != "cpu" or logits.dtype not in KERNEL_DTYPES:
        return False
    # Nobody may watch or record the ops of a step.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return False
    if not _native.has_native() or backends.DEFAULT == "reference":
        return False
    commits = type(cache) in (ContiguousKVCache, PagedKVCache)
    commits = commits or (isinstance(cache, WindowedCache) and cache.commits_lengths)
    lengths = cache.lengths if commits else None
    draft = entry.column("draft")
    arguments = NextTokenArguments(
        entry.table, remaining, lengths, logits, tokens, ends, [*suppress], cache.capacity if commits else 0, draft
    )
    try:
        if not commits:
            cache.commit_(entry.pending)
        run_counted(_run, arguments, _WRITES)
    except (RuntimeError, ValueError):  # nothing is written yet
        if not commits:
            raise
        return False
    return True
