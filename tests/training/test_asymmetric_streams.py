"""Rows that are never noisy leave the noisy copy: the losses and gradients of the full layout, and its mask without their columns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.training import DualStreamBatch, DualStreamSample, draw_masks, dual_stream_loss, pack_dual_stream
from tests.support.base import random_transformer

MASK, BLOCK = 12, 4


def losses(batch: DualStreamBatch) -> tuple[list[float], list[Tensor]]:
    model = random_transformer(3, 0.4, vocab_size=13).requires_grad_(True)
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.dense())[0]
    loss = dual_stream_loss(model.logits(hidden[batch.ar_rows]), model.logits(hidden[batch.masked_rows]), batch)
    loss.total.backward()
    return [float(part.detach()) for part in loss], [p.grad for p in model.parameters() if p.grad is not None]


def sample(seed: int, count: int, allowed: Tensor) -> DualStreamSample:
    random = torch.Generator().manual_seed(seed)
    masked, share = draw_masks(count, random)
    return DualStreamSample(torch.randint(MASK, (count,), generator=random), masked & allowed, share)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 99), st.lists(st.booleans(), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 2))
def test_whole_blocks_leave_without_a_trace(seed: int, blocks: list[bool], last: int, prefix: int) -> None:
    """A prompt of whole blocks, an image of whole blocks: what the loss reads does not see their noisy rows."""
    blocks = [False] * prefix + blocks
    count = BLOCK * (len(blocks) - 1) + last
    noisy = torch.tensor(blocks).repeat_interleave(BLOCK)[:count]
    full = sample(seed, count, noisy)
    small = full._replace(noisy=noisy, prefix_len=min(count, BLOCK * prefix))
    other = sample(seed + 1, 6, torch.ones(6, dtype=torch.bool))
    (expected, gradients), (actual, ours) = (
        losses(pack_dual_stream([first, other], BLOCK, MASK, prompt_labels=True)) for first in (full, small)
    )
    assert actual == pytest.approx(expected, rel=1e-12)
    for a, b in zip(ours, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.lists(st.booleans(), min_size=1, max_size=20))
def test_any_rows_leave_the_mask_of_the_others(seed: int, noisy: list[bool]) -> None:
    kept, count = torch.tensor(noisy), len(noisy)
    full = sample(seed, count, kept)
    whole, small = (pack_dual_stream([one], BLOCK, MASK) for one in (full, full._replace(noisy=kept)))
    rows = torch.cat([kept, torch.ones(count, dtype=torch.bool)])
    assert torch.equal(small.mask.dense(), whole.mask.dense()[rows][:, rows])
    assert torch.equal(small.tokens, whole.tokens[rows]) and torch.equal(small.positions, whole.positions[rows])
    for name in ("ar_labels", "masked_labels", "masked_weights"):
        assert torch.equal(getattr(small, name), getattr(whole, name))
    for rows_of in ("ar_rows", "masked_rows"):
        ours, theirs = getattr(small, rows_of), getattr(whole, rows_of)
        assert torch.equal(small.tokens[ours], whole.tokens[theirs])


def test_what_is_refused() -> None:
    ids, masked = torch.arange(6), torch.tensor([False] * 5 + [True])
    with pytest.raises(ValueError, match="masked must hide tokens with a noisy row only"):
        pack_dual_stream([DualStreamSample(ids, masked, 0.5, noisy=~masked)], 2, MASK)
    with pytest.raises(ValueError, match="prefix_len must be at most 6"):
        pack_dual_stream([DualStreamSample(ids, masked, 0.5, prefix_len=7)], 2, MASK)
    with pytest.raises(TypeError, match="noisy must be a bool tensor"):
        pack_dual_stream([DualStreamSample(ids, masked, 0.5, noisy=ids)], 2, MASK)
    with pytest.raises(TypeError, match="prompt_labels must be a bool"):
        pack_dual_stream([DualStreamSample(ids, masked, 0.5)], 2, MASK, prompt_labels=1)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.integers(1, 20), st.integers(0, 20), st.integers(1, 20))
def test_the_loss_is_of_answers_alone(seed: int, count: int, prompt: int, other: int) -> None:
    """Nemotron-Labs-Diffusion, 5.2. The mean over the answers of all samples, from the whole layout's own logits."""
    prompt = min(prompt, count)
    first = sample(seed, count, torch.arange(count) >= prompt)._replace(prefix_len=prompt)
    second = sample(seed + 1, other, torch.ones(other, dtype=torch.bool))
    batch = pack_dual_stream([first, second], BLOCK, MASK)
    assert batch.ar_labels.tolist() == [*first.clean[max(prompt, 1) :].tolist(), *second.clean[1:].tolist()]
    assert torch.equal(batch.tokens[batch.ar_rows + 1], batch.ar_labels)  # a row predicts the next one
    logits = torch.zeros(len(batch.tokens), 13, dtype=torch.float64)
    loss = dual_stream_loss(logits[batch.ar_rows], logits[batch.masked_rows], batch)
    answers = len(batch.ar_labels) + int(first.masked.sum() + second.masked.sum())
    assert float(loss.autoregressive) == pytest.approx(math.log(13) * len(batch.ar_labels) / max(answers, 1))
    prompts_too = pack_dual_stream([first, second], BLOCK, MASK, prompt_labels=True)
    assert prompts_too.ar_labels.tolist() == [*first.clean[1:].tolist(), *second.clean[1:].tolist()]
    for name in ("tokens", "positions", "masked_rows", "masked_labels", "masked_weights"):
        assert torch.equal(getattr(batch, name), getattr(prompts_too, name))
