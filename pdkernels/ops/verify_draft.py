"""Greedy verification of drafted tokens, batched and on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels._validation import check_index, check_indices, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define, schema_of
from pdkernels.reference import verify_draft as reference

__all__ = ["DraftVerdict", "verify_draft"]

MAX_CANDIDATES = 2**16


class DraftVerdict(NamedTuple):
    """The result of `verify_draft`, one entry per sequence, on the device of the draft."""

    accepted: Tensor
    """(batch,) int64: accepted tokens of the draft, including the first one; 0 for an inactive sequence."""
    next_token: Tensor
    """(batch,) int64: the model's token after the accepted ones; the end token if they end with one; -1 if inactive."""
    ended: Tensor
    """(batch,) bool: an end token is among the accepted tokens or is the next one."""
    new_draft: Tensor
    """(batch, width) int64: the model's tokens from `next_token` on, then `refill`."""
    candidate: Tensor
    """(batch,) int64: the index of the candidate with the longest accepted prefix; 0 without candidates."""


def verify_draft(
    draft: Tensor,
    predictions: Tensor,
    *,
    draft_lengths: Tensor | None = None,
    end_tokens: Tensor | None = None,
    refill: Tensor | None = None,
    backend: Backend = "auto",
) -> DraftVerdict:
    """Accepts the longest prefix of a draft that the model would have emitted itself.

    ``draft[..., 0]`` is already verified. ``predictions[..., i]`` is the model's own token after ``draft[..., i]``. The
    accepted prefix is the first token and all following ones up to the first that differs from the prediction before
    it::

        draft        a b c x y        a is known
        predictions  b c d y z        d = next_token, accepted = 3 (a b c)
        new_draft    d y z r r        the model's tokens from there on, then refill

    With several candidates the one with the longest accepted prefix wins, the first on ties. If there is an end token
    among the accepted tokens, they are cut after the first one, which is repeated as `next_token`. If only `next_token`
    is an end token, it is *not* counted in `accepted`. Both cases set `ended`.

    Args:
        draft: ``(batch, width)`` or ``(batch, candidates, width)``, int32 or int64 token ids.
        predictions: the same shape, int32 or int64.
        draft_lengths: ``(batch,)`` the length of each draft, 0 for an inactive sequence; None: the whole width.
        end_tokens: ``(n,)`` ids that end a sequence.
        refill: ``(batch, width)`` ids for the positions of `new_draft` that the model did not predict; None: zeros.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: shapes that do not fit, or on the CPU a length outside ``[0, width]``. On CUDA such a length is
            clamped, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: tensors that are not int32 or int64.

    Deterministic and independent of the batch size. Source: Jacobi Forcing, Algorithm 1; semantics of the greedy
    single-block decoder.

    Example:
        >>> import torch, pdkernels as pd
        >>> draft, predictions = torch.tensor([[1, 2, 3, 9, 9]]), torch.tensor([[2, 3, 4, 5, 6]])
        >>> verdict = pd.verify_draft(draft, predictions)
        >>> verdict.accepted.item(), verdict.next_token.item(), verdict.new_draft.tolist()
        (3, 4, [[4, 5, 6, 0, 0]])
    """
    return DraftVerdict(*call(verify_draft_op, (draft, predictions, draft_lengths, end_tokens, refill), draft, backend))


def _fake(
    draft: Tensor,
    predictions: Tensor,
    draft_lengths: Tensor | None = None,
    end_tokens: Tensor | None = None,
    refill: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    op = "verify_draft"
    check_type(isinstance(draft, Tensor), op, "draft", "be a tensor", type(draft).__name__)
    if draft.dim() not in (2, 3):
        fail(op, "draft", "have shape (batch, width) or (batch, candidates, width)", tuple(draft.shape))
    device, batch, width = draft.device, draft.shape[0], draft.shape[-1]
    check_index(op, "draft", draft, draft.shape, device)
    check_index(op, "predictions", predictions, draft.shape, device)
    if draft.dim() == 3 and not 1 <= draft.shape[1] <= MAX_CANDIDATES:
        fail(op, "draft", f"have 1 to {MAX_CANDIDATES} candidates", tuple(draft.shape))
    check_indices(op, (batch,), device, draft_lengths=draft_lengths)
    check_indices(op, (None,), device, end_tokens=end_tokens)
    check_indices(op, (batch, width), device, refill=refill)
    numbers, flags = draft.new_empty(batch, dtype=torch.int64), draft.new_empty(batch, dtype=torch.bool)
    new_draft = draft.new_empty((batch, width), dtype=torch.int64)
    return numbers, torch.empty_like(numbers), flags, new_draft, torch.empty_like(numbers)


def _example(draw: Draw) -> dict[str, Any]:
    return {"draft": draw.ints(0, 1, 3, 9), "predictions": draw.ints(0, 1, 3, 9)}


verify_draft_op = define(
    "verify_draft(Tensor draft, Tensor predictions, Tensor? draft_lengths=None, Tensor? end_tokens=None, "
    f"Tensor? refill=None) -> ({schema_of(DraftVerdict)})",
    fake=_fake,
    reference=reference.verify_draft,
    example=_example,
    gradients="own",
)
