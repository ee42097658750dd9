"""Losses against loops that follow the equations row by row, in fp64; what gets a gradient; how parts add up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.models import Transformer, TransformerConfig
from pdkernels.training import (
    DualStreamBatch,
    DualStreamSample,
    NoiseAwareBatch,
    NoiseAwareSample,
    draw_masks,
    dual_stream_loss,
    noise_aware_loss,
    noise_level,
    pack_dual_stream,
    pack_noise_aware,
)
from tests.harness.error_budget import assert_within_budget
from tests.support.errors import kind_of

VOCAB, MASK = 13, 12
seeds = st.integers(0, 10**6)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dual_stream_batch(seed: int, lengths: list[int], length: int | None = None) -> DualStreamBatch:
    random = generator(seed)
    samples = [DualStreamSample(torch.randint(MASK, (n,), generator=random), *draw_masks(n, random)) for n in lengths]
    return pack_dual_stream(samples, 3, MASK, length)


def noise_aware_batch(seed: int, blocks: list[int], length: int | None = None) -> NoiseAwareBatch:
    random = generator(seed)
    samples = []
    for count in blocks:
        clean = torch.randint(5, (count, 4), generator=random)
        noisy = torch.where(torch.rand(count, 4, generator=random) < 0.7, clean, 5)
        samples.append(NoiseAwareSample(torch.randint(5, (count % 3,), generator=random), clean, noisy))
    return pack_noise_aware(samples, length)


def logits(rows: Tensor, random: torch.Generator, dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> Tensor:
    return (4 * torch.randn(len(rows), vocab, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(x - max(row)) for x in row]
    return [weight / sum(weights) for weight in weights]


def cross_entropy(row: list[float], label: int) -> float:
    return -math.log(softmax(row)[label])


def close(actual: Tensor, expected: float) -> bool:
    return math.isclose(float(actual.detach()), expected, rel_tol=1e-12, abs_tol=1e-14)


@given(seeds, st.lists(st.integers(0, 9), max_size=3), st.floats(0, 2))
def test_dual_stream_is_the_equation(seed: int, lengths: list[int], weight: float) -> None:
    batch, random = dual_stream_batch(seed, lengths), generator(seed + 1)
    ar, masked = logits(batch.ar_rows, random), logits(batch.masked_rows, random)
    loss = dual_stream_loss(ar, masked, batch, masked_weight=weight)

    rows = max(len(ar) + len(masked), 1)
    expected_ar = sum(cross_entropy(row, label) for row, label in zip(ar.tolist(), batch.ar_labels.tolist()))
    expected_masked = sum(
        cross_entropy(row, label) * p
        for row, label, p in zip(masked.tolist(), batch.masked_labels.tolist(), batch.masked_weights.tolist())
    )
    assert close(loss.autoregressive, expected_ar / rows) and close(loss.masked, expected_masked / rows)
    assert close(loss.total, (expected_ar + weight * expected_masked) / rows)
    assert all(part.shape == () and part.dtype == torch.float64 for part in loss)

    loss.total.backward()
    for row, label, gradient in zip(ar.tolist(), batch.ar_labels.tolist(), ar.grad.tolist()):
        for token, (p, value) in enumerate(zip(softmax(row), gradient)):
            assert math.isclose(value, (p - (token == label)) / rows, rel_tol=1e-12, abs_tol=1e-15)


@given(seeds, st.lists(st.integers(0, 9), max_size=4), st.floats(0, 2), st.integers(1, 3))
def test_the_average_over_sequences_is_the_equation(seed: int, lengths: list[int], weight: float, ranks: int) -> None:
    """Equation 4 as a loop over the sequences of a batch, whose rows are picked out of it one by one."""
    random = generator(seed)
    samples = [DualStreamSample(torch.randint(MASK, (n,), generator=random), *draw_masks(n, random)) for n in lengths]
    batch = pack_dual_stream(samples, 3, MASK)
    ar, masked = logits(batch.ar_rows, random), logits(batch.masked_rows, random)
    loss = dual_stream_loss(ar, masked, batch, masked_weight=weight, average="sequence")

    rows, hidden, expected = iter(ar.tolist()), iter(masked.tolist()), 0.0
    for sample in samples:
        terms = [cross_entropy(next(rows), int(label)) for label in sample.clean[1:]]
        inverse = float(torch.tensor(1 / sample.p_mask, dtype=torch.float32))
        for token in sample.clean[sample.masked]:
            terms.append(weight * cross_entropy(next(hidden), int(token)) * inverse)
        expected += sum(terms) / max(len(terms), 1) / len(samples)
    assert close(loss.total, expected)
    # Of several ranks: the number of all their sequences is the normaliser, and the losses add up.
    share = dual_stream_loss(
        ar, masked, batch, masked_weight=weight, average="sequence", normaliser=ranks * max(len(samples), 1)
    )
    assert close(share.total * ranks, expected)


def test_both_averages_agree_where_every_sequence_has_as_many_rows() -> None:
    random, hidden = generator(5), torch.arange(6) % 3 == 1
    samples = [DualStreamSample(torch.randint(MASK, (6,), generator=random), hidden, p) for p in (0.1, 0.9)]
    batch = pack_dual_stream(samples, 3, MASK)
    inputs = logits(batch.ar_rows, random), logits(batch.masked_rows, random)
    torch.testing.assert_close(
        *(dual_stream_loss(*inputs, batch, average=kind).total for kind in ("global", "sequence"))
    )


@given(seeds, st.integers(1, 4), st.integers(1, 3), st.floats(0, 1))
def test_ranks_with_levels_of_their_own_average_over_all_tokens(
    seed: int, ranks: int, texts: int, weight: float
) -> None:
    """Equation 5 as a loop over the tokens of all ranks, whose masking ratios differ (section 2.3)."""
    random, expected, rows, parts = generator(seed), 0.0, 0, []
    for rank in range(ranks):
        level = noise_level(seed, 3, rank)
        samples = [
            DualStreamSample(torch.randint(MASK, (n,), generator=random), *draw_masks(n, random, t=level))
            for n in range(4, 4 + texts)
        ]
        ratio = (1 - 1e-3) * level + 1e-3
        assert all(sample.p_mask == ratio for sample in samples)
        batch = pack_dual_stream(samples, 3, MASK)
        ar, masked = logits(batch.ar_rows, random), logits(batch.masked_rows, random)
        inverse = float(torch.tensor(1 / ratio, dtype=torch.float32))
        for row, label in zip(ar.tolist(), batch.ar_labels.tolist()):
            expected += cross_entropy(row, label)
        for row, label in zip(masked.tolist(), batch.masked_labels.tolist()):
            expected += weight * cross_entropy(row, label) * inverse
        rows += len(ar) + len(masked)
        parts.append((ar, masked, batch))
    total = sum(dual_stream_loss(*part, masked_weight=weight, normaliser=rows).total for part in parts)
    assert close(total, expected / rows)


def test_levels_of_ranks_are_uniform_and_their_own() -> None:
    """Five standard deviations of a mean of uniform numbers, and of the products of pairs."""
    drawn = torch.tensor([[noise_level(1, step, rank) for rank in range(3)] for step in range(2000)])
    assert drawn.min() >= 0 and drawn.max() < 1
    assert ((drawn.mean(0) - 0.5).abs() < 5 * (1 / 12 / 2000) ** 0.5).all()
    assert (torch.corrcoef(drawn.T) - torch.eye(3)).abs().max() < 5 / 2000**0.5
    assert noise_level(1, 5) == float(noise_level(1, 5, 0)) != noise_level(2, 5)


@given(seeds, st.lists(st.integers(0, 4), max_size=3), st.floats(0, 10))
def test_noise_aware_is_the_equation(seed: int, blocks: list[int], weight: float) -> None:
    batch, random = noise_aware_batch(seed, blocks), generator(seed + 1)
    ar, student, teacher = (logits(rows, random) for rows in (batch.ar_rows, batch.student_rows, batch.teacher_rows))
    loss = noise_aware_loss(ar, student, teacher, batch, ar_weight=weight)

    expected_ar = [cross_entropy(row, label) for row, label in zip(ar.tolist(), batch.ar_labels.tolist())]
    expected = [
        -sum(p * math.log(q) for p, q in zip(softmax(clean), softmax(noisy)))
        for clean, noisy in zip(teacher.tolist(), student.tolist())
    ]
    expected_ar, expected = (sum(rows) / max(len(rows), 1) for rows in (expected_ar, expected))
    assert close(loss.autoregressive, expected_ar) and close(loss.consistency, expected)
    assert close(loss.total, weight * expected_ar + expected)

    loss.total.backward()
    assert teacher.grad is None, "the teacher learns nothing"
    # That of KL(teacher || student).
    torch.testing.assert_close(
        student.grad,
        (student.softmax(-1) - teacher.softmax(-1)).detach() / max(len(student), 1),
        rtol=1e-10,
        atol=1e-13,
    )


def test_gradients_are_those_of_the_values() -> None:
    dual, noisy, random = dual_stream_batch(3, [5, 3]), noise_aware_batch(3, [2, 1]), generator(2)
    assert len(dual.masked_rows) and len(noisy.student_rows)
    inputs = [logits(rows, random) for rows in (dual.ar_rows, dual.masked_rows)]
    assert torch.autograd.gradcheck(lambda *parts: dual_stream_loss(*parts, dual).total, inputs)
    inputs = [logits(rows, random) for rows in (noisy.ar_rows, noisy.student_rows)]
    teacher = logits(noisy.teacher_rows, random)
    assert torch.autograd.gradcheck(lambda *parts: noise_aware_loss(*parts, teacher, noisy).total, inputs)


@settings(max_examples=30)
@given(seeds, st.lists(st.integers(0, 9), min_size=2, max_size=6), st.data())
def test_parts_of_a_batch_add_up_to_the_whole(seed: int, lengths: list[int], data: st.DataObject) -> None:
    """Global averaging: with the rows of all parts as the normaliser, as ranks would share them."""
    random, cut = generator(seed), data.draw(st.integers(0, len(lengths)))
    samples = [DualStreamSample(torch.randint(MASK, (n,), generator=random), *draw_masks(n, random)) for n in lengths]
    whole = pack_dual_stream(samples, 3, MASK)
    ar, masked = logits(whole.ar_rows, random), logits(whole.masked_rows, random)
    rows = torch.tensor(len(ar) + len(masked))
    total, start = [dual_stream_loss(ar, masked, whole)], (0, 0)
    parts = []
    for part in (samples[:cut], samples[cut:]):
        batch = pack_dual_stream(part, 3, MASK)
        end = (start[0] + len(batch.ar_rows), start[1] + len(batch.masked_rows))
        parts.append(
            dual_stream_loss(ar[start[0] : end[0]], masked[start[1] : end[1]], batch, normaliser=rows.clamp(min=1))
        )
        start = end
    for whole_part, one, other in zip(*total, *parts):
        torch.testing.assert_close(one + other, whole_part, rtol=1e-12, atol=1e-14)
    for tensor in (ar, masked):
        expected, sums = (
            torch.autograd.grad(value, tensor, retain_graph=True)[0]
            for value in (total[0].total, parts[0].total + parts[1].total)
        )
        torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-14)


def test_a_few_masked_tokens_have_little_weight() -> None:
    """One of 100 tokens masked with p = 0.01 next to 100 of 100 with p = 1: rows count, not samples."""
    hidden = [torch.arange(100) == 50, torch.ones(100, dtype=torch.bool)]
    samples = [
        DualStreamSample(torch.zeros(100, dtype=torch.int64), masked, p) for masked, p in zip(hidden, (0.01, 1.0))
    ]
    batch = pack_dual_stream(samples, 10, MASK)
    loss = dual_stream_loss(torch.zeros(198, VOCAB), torch.zeros(101, VOCAB), batch, masked_weight=1.0)
    assert math.isclose(loss.masked.item(), 200 * math.log(VOCAB) / 299, rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_lose_nothing_more(dtype: torch.dtype) -> None:
    random = generator(3)
    batch, noisy = dual_stream_batch(7, [40, 30, 20]), noise_aware_batch(7, [6, 9, 8])

    def gradients(convert: Any, teacher: Tensor, parts: list[Tensor]) -> list[Tensor]:
        leaves = [part.detach().clone().requires_grad_() for part in parts]
        ar, masked, noisy_ar, student = (convert(leaf) for leaf in leaves)
        joint, consistent = (
            dual_stream_loss(ar, masked, batch),
            noise_aware_loss(noisy_ar, student, convert(teacher), noisy),
        )
        wide = torch.float64 if convert is Tensor.double else torch.float32
        assert {part.dtype for part in (*joint, *consistent)} == {wide}
        return list(torch.autograd.grad(joint.total + consistent.total, leaves))

    rows = (batch.ar_rows, batch.masked_rows, noisy.ar_rows, noisy.student_rows, noisy.teacher_rows)
    *parts, teacher = (logits(each, random, dtype).detach() for each in rows)
    ours = gradients(lambda x: x, teacher, parts)
    same_dtype = gradients(Tensor.float, teacher, parts)
    exact = gradients(Tensor.double, teacher, [part.double() for part in parts])
    for mine, same, oracle in zip(ours, same_dtype, exact):
        assert mine.dtype == dtype
        assert_within_budget(mine, oracle, same, name="gradient")


@pytest.mark.parametrize("kind", ["dual stream", "noise aware"])
def test_no_rows_are_no_loss(kind: str) -> None:
    ar, other = torch.zeros(0, VOCAB, requires_grad=True), torch.zeros(0, VOCAB, requires_grad=True)
    if kind == "dual stream":
        loss = dual_stream_loss(ar, other, dual_stream_batch(0, [0, 1, 0], 4))
    else:
        converged = NoiseAwareSample(
            torch.tensor([], dtype=torch.int64),
            torch.ones(1, 1, dtype=torch.int64),
            torch.ones(1, 1, dtype=torch.int64),
        )
        loss = noise_aware_loss(ar, other, other, pack_noise_aware([converged], 5))
    assert [float(part.detach()) for part in loss] == [0.0, 0.0, 0.0]
    assert [g.shape for g in torch.autograd.grad(loss.total, (ar, other))] == [(0, VOCAB), (0, VOCAB)]


def test_converged_blocks_leave_the_autoregressive_loss() -> None:
    block = torch.tensor([[1, 2, 3]])
    batch = pack_noise_aware([NoiseAwareSample(torch.tensor([4]), block, block)])
    ar, none = torch.zeros(3, VOCAB), torch.zeros(0, VOCAB)
    loss = noise_aware_loss(ar, none, none, batch, ar_weight=2.0)
    assert loss.consistency == 0 and math.isclose(loss.total.item(), 2 * math.log(VOCAB), rel_tol=1e-6)


def test_through_a_model_the_head_runs_on_listed_rows_only() -> None:
    """The same loss and gradients as from the logits of all rows."""
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=VOCAB, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=24
    )
    model = Transformer(config).double()
    batch = dual_stream_batch(5, [9, 7], 40)
    frame = {"positions": batch.positions, "mask": batch.mask.dense()}
    hidden = model.hidden(batch.tokens[None], **frame)[0]
    lean = dual_stream_loss(model.logits(hidden[batch.ar_rows]), model.logits(hidden[batch.masked_rows]), batch)
    all_rows = model(batch.tokens[None], **frame)[0]
    full = dual_stream_loss(all_rows[batch.ar_rows], all_rows[batch.masked_rows], batch)
    torch.testing.assert_close(lean.total, full.total, rtol=1e-10, atol=0)
    for mine, other in zip(*(torch.autograd.grad(loss.total, list(model.parameters())) for loss in (lean, full))):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-12)


@given(st.integers(0, 40), st.data(), seeds, st.floats(1e-3, 1.0))
def test_masks_spare_the_prompt_and_are_reproducible(count: int, data: st.DataObject, seed: int, least: float) -> None:
    frozen = data.draw(st.integers(0, count))
    masked, p_mask = draw_masks(count, generator(seed), min_p_mask=least, frozen_prefix=frozen)
    assert masked.shape == (count,) and masked.dtype == torch.bool and not masked[:frozen].any()
    assert least <= p_mask <= 1 and type(p_mask) is float
    again, p_again = draw_masks(count, generator(seed), min_p_mask=least, frozen_prefix=frozen)
    assert torch.equal(masked, again) and p_mask == p_again


def test_masks_have_their_stated_frequency() -> None:
    random, shares = generator(0), []
    for _ in range(200):
        masked, p_mask = draw_masks(500, random, min_p_mask=0.2)
        shares.append(p_mask)
        # Five standard deviations.
        assert abs(int(masked.sum()) - 500 * p_mask) <= 5 * math.sqrt(500 * p_mask * (1 - p_mask)) + 1e-9
    assert min(shares) < 0.25 and max(shares) > 0.95 and abs(sum(shares) / 200 - 0.6) < 0.08
    masked, p_mask = draw_masks(50, random, min_p_mask=1.0, frozen_prefix=20)
    assert p_mask == 1.0 and masked.tolist() == [False] * 20 + [True] * 30


def test_masks_estimate_the_sum_over_all_tokens() -> None:
    """Why masked rows are divided by p_mask: the weights of masked tokens add up to the number of tokens, on average."""
    random, total = generator(4), 0.0
    for _ in range(3000):
        masked, p_mask = draw_masks(20, random, min_p_mask=0.05)
        total += float(masked.sum()) / p_mask
    assert abs(total / 3000 / 20 - 1) < 0.02


BATCH, NOISY = dual_stream_batch(1, [5]), noise_aware_batch(1, [2])
N, M = len(BATCH.ar_rows), len(BATCH.masked_rows)


@pytest.mark.parametrize(
    "text, call",
    {
        f"dual_stream_loss: ar_logits must have shape ({N}, vocab), got ({N + 1}, 3). It takes the listed rows only.": lambda: (
            dual_stream_loss(torch.zeros(N + 1, 3), torch.zeros(M, 3), BATCH)
        ),
        "masked_logits must have shape": lambda: dual_stream_loss(torch.zeros(N, 3), torch.zeros(1, M, 3), BATCH),
        "TypeError: ar_logits must be floating, got torch.int64": lambda: dual_stream_loss(
            torch.zeros(N, 3, dtype=torch.int64), torch.zeros(M, 3), BATCH
        ),
        "noise_aware_loss: student_logits must have shape": lambda: noise_aware_loss(
            torch.zeros(len(NOISY.ar_rows), 3), torch.zeros(99, 3), torch.zeros(99, 3), NOISY
        ),
        "teacher_logits must have the shape of student_logits": lambda: noise_aware_loss(
            torch.zeros(len(NOISY.ar_rows), 3), torch.zeros(len(NOISY.student_rows), 3), torch.zeros(99, 3), NOISY
        ),
        "frozen_prefix must lie in 0 .. 3, got 4": lambda: draw_masks(3, generator(0), frozen_prefix=4),
        "count must be at least 0, got -1": lambda: draw_masks(-1, generator(0)),
        "min_p_mask must lie in (0, 1], got 0.0": lambda: draw_masks(3, generator(0), min_p_mask=0.0),
        "t must lie in [0, 1], got 1.5": lambda: draw_masks(3, generator(0), t=1.5),
        "average must be one of 'global', 'sequence', got 'rank'": lambda: dual_stream_loss(
            torch.zeros(N, 3), torch.zeros(M, 3), BATCH, average="rank"
        ),
        "noise_level: rank must be 0 or more, got -1": lambda: noise_level(0, 0, -1),
        "TypeError: step must be an integer, got float": lambda: noise_level(0, 0.5),
        "TypeError: generator must be a torch.Generator, got NoneType": lambda: draw_masks(3, None),
        "TypeError: count must be an int, got float": lambda: draw_masks(3.0, generator(0)),
    }.items(),
)
def test_errors(call: Any, text: str) -> None:
    error, text = kind_of(text)
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value) and str(caught.value).startswith("pdkernels.training.")
