"""The end of a step in which every sequence has one known token, as one op of the CPU.

A step of a small model on a CPU takes as long as a hundred of PyTorch's small ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdkernels import _native
from pdkernels._validation import KERNEL_DTYPES
from pdkernels.decoding.steps.entry import Entry
from pdkernels.generation.session import has_no_choice, is_end
from pdkernels.ops.library import LIBRARY, NAMESPACE, counts_writes, run_counted

OP = "next_token_"

LIBRARY.define(
    f"{OP}(Tensor(a!) table, Tensor(b!) remaining, Tensor logits, Tensor tokens, Tensor? ends, int draft) -> ()"
)
_run = getattr(getattr(torch.ops, NAMESPACE), OP).default
_WRITES = counts_writes(_run)


def write_next_token_(entry: Entry, remaining: Tensor, logits: Tensor, token: Tensor, ends: Tensor | None) -> None:
    """Makes `token` ``(batch, 1)``, chosen from `logits` ``(batch, 1, V)``, the known one of the next step.

    `pending` of the `entry` is whether a sequence took part in this one. One that ends with its token, or whose logits
    gave no choice, has nothing `remaining`. Rows of a finished sequence are ignored, whatever their logits are.
    """
    if _serves(logits):
        run_counted(_run, (entry.table, remaining, logits, token, ends, entry.column("draft")), _WRITES)
        return
    no_choice = has_no_choice(logits, token)[:, 0] & (entry.pending > 0)
    entry.accepted.fill_(1).masked_fill_(no_choice, -1)
    remaining.sub_(entry.pending).masked_fill_(no_choice, 0)
    entry.draft.copy_(token.clamp(min=0))
    if ends is not None:
        remaining.masked_fill_(is_end(token[:, 0], ends), 0)
    entry.pending.copy_(remaining.clamp(max=1))


def _serves(logits: Tensor) -> bool:
    """Whether the op takes such logits, and nobody watches or records the ops of a step."""
    if type(logits) is not Tensor or logits.device.type != "cpu" or logits.dtype not in KERNEL_DTYPES:
        return False
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state()
    return not watched and _native.has_native()
