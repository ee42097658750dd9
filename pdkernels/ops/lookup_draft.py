"""Drafts that are looked up: what followed earlier occurrences of a text's last tokens, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check_device, check_index, check_int, check_shape, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define
from pdkernels.reference import lookup_draft as reference

__all__ = ["lookup_draft_"]


def lookup_draft_(
    draft: Tensor,
    draft_lengths: Tensor,
    tokens: Tensor,
    ends: Tensor,
    *,
    start: int = 0,
    max_match: int = 5,
    min_match: int = 2,
    growth: int = 3,
    backend: Backend = "auto",
) -> None:
    """Drafts what followed the last tokens of a text where they occurred before.

    The text of sequence ``b`` is ``tokens[b, start:ends[b]]`` and then its known token ``draft[b, 0]``, which is
    written at ``ends[b]``. Other texts may lie before `start`. -1 separates texts. Of all places that the last
    `max_match` tokens or fewer of them precede, and at which a token follows in the same text, the one with the longest
    match wins, of equally long ones the last::

        tokens  5 1 2 3 4 | 7 1 2 .   the known token 3 is written at the dot; 1 2 3 occurred before, 7 1 2 3 did not
        draft   3 4                   one guess: the other text ends there

    A draft that reaches the end of the text continues with itself, so that a repeating text is drafted at full length.

    Args:
        draft: ``(batch, slots)`` int64, of any strides: the known token, then guesses, which are written; 0: none.
        draft_lengths: ``(batch,)`` int32 or int64, each in ``[0, slots]``: the most tokens of each draft, the known one
            included. Becomes the length of the draft, if that is shorter. A sequence with 0 is inactive: nothing of it
            is read or written.
        tokens: ``(batch, width)`` int64, with contiguous rows; the known token is written.
        ends: ``(batch,)`` int32 or int64, each in ``[start, width)``: where a text ends, and its known token goes.
        start: where the texts begin.
        max_match: the largest number of tokens compared, at least 1.
        min_match: the least number of tokens that must match, at least 1.
        growth: a match of `n` tokens gives at most ``growth * n`` guesses; one of `max_match` tokens fills the draft.
            At least 1.
        backend: see `pdkernels.show_config`.

    Raises:
        ValueError: shapes or numbers that do not fit; on the CPU a length or an end out of its range (nothing is
            written then). On CUDA such an end leaves its sequence alone and such a length is clamped, unless
            ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: other dtypes.

    Deterministic and independent of the batch size. Source: Saxena, "Prompt lookup decoding"
    (github.com/apoorvumang/prompt-lookup-decoding, 2023), with the longest match and a length that grows with it.

    Example:
        >>> import torch, pdkernels as pd
        >>> tokens = torch.tensor([[5, 1, 2, 3, 4, -1, 7, 1, 2, 0]])
        >>> draft, lengths = torch.tensor([[3, 0, 0]]), torch.tensor([3])
        >>> pd.lookup_draft_(draft, lengths, tokens, torch.tensor([9]), start=6)
        >>> draft, lengths, tokens[0, 9]
        (tensor([[3, 4, 0]]), tensor([2]), tensor(3))
    """
    call(lookup_draft_op, (draft, draft_lengths, tokens, ends, start, max_match, min_match, growth), draft, backend)


def _fake(
    draft: Tensor,
    draft_lengths: Tensor,
    tokens: Tensor,
    ends: Tensor,
    start: int = 0,
    max_match: int = 5,
    min_match: int = 2,
    growth: int = 3,
) -> None:
    op = "lookup_draft_"
    for name, tensor in (("draft", draft), ("tokens", tokens)):
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
        check_type(tensor.dtype == torch.int64, op, name, "be torch.int64", tensor.dtype)
    if draft.dim() != 2 or draft.shape[1] == 0:
        fail(op, "draft", "have shape (batch, slots), with a slot for the known token", tuple(draft.shape))
    check_shape(op, "tokens", tokens, (draft.shape[0], None))
    check_device(op, "tokens", tokens, draft.device)
    if tokens.shape[1] > 1 and tokens.stride(1) > 1:  # 0: expanded, which is refused as for all that is written
        fail(op, "tokens", "have contiguous rows", f"strides {tokens.stride()}")
    check_index(op, "draft_lengths", draft_lengths, (draft.shape[0],), draft.device)
    check_index(op, "ends", ends, (draft.shape[0],), draft.device)
    for name, value, minimum in (
        ("start", start, 0),
        ("max_match", max_match, 1),
        ("min_match", min_match, 1),
        ("growth", growth, 1),
    ):
        check_int(op, name, value, minimum)


def _example(draw: Draw) -> dict[str, Any]:
    tokens = draw.ints(0, 2, 2, 40)
    tokens[:, 9] = -1
    ends = draw.ints(20, 39, 2)
    return {
        "draft": draw.ints(0, 2, 2, 8),
        "draft_lengths": torch.tensor([8, 5]),
        "tokens": tokens,
        "ends": ends,
        "start": 10,
    }


lookup_draft_op = define(
    "lookup_draft_(Tensor(a!) draft, Tensor(b!) draft_lengths, Tensor(c!) tokens, Tensor ends, int start=0, int max_match=5, "
    "int min_match=2, int growth=3) -> ()",
    fake=_fake,
    reference=reference.lookup_draft_,
    example=_example,
    gradients="own",
)
