"""Losses of the two packed layouts, on logits of the rows listed in a batch, and the noise of the dual stream.

A batch lists the rows that a loss reads; run the language model head only on those rows:

    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan())[0]
    loss = dual_stream_loss(model.logits(hidden[batch.ar_rows]), model.logits(hidden[batch.masked_rows]), batch)

Logits in half precision are converted to float32, those in float64 are kept. Labels and weights are moved to the device
of the logits. Nothing here waits for that device, and everything compiles to one graph for batches of any size.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from pdkernels._validation import check, check_choice, check_type, fail, integer, message
from pdkernels.training.packing import DualStreamBatch, NoiseAwareBatch

Average: TypeAlias = Literal["global", "sequence"]


class JointLoss(NamedTuple):
    """Result of `dual_stream_loss`: 0-dim tensors, ``total = autoregressive + masked_weight * masked``."""

    total: Tensor
    autoregressive: Tensor
    """Sum over clean rows, divided by the normaliser."""
    masked: Tensor
    """Sum over masked rows, each divided by its p_mask, divided by the same normaliser."""


class ConsistencyLoss(NamedTuple):
    """Result of `noise_aware_loss`: 0-dim tensors, ``total = ar_weight * autoregressive + consistency``."""

    total: Tensor
    autoregressive: Tensor
    """Mean over prompts and clean blocks."""
    consistency: Tensor
    """Mean over noisy rows that have not converged."""


def dual_stream_terms(
    ar_logits: Tensor,
    masked_logits: Tensor,
    batch: DualStreamBatch,
    *,
    normaliser: float | Tensor | None = None,
    average: Average = "global",
) -> tuple[Tensor, Tensor]:
    """The contribution of each row to the two sums of `dual_stream_loss`, same arguments and errors: ``(n,)`` and
    ``(m,)``."""
    op = "training.dual_stream_loss"
    check_choice(op, "average", average, get_args(Average))
    _check_rows(op, "ar_logits", ar_logits, batch.ar_labels)
    _check_rows(op, "masked_logits", masked_logits, batch.masked_labels)
    if normaliser is None:
        # Without rows both sums are 0.
        rows = len(batch.ar_labels) + len(batch.masked_labels)
        normaliser = max(rows if average == "global" else batch.samples, 1)
    ar = F.cross_entropy(_exact(ar_logits), batch.ar_labels.to(ar_logits.device), reduction="none")
    masked = F.cross_entropy(_exact(masked_logits), batch.masked_labels.to(masked_logits.device), reduction="none")
    masked = masked * batch.masked_weights.to(masked_logits.device)
    if average == "sequence":
        owners = [batch.ar_samples, batch.masked_samples]
        counts = torch.zeros(batch.samples, dtype=torch.int64, device="cpu")
        for owner in owners:
            counts = counts.index_add(0, owner, torch.ones_like(owner))
        ar_rows, masked_rows = (counts[owner].to(ar_logits.device) for owner in owners)
        ar, masked = ar / ar_rows, masked / masked_rows
    return ar / normaliser, masked / normaliser


def dual_stream_loss(
    ar_logits: Tensor,
    masked_logits: Tensor,
    batch: DualStreamBatch,
    *,
    masked_weight: float = 0.3,
    normaliser: float | Tensor | None = None,
    average: Average = "global",
) -> JointLoss:
    """Cross-entropy on the clean copies, and on the hidden tokens of the noisy ones.

    Args:
        ar_logits: ``(n, vocab)`` of ``batch.ar_rows``; they predict the next token.
        masked_logits: ``(m, vocab)`` of ``batch.masked_rows``; they predict the hidden token at their own position.
        batch: from `pack_dual_stream`.
        masked_weight: weight of the masked sum; the paper's alpha.
        normaliser: the divisor of both sums. None: the n + m rows of this batch, or its samples where the average is
            that of sequences. For several batches or ranks pass their total number of rows (or samples), a number or a
            0-dim tensor: the losses then add up to that of one big batch.
        average: "global": all rows of the batch count equally (equation 5), so that a text with few hidden tokens has
            little weight. "sequence": the mean over the rows of each sample, then the mean over samples (equation 4),
            which the paper found to be worse: there a few hidden tokens with large weights 1 / p_mask count as much as a
            whole text.

    Returns:
        Its `total` is ``(sum of CE + masked_weight * sum of CE / p_mask) / normaliser``, 0 for a batch without rows; with
        ``average="sequence"`` each row is also divided by the number of rows, of both kinds, of its sample.

    Raises:
        ValueError: logits that are not one row of floats per label, an unknown average.
        TypeError: logits that are not floating.

    Source: Nemotron-Labs-Diffusion, equations 1 to 5 and section 2.1, global loss averaging.

    Example:
        >>> import torch
        >>> from pdkernels.training import DualStreamSample, dual_stream_loss, pack_dual_stream
        >>> sample = DualStreamSample(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]), 0.5)
        >>> batch = pack_dual_stream([sample], block_size=2, mask_token=9)
        >>> loss = dual_stream_loss(torch.zeros(2, 10), torch.zeros(2, 10), batch)    # log(10) = 2.3026 on each row
        >>> [round(float(part), 4) for part in loss]
        [1.8421, 1.1513, 2.3026]
    """
    ar, masked = dual_stream_terms(ar_logits, masked_logits, batch, normaliser=normaliser, average=average)
    ar, masked = ar.sum(), masked.sum()
    return JointLoss(ar + masked_weight * masked, ar, masked)


def noise_aware_terms(
    ar_logits: Tensor, student_logits: Tensor, teacher_logits: Tensor, batch: NoiseAwareBatch
) -> tuple[Tensor, Tensor]:
    """The contribution of each row to the two means of `noise_aware_loss`, same arguments and errors: ``(n,)`` and
    ``(m,)``."""
    op = "training.noise_aware_loss"
    _check_rows(op, "ar_logits", ar_logits, batch.ar_labels)
    _check_rows(op, "student_logits", student_logits, batch.student_rows)
    if teacher_logits.shape != student_logits.shape:
        fail(op, "teacher_logits", "have the shape of student_logits", tuple(teacher_logits.shape))
    ar = F.cross_entropy(_exact(ar_logits), batch.ar_labels.to(ar_logits.device), reduction="none")
    teacher = _exact(teacher_logits.detach()).softmax(-1)
    consistency = F.cross_entropy(_exact(student_logits), teacher, reduction="none")
    return ar / max(len(batch.ar_labels), 1), consistency / max(len(batch.student_rows), 1)


def noise_aware_loss(
    ar_logits: Tensor, student_logits: Tensor, teacher_logits: Tensor, batch: NoiseAwareBatch, *, ar_weight: float = 1.0
) -> ConsistencyLoss:
    """Cross-entropy on prompts and clean blocks, and the consistency loss between noisy rows and their clean ones.

    Args:
        ar_logits: ``(n, vocab)`` of ``batch.ar_rows``.
        student_logits: ``(m, vocab)`` of ``batch.student_rows``.
        teacher_logits: ``(m, vocab)`` of ``batch.teacher_rows``, from the same forward; no gradient goes through them.
        batch: from `pack_noise_aware`.
        ar_weight: weight of the autoregressive mean; the released trainers use 10 and 1.

    Returns:
        `consistency` is the soft cross-entropy ``-sum softmax(teacher) * log softmax(student)``, whose gradient is that
        of the KL divergence. A mean over no rows is 0. The released trainer also divides the consistency loss by the
        number of blocks T: multiply `ar_weight` by T for its proportions.

    Raises:
        ValueError: logits that are not one row of floats per label, or per student row.
        TypeError: logits that are not floating.

    Source: Jacobi Forcing, equations 8 and 9, and its released multi-block trainer.

    Example:
        >>> import torch
        >>> from pdkernels.training import NoiseAwareSample, noise_aware_loss, pack_noise_aware
        >>> sample = NoiseAwareSample(torch.tensor([7]), torch.tensor([[1, 2]]), torch.tensor([[1, 9]]))
        >>> batch = pack_noise_aware([sample])
        >>> student = teacher = torch.zeros(1, 10)
        >>> loss = noise_aware_loss(torch.zeros(2, 10), student, teacher, batch)
        >>> [round(float(part), 4) for part in loss]
        [4.6052, 2.3026, 2.3026]
    """
    ar, consistency = noise_aware_terms(ar_logits, student_logits, teacher_logits, batch)
    ar, consistency = ar.sum(), consistency.sum()
    return ConsistencyLoss(ar_weight * ar + consistency, ar, consistency)


def draw_masks(
    count: int, generator: torch.Generator, *, min_p_mask: float = 1e-3, frozen_prefix: int = 0, t: float | None = None
) -> tuple[Tensor, float]:
    """Samples the tokens of a sequence that the noisy copy masks, and the probability with which each was masked.

    Args:
        count: tokens of the sequence.
        generator: the random generator; the result is on its device.
        min_p_mask: eps of ``p_mask = (1 - eps) * t + eps`` with t uniform on [0, 1], one for the sequence.
        frozen_prefix: length of a prefix that is never masked, such as the prompt when fine-tuning on answers. Give it
            to the sample as `prefix_len` too, which leaves it out of the autoregressive loss.
        t: the noise level in [0, 1], such as one that all sequences of a rank share (`noise_level`). None: drawn for
            this sequence, as the released code does.

    Returns:
        ``(count,)`` bool and p_mask: the last two fields of a `DualStreamSample`. With few tokens there may be no True.

    Raises:
        ValueError: a negative count, a prefix longer than the sequence, `min_p_mask` outside (0, 1],
            `t` outside [0, 1].
        TypeError: sizes that are not ints, a generator of another type.

    Source: Nemotron-Labs-Diffusion, equation 2 and released training code.

    Example:
        >>> import torch
        >>> from pdkernels.training import draw_masks
        >>> masked, p_mask = draw_masks(1000, torch.Generator().manual_seed(0), frozen_prefix=200)
        >>> bool(masked[:200].any()), abs(float(masked[200:].double().mean()) - p_mask) < 0.05
        (False, True)
    """
    op = "training.draw_masks"
    for name, value in (("count", count), ("frozen_prefix", frozen_prefix)):
        check_type(type(value) is int, op, name, "be an int", type(value).__name__)
    check_type(
        isinstance(generator, torch.Generator), op, "generator", "be a torch.Generator", type(generator).__name__
    )
    check(count >= 0, op, "count", "be at least 0", count)
    check(0 <= frozen_prefix <= count, op, "frozen_prefix", f"lie in 0 .. {count}", frozen_prefix)
    check(0 < min_p_mask <= 1, op, "min_p_mask", "lie in (0, 1]", min_p_mask)
    check(t is None or 0 <= t <= 1, op, "t", "lie in [0, 1]", t)
    if t is None:
        t = float(torch.rand((), dtype=torch.float64, generator=generator, device=generator.device))
    p_mask = (1 - min_p_mask) * t + min_p_mask
    masked = torch.rand(count, dtype=torch.float32, generator=generator, device=generator.device) < p_mask
    masked[:frozen_prefix] = False
    return masked, p_mask


def noise_level(seed: int, step: int, rank: int = 0) -> float:
    """The noise level t of all sequences of a rank in a step, for `draw_masks`: uniform on [0, 1).

    With a data-parallel rank's own number, masking ratios vary over the ranks of a step ("DP-rank varying masking
    ratios"); with the default, all ranks mask the same share of their tokens. No rank has to be told what others draw,
    and a training that is resumed at a step draws the same again, on any machine.

    Args:
        seed: of the training.
        step: number of the step.
        rank: number of the data-parallel rank, ``torch.distributed.get_rank()``.

    Raises:
        TypeError, ValueError: numbers that are no ints, or negative.

    Source: Nemotron-Labs-Diffusion, section 2.3, which says no more than that noise levels differ between ranks.

    Example:
        >>> from pdkernels.training import noise_level
        >>> [round(noise_level(0, 7, rank), 3) for rank in range(3)], noise_level(0, 7) == noise_level(0, 7, 0)
        ([0.101, 0.824, 0.484], True)
    """
    for name, value in (("seed", seed), ("step", step), ("rank", rank)):
        integer("training.noise_level", name, value, 0)
    return random.Random(f"noise level {seed} {step} {rank}").random()


def _exact(logits: Tensor) -> Tensor:
    """Converts to at least float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _check_rows(op: str, name: str, logits: Tensor, rows: Tensor) -> None:
    if not logits.is_floating_point():
        raise TypeError(message(op, name, "be floating", logits.dtype))
    if logits.dim() != 2 or logits.shape[0] != rows.shape[0]:
        fail(op, name, f"have shape ({rows.shape[0]}, vocab)", tuple(logits.shape), "It takes the listed rows only.")
