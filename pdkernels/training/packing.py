"""Packs samples of token ids into one sequence: ids, positions, mask, and the rows and labels that the losses read.

This module neither samples noise nor computes losses. All results are int64 tensors on the CPU (except the weights).
Rows are indices into the packed sequence; rows that a loss does not read are not listed, so a loss needs no ignored
label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pdkernels._validation import check, check_choice, check_flag, check_index, check_type, integer
from pdkernels.masks import SegmentMask, dual_stream, noise_aware_causal, pack
from pdkernels.masks.jacobi import Conditioning, Layout

AfterEnd = Literal["drop", "keep"]


class NoiseAwareSample(NamedTuple):
    """A prompt and its answer in blocks, each clean and noisy."""

    prompt: Tensor
    """(prompt_len,) ids."""
    clean: Tensor
    """(num_blocks, block_size) ids of the answer."""
    noisy: Tensor
    """(num_blocks, block_size) ids: intermediate states of Jacobi decoding on the way to the clean block."""


class NoiseAwareBatch(NamedTuple):
    """Result of `pack_noise_aware`."""

    tokens: Tensor
    """(length,) ids."""
    positions: Tensor
    """(length,) position ids; the noisy and the clean block share theirs."""
    mask: SegmentMask
    """(length, length); pass its ``plan()`` to attention."""
    ar_rows: Tensor
    """(n,) rows of prompts and clean blocks whose logits the autoregressive loss reads."""
    ar_labels: Tensor
    """(n,) the ids they predict."""
    student_rows: Tensor
    """(m,) noisy rows that the consistency loss trains."""
    teacher_rows: Tensor
    """(m,) clean rows at the same positions, whose (detached) distributions they learn."""


class DualStreamSample(NamedTuple):
    """A sequence and the tokens that its noisy copy masks."""

    clean: Tensor
    """(tokens,) ids."""
    masked: Tensor
    """(tokens,) bool, True where the noisy copy holds the mask token."""
    p_mask: float
    """The probability with which each token was masked, by which its loss is divided."""
    noisy: Tensor | None = None
    """(tokens,) bool, True where the noisy copy has a row; None: everywhere from `prefix_len` on. Tokens that are never
    masked, such as those of an image, need no row. The noisy rows of a block do not see tokens of the block that have
    none."""
    prefix_len: int = 0
    """Tokens before the first block: a prompt. They have no noisy rows, and all blocks see them."""


class DualStreamBatch(NamedTuple):
    """Result of `pack_dual_stream`."""

    tokens: Tensor
    """(length,) ids."""
    positions: Tensor
    """(length,) position ids; the noisy and the clean copy share theirs."""
    mask: SegmentMask
    """(length, length); pass its ``plan()`` to attention."""
    ar_rows: Tensor
    """(n,) clean rows whose logits the autoregressive loss reads: those before a token of the answer, or of the sample
    with `prompt_labels`."""
    ar_labels: Tensor
    """(n,) the ids they predict, those of the next row."""
    masked_rows: Tensor
    """(m,) noisy rows that hold the mask token."""
    masked_labels: Tensor
    """(m,) the ids that are masked there; these labels are not shifted."""
    masked_weights: Tensor
    """(m,) float32, 1 / p_mask."""
    ar_samples: Tensor
    """(n,) the number of the sample that each of `ar_rows` belongs to."""
    masked_samples: Tensor
    """(m,) that of each of `masked_rows`."""
    samples: int
    """How many samples are packed."""


def pack_noise_aware(
    samples: Sequence[NoiseAwareSample],
    length: int | None = None,
    *,
    pad_token: int = 0,
    end_token: int | None = None,
    after_end: AfterEnd = "drop",
    conditioning: Conditioning = "noisy",
    window: int | None = None,
    layout: Layout = "streams",
) -> NoiseAwareBatch:
    """Packs samples in the noise-aware layout of Jacobi Forcing, masked from each other.

    Args:
        samples: all blocks of a sample have the same size; samples may differ in it.
        length: total tokens, padded with `pad_token`; None: those of the samples.
        pad_token: the id of the padding, which attends to nothing and to which no row attends.
        end_token: the id that ends an answer; None: all rows enter the losses.
        after_end: "drop": tokens after the first `end_token` of an answer are neither targets nor students. Its own
            noisy row, which would learn what follows, is no student either. "keep", as in the released trainers: only
            targets in its own block are dropped; targets and noisy tokens that are `pad_token` are dropped everywhere;
            all other rows are kept.
        conditioning, window, layout: as in `pdkernels.masks.noise_aware_causal`.

    Returns:
        A batch of one packed sequence. In each block the student rows run from the first offset where noisy and clean
        differ to the end of the block; blocks that have converged have none, and serve as context only.

    Raises:
        ValueError: shapes that do not match, more tokens than `length`, an unknown name, "keep" without an end token.
        TypeError: other samples, ids that are not int32 or int64.

    Source: Jacobi Forcing, section 3 and its released multi-block trainer.

    Example:
        >>> import torch
        >>> from pdkernels.training import NoiseAwareSample, pack_noise_aware
        >>> sample = NoiseAwareSample(torch.tensor([7]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 9], [3, 4]]))
        >>> batch = pack_noise_aware([sample], length=10)
        >>> batch.tokens.tolist(), batch.positions.tolist()
        ([7, 1, 2, 3, 4, 1, 9, 3, 4, 0], [0, 1, 2, 3, 4, 1, 2, 3, 4, 0])
        >>> batch.ar_rows.tolist(), batch.ar_labels.tolist()
        ([0, 1, 2, 3], [1, 2, 3, 4])
        >>> batch.student_rows.tolist(), batch.teacher_rows.tolist()
        ([6], [2])
    """
    op = "training.pack_noise_aware"
    integer(op, "pad_token", pad_token, 0)
    check_choice(op, "after_end", after_end, get_args(AfterEnd))
    check(after_end == "drop" or end_token is not None, op, "end_token", "be given with after_end='keep'", None)
    masks, tokens, rows = [], [], []
    for sample in samples:
        check_type(isinstance(sample, NoiseAwareSample), op, "samples", "hold NoiseAwareSamples", type(sample).__name__)
        check_index(op, "prompt", sample.prompt, (None,), None)
        check_index(op, "clean", sample.clean, (None, None), None)
        check_index(op, "noisy", sample.noisy, tuple(sample.clean.shape), None)
        sample = NoiseAwareSample(*(ids.long().cpu() for ids in sample))
        num_blocks, block_size = sample.clean.shape
        mask = noise_aware_causal(len(sample.prompt), block_size, num_blocks, conditioning, window, layout)
        sample_tokens = torch.empty(mask.q_len, dtype=torch.int64, device="cpu")
        for targets, values in zip((mask.prompt_rows, mask.clean_rows, mask.noisy_rows), sample, strict=True):
            sample_tokens[targets] = values
        answer, students = sample.clean.flatten(), (sample.noisy != sample.clean).cumsum(1) > 0
        ends = sample.clean == (-1 if end_token is None else end_token)
        if after_end == "drop":  # rows from the first end token on would predict tokens after it
            ended = (ends.flatten().cumsum(0) > 0).view(num_blocks, block_size)
            students &= ~ended
        else:
            ended = ends.cumsum(1) > 0
            ended[:, -1:] = False  # this row predicts the first token of the next block
            students &= sample.noisy != pad_token
        ar_mask = torch.cat([torch.ones(len(sample.prompt), dtype=torch.bool, device="cpu"), ~ended.flatten()])[:-1]
        if after_end == "keep":
            ar_mask &= torch.cat([sample.prompt, answer])[1:] != pad_token
        students = students[:, : mask.student_rows.shape[1]]
        masks.append(mask)
        tokens.append(sample_tokens)
        rows.append(
            (mask.ar_rows[ar_mask], mask.ar_targets[ar_mask], mask.student_rows[students], mask.teacher_rows[students])
        )
    packed, packed_mask = _side_by_side(op, masks, tokens, length, pad_token)
    ar_rows, targets, student_rows, teacher_rows = _shifted(rows, masks)
    return NoiseAwareBatch(
        packed, packed_mask.positions, packed_mask, ar_rows, packed[targets], student_rows, teacher_rows
    )


def pack_dual_stream(
    samples: Sequence[DualStreamSample],
    block_size: int,
    mask_token: int,
    length: int | None = None,
    *,
    pad_token: int = 0,
    clean: Literal["causal", "block"] = "causal",
    prompt_labels: bool = False,
) -> DualStreamBatch:
    """Packs samples, each as a noisy and a clean copy, masked from each other.

    Args:
        samples: sequences and their masked tokens.
        block_size: tokens of a block of the noisy copy; the last block of a sample may be shorter.
        mask_token: the id of a masked token.
        length: total tokens, padded with `pad_token`; None: those of both copies.
        pad_token: the id of the padding, which attends to nothing and to which no row attends.
        clean: as in `pdkernels.masks.dual_stream`.
        prompt_labels: whether the autoregressive loss reads the tokens of `prefix_len` as well. It does not in the
            paper's supervised fine-tuning (section 5.2): the loss, and so its normaliser, is of the answers alone.

    Returns:
        A batch of one packed sequence, the noisy copy of each sample before its clean one. Where whole blocks are left
        out of the noisy copy, as a prefix of whole blocks is, both losses are those of the full layout, with
        `prompt_labels` if there is a prefix.

    Raises:
        ValueError: shapes that do not match, a probability outside (0, 1], more tokens than `length`, a masked token
            without a noisy row.
        TypeError: other samples, ids that are not int32 or int64, `masked` or `prompt_labels` that is not bool.

    Source: Nemotron-Labs-Diffusion, training objective, section 5.2 and released code; Block Diffusion (BD3-LM).

    Example:
        >>> import torch
        >>> from pdkernels.training import DualStreamSample, pack_dual_stream
        >>> sample = DualStreamSample(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]), 0.5)
        >>> batch = pack_dual_stream([sample], block_size=2, mask_token=9)
        >>> batch.tokens.tolist(), batch.positions.tolist()
        ([5, 9, 9, 5, 6, 7], [0, 1, 2, 0, 1, 2])
        >>> batch.ar_rows.tolist(), batch.ar_labels.tolist()
        ([3, 4], [6, 7])
        >>> batch.masked_rows.tolist(), batch.masked_labels.tolist(), batch.masked_weights.tolist()
        ([1, 2], [6, 7], [2.0, 2.0])
        >>> pack_dual_stream([sample._replace(prefix_len=2, masked=torch.arange(3) == 2)], 2, 9).ar_labels.tolist()
        [7]
    """
    op = "training.pack_dual_stream"
    check_flag(op, "prompt_labels", prompt_labels)
    integer(op, "pad_token", pad_token, 0)
    integer(op, "mask_token", mask_token, 0)
    masks, tokens, rows, weights, counts = [], [], [], [], []
    for sample in samples:
        check_type(isinstance(sample, DualStreamSample), op, "samples", "hold DualStreamSamples", type(sample).__name__)
        check_index(op, "clean", sample.clean, (None,), None)
        count = len(sample.clean)
        dtype = getattr(sample.masked, "dtype", type(sample.masked).__name__)
        check_type(dtype == torch.bool, op, "masked", "be a bool tensor", dtype)
        check(sample.masked.shape == (count,), op, "masked", f"have shape ({count},)", tuple(sample.masked.shape))
        check(0 < sample.p_mask <= 1, op, "p_mask", "lie in (0, 1]", sample.p_mask)
        ids, masked = sample.clean.long().cpu(), sample.masked.cpu()
        noisy = _noisy_positions(op, sample, count)
        masks.append(dual_stream(count, block_size, clean=clean, noisy_positions=noisy, prefix_len=sample.prefix_len))
        tokens.append(torch.cat([ids.masked_fill(masked, mask_token)[noisy], ids]))
        stream = torch.arange(len(noisy), len(noisy) + count, device="cpu")
        hidden = masked[noisy].nonzero()[:, 0]
        first = 1 if prompt_labels else max(sample.prefix_len, 1)  # nothing predicts the first token of a sample
        rows.append((stream[first - 1 : -1], stream[first:], hidden, stream[noisy[hidden]]))
        weights.append(torch.full((len(hidden),), 1 / sample.p_mask, dtype=torch.float32, device="cpu"))
        counts.append((len(stream[first:]), len(hidden)))
    packed, mask = _side_by_side(op, masks, tokens, length, pad_token)
    ar_rows, targets, masked_rows, sources = _shifted(rows, masks)
    weight = torch.cat([torch.empty(0, dtype=torch.float32, device="cpu"), *weights])
    numbers, repeats = torch.arange(len(masks), device="cpu"), torch.tensor(counts, dtype=torch.int64, device="cpu")
    ar_samples, masked_samples = (numbers.repeat_interleave(repeats.view(-1, 2)[:, kind]) for kind in range(2))
    labels = (ar_rows, packed[targets], masked_rows, packed[sources], weight)
    return DualStreamBatch(packed, mask.positions, mask, *labels, ar_samples, masked_samples, len(masks))


def _noisy_positions(op: str, sample: DualStreamSample, count: int) -> Tensor:
    """Positions of the tokens that have a noisy row, ascending."""
    integer(op, "prefix_len", sample.prefix_len, 0)
    check(sample.prefix_len <= count, op, "prefix_len", f"be at most {count}", sample.prefix_len)
    there = torch.arange(count, device="cpu") >= sample.prefix_len
    if sample.noisy is not None:
        dtype = getattr(sample.noisy, "dtype", type(sample.noisy).__name__)
        check_type(dtype == torch.bool, op, "noisy", "be a bool tensor", dtype)
        check(sample.noisy.shape == (count,), op, "noisy", f"have shape ({count},)", tuple(sample.noisy.shape))
        there &= sample.noisy.cpu()
    lost = int((sample.masked.cpu() & ~there).sum())
    check(lost == 0, op, "masked", "hide tokens with a noisy row only", f"{lost} without one")
    return there.nonzero()[:, 0]


def _side_by_side(
    op: str, masks: Sequence[SegmentMask], tokens: Sequence[Tensor], length: int | None, pad_token: int
) -> tuple[Tensor, SegmentMask]:
    """The ids and the mask of the packed sequence."""
    used = sum(len(ids) for ids in tokens)
    check(length is None or used <= length, op, "length", f"be at least the {used} tokens of the samples", length)
    mask = pack(masks, length)
    return torch.cat([*tokens, torch.full((mask.q_len - used,), pad_token, device="cpu")]), mask


def _shifted(rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], masks: Sequence[SegmentMask]) -> list[Tensor]:
    """Each of the four kinds of rows of all samples, as indices into the packed sequence."""
    starts, start = [], 0
    for mask in masks:
        starts.append(start)
        start += mask.q_len
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return [
        torch.cat([none, *(sample_rows[kind] + first for sample_rows, first in zip(rows, starts, strict=True))])
        for kind in range(4)
    ]
