"""Committing guesses for masked tokens by a rule, batched and on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels._validation import (
    FINITE,
    check_device,
    check_index,
    check_indices,
    check_int,
    check_number,
    check_shape,
    check_type,
    fail,
    refuse,
    sentence,
)
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define, keys, schema_of
from pdkernels.reference import unmask as reference

__all__ = ["Unmasked", "unmask_"]

OP = "unmask_"


class Unmasked(NamedTuple):
    """The result of `unmask_`, one entry per sequence or segment: ``(batch,)`` or ``(batch, segments)``."""

    committed: Tensor
    """int64: tokens that were committed."""
    remaining: Tensor
    """int64: remaining mask tokens in the window."""
    done: Tensor
    """bool: none is left."""


def unmask_(
    tokens: Tensor,
    ids: Tensor,
    confidence: Tensor | None = None,
    *,
    mask_token: int,
    positions: Tensor | None = None,
    windows: Tensor | None = None,
    quota: int | Tensor = 1,
    threshold: float | None = None,
    min_count: int | Tensor = 1,
    factor: float | None = None,
    strict: bool = False,
    seed: int | Tensor = 0,
    step: int | Tensor = 0,
    backend: Backend = "auto",
) -> Unmasked:
    """Ends a step of a masked-diffusion sampler, in place: the guesses that a rule selects replace their mask tokens.

    Candidate ``r`` of a sequence guesses ``ids[b, r]`` for ``tokens[b, positions[b, r]]``. It is *eligible* if that
    token is the mask token, lies in the window, and the guess is an id (not negative) other than the mask token. The
    ``m`` eligible candidates are ranked by descending confidence, NaN last, the lower ``r`` first on ties, and the
    first ``n`` of them are committed::

        tokens       5 1 _ _ _ _        _ is the mask token
        ids              7 8 9 4        positions 2 3 4 5
        confidence      .9 .4 .95 .8
        quota=2      5 1 7 _ 9 _        committed 2, remaining 2

    ======================  ==========================================================================================
    given                   ``n``
    ======================  ==========================================================================================
    nothing                 ``min(quota, m)``
    `threshold`             ``c``, how many have ``confidence >= threshold`` (`strict`: ``>``), if ``c >= min_count``;
                            else ``min(quota, m)``
    `factor`                ``k - 1`` for the first rank ``k >= 2`` with ``confidence < 1 - factor / (k + 1)``; ``m`` if
                            there is none, or if it is the last rank (as released); NaN is below any such number
    ======================  ==========================================================================================

    Args:
        tokens: ``(batch, length)`` int32 or int64, any strides but those of an expanded tensor; written.
        ids: ``(batch, candidates)``, dtype of tokens. A guess that is negative or the mask token is never committed.
        confidence: ``(batch, candidates)`` float32 (float64 with ``backend="reference"``), any number that grows with
            certainty; compared with the threshold exactly, in float64. None: a random order, see below.
        mask_token: the id of a masked position.
        positions: ``(batch, candidates)`` int32 or int64, distinct in a sequence, -1: no candidate. None: candidate r
            is for token r, and there are as many candidates as tokens.
        windows: ``(batch, 2)`` int32 or int64, half-open ranges ``[start, end)`` of tokens, or
            ``(batch, segments, 2)``: disjoint segments, each with its own ranking and quota. Empty ones are allowed.
            None: all tokens.
        quota, min_count: int, or int32 or int64 tensor of the shape of the results; not negative.
        threshold, factor: at most one of them; a factor is finite and not negative.
        strict: see `threshold`.
        seed, step: of the random order; each an int or a ``(batch,)`` int32 or int64 tensor.
        backend: see `pdkernels.show_config`.

    Returns:
        `Unmasked`. ``remaining`` counts all mask tokens of the window, not only those with a candidate.

    Raises:
        ValueError: shapes that do not fit; both `threshold` and `factor`; on the CPU windows outside ``[0, length]``,
            windows that overlap, positions outside ``[-1, length)`` or given twice, a negative quota or min_count
            (nothing is written then). On CUDA a sequence with such values is left as it was, ``committed`` 0,
            ``remaining`` counted in what its windows share with the tokens; positions given twice are not detected, and
            any one of the guesses is kept. ``PDKERNELS_DEBUG_CHECKS=1`` raises there.
        TypeError: dtypes that do not fit.

    Without a confidence, the uniform number ``(word + 0.5) / 2**32`` of a candidate's position is used instead, word 0
    of ``philox4x32((0, position, step, 2), seed)``: quotas then commit at random positions,
    ``threshold=1 - p, min_count=0`` each position with probability p.

    One launch, no host sync; deterministic, and the same for a sequence alone and in a batch.

    Source: LLaDA, Algorithm 4 (quotas); Fast-dLLM, section 3.3 (threshold: ``min_count=1, quota=1``; factor); LLaDA2
    (``min_count=quota, strict=True``); SlowFast Sampling, section 3 (``min_count=1, quota=k``).

    Example:
        >>> import torch, pdkernels as pd
        >>> tokens, positions = torch.tensor([[5, 1, 0, 0, 0, 0]]), torch.tensor([[2, 3, 4, 5]])
        >>> ids, confidence = torch.tensor([[7, 8, 9, 4]]), torch.tensor([[0.9, 0.4, 0.95, 0.8]])
        >>> result = pd.unmask_(tokens, ids, confidence, mask_token=0, positions=positions, quota=2)
        >>> tokens, result.committed.item(), result.remaining.item(), result.done.item()
        (tensor([[5, 1, 7, 0, 9, 0]]), 2, 2, False)
        >>> pd.unmask_(tokens, ids, confidence, mask_token=0, positions=positions, threshold=0.5).committed, tokens
        (tensor([1]), tensor([[5, 1, 7, 0, 9, 4]]))
    """
    quota, quotas = _number(quota)
    min_count, min_counts = _number(min_count)
    step, steps = _number(step)
    rule = (quota, quotas, threshold, min_count, min_counts, factor, strict)
    arguments = (tokens, ids, confidence, mask_token, positions, windows, *rule, *keys(OP, seed), step, steps)
    return Unmasked(*call(unmask_op, arguments, tokens, backend))


def _number(value: int | Tensor) -> tuple[int, Tensor | None]:
    return (0, value) if isinstance(value, Tensor) else (value, None)


def _check(
    tokens: Tensor,
    ids: Tensor,
    confidence: Tensor | None,
    mask_token: int,
    positions: Tensor | None,
    windows: Tensor | None,
    quota: int,
    quotas: Tensor | None,
    threshold: float | None,
    min_count: int,
    min_counts: Tensor | None,
    factor: float | None,
    strict: bool,
    seed: int,
    seeds: Tensor | None,
    step: int,
    steps: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_index(OP, "tokens", tokens, (None, None), None)
    device, (batch, length) = tokens.device, tokens.shape
    check_index(OP, "ids", ids, (batch, None), device)
    check_type(ids.dtype == tokens.dtype, OP, "ids", f"be {tokens.dtype} like tokens", ids.dtype)
    candidates = ids.shape[1]
    if positions is None:
        if candidates != length:
            reason = f"positions are missing: there are {candidates} candidates for {length} tokens"
            raise ValueError(sentence(OP, reason, "Without positions candidate r is for token r."))
    else:
        check_index(OP, "positions", positions, (batch, candidates), device)
    if confidence is not None:
        check_type(isinstance(confidence, Tensor), OP, "confidence", "be a tensor", type(confidence).__name__)
        is_float = confidence.dtype in (torch.float32, torch.float64)
        check_type(is_float, OP, "confidence", "be float32", confidence.dtype, "Convert it with .float().")
        check_shape(OP, "confidence", confidence, ids.shape, " like ids")
        check_device(OP, "confidence", confidence, device)
    if windows is None:
        shape = torch.Size((batch,))
    else:
        segments = isinstance(windows, Tensor) and windows.dim() == 3
        check_index(OP, "windows", windows, (batch, None, 2) if segments else (batch, 2), device)
        shape = windows.shape[:-1]
    if threshold is not None:
        check_number(OP, "threshold", threshold)
    if factor is not None:
        check_number(OP, "factor", factor, 0, FINITE, "be finite and not negative")
    check_int(OP, "mask_token", mask_token)
    for name, number in (("quota", quota), ("min_count", min_count), ("step", step)):
        check_int(OP, name, number, kind="an int or a tensor")
    for name, number, tensor in (("quota", quota, quotas), ("min_count", min_count, min_counts)):
        if tensor is not None:
            check_index(OP, name, tensor, shape, device)
        elif number < 0:
            fail(OP, name, "not be negative", number)
    refuse(threshold is not None and factor is not None, OP, "threshold and factor are two rules", "Pass one of them.")
    remedy = "It says whether a confidence must exceed the threshold or may equal it."
    refuse(strict and threshold is None, OP, "strict needs a threshold", remedy)
    if mask_token < 0:
        fail(OP, "mask_token", "not be negative", mask_token, "Negative ids mark candidates without a guess.")
    check_indices(OP, (batch,), device, seed=seeds, step=steps)
    if steps is None and not 0 <= step < 2**32:
        fail(OP, "step", "be in [0, 2**32)", step)
    numbers = tokens.new_empty(shape, dtype=torch.int64)
    return numbers, torch.empty_like(numbers), torch.empty_like(numbers, dtype=torch.bool)


def _fake(tokens: Tensor, ids: Tensor, confidence: Tensor | None, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    results = _check(tokens, ids, confidence, *options)
    if confidence is not None and confidence.dtype == torch.float64:
        remedy = "Convert it with .float(), or pass backend='reference', which takes float64."
        check_type(False, OP, "confidence", "be float32 for the kernels", confidence.dtype, remedy)
    return results


def _example(draw: Draw) -> dict[str, Any]:
    tokens = draw.ints(0, 49, 2, 40).masked_fill(draw.ints(0, 4, 2, 40) < 3, 99)
    ids, confidence = draw.ints(0, 49, 2, 40), draw.floats(2, 40, dtype=torch.float32)
    return {"tokens": tokens, "ids": ids, "confidence": confidence, "mask_token": 99, "quota": 3}


# SymInt: otherwise what changes from step to step would pin a compiled graph to one step.
unmask_op = define(
    "unmask_(Tensor(a!) tokens, Tensor ids, Tensor? confidence, int mask_token, Tensor? positions, Tensor? windows, SymInt quota, "
    "Tensor? quotas, float? threshold, SymInt min_count, Tensor? min_counts, float? factor, bool strict, int seed, Tensor? seeds, SymInt step, Tensor? steps) "
    f"-> ({schema_of(Unmasked)})",
    fake=_fake,
    reference=reference.unmask_,
    reference_check=_check,
    example=_example,
    gradients="own",
)
