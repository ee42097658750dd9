"""Packed batches against the layouts written token by token: the position of each token, what it sees, and what it predicts."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.training import (
    DualStreamBatch,
    DualStreamSample,
    NoiseAwareBatch,
    NoiseAwareSample,
    pack_dual_stream,
    pack_noise_aware,
)
from tests.harness.pretended_gpu import pretended_gpu, without_gpu
from tests.support.errors import kind_of

PAD, END, MASK = 50, 3, 99


class Token(NamedTuple):
    sample: int
    stream: str
    position: int
    id: int
    block: int = -1


def ids(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Few of them, so that noise is often right and end tokens are frequent."""
    return torch.randint(6, shape, generator=generator)


@st.composite
def noise_aware_samples(draw: st.DrawFn) -> list[NoiseAwareSample]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    samples = []
    for _ in range(draw(st.integers(0, 3))):
        blocks, size = draw(st.integers(0, 4)), draw(st.integers(1, 5))
        noisy = ids(generator, blocks, size)
        clean = torch.where(torch.rand(blocks, size, generator=generator) < 0.6, noisy, ids(generator, blocks, size))
        prompt = ids(generator, draw(st.integers(0, 4)))
        samples.append(NoiseAwareSample(*(x.masked_fill(x == 4, PAD) for x in (prompt, clean, noisy))))
    return samples


@st.composite
def dual_stream_samples(draw: st.DrawFn) -> list[DualStreamSample]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    lengths = draw(st.lists(st.integers(0, 9), max_size=3))
    p_mask = st.floats(0.01, 1.0)
    return [
        DualStreamSample(ids(generator, n), torch.rand(n, generator=generator) < 0.5, draw(p_mask)) for n in lengths
    ]


def noise_aware_tokens(samples: list[NoiseAwareSample], layout: str) -> list[Token]:
    tokens = []
    for number, sample in enumerate(samples):
        start, size = len(sample.prompt), sample.clean.shape[1]
        tokens += [Token(number, "prompt", p, int(token)) for p, token in enumerate(sample.prompt)]
        blocks = {
            stream: [
                [Token(number, stream, start + j * size + t, int(token), j) for t, token in enumerate(row)]
                for j, row in enumerate(rows)
            ]
            for stream, rows in (("clean", sample.clean), ("noisy", sample.noisy))
        }
        if layout == "streams":
            order = blocks["clean"] + blocks["noisy"]
        else:
            order = [block for pair in zip(blocks["noisy"], blocks["clean"]) for block in pair]
        tokens += [token for block in order for token in block]
    return tokens


def check_frame(batch: NoiseAwareBatch | DualStreamBatch, tokens: list[Token], length: int, sees: Any) -> None:
    """Ids, positions and mask, padding included."""
    padding = length - len(tokens)
    assert batch.tokens.tolist() == [token.id for token in tokens] + [PAD] * padding
    assert batch.positions.tolist() == [token.position for token in tokens] + [0] * padding
    dense = torch.zeros(length, length, dtype=torch.bool)
    for i, row in enumerate(tokens):
        for j, column in enumerate(tokens):
            dense[i, j] = row.sample == column.sample and sees(row, column)
    assert torch.equal(batch.mask.dense(), dense)
    assert {part.dtype for part in batch if isinstance(part, torch.Tensor)} <= {torch.int64, torch.float32}


@settings(max_examples=120)
@given(
    noise_aware_samples(),
    st.sampled_from(["noisy", "clean", "window"]),
    st.sampled_from(["streams", "interleaved"]),
    st.sampled_from([None, "drop", "keep"]),
    st.none() | st.integers(0, 7),
)
def test_noise_aware_batches(
    samples: list[NoiseAwareSample], conditioning: str, layout: str, ends: str | None, padding: int | None
) -> None:
    tokens = noise_aware_tokens(samples, layout)
    length = len(tokens) + (padding or 0)
    window = 2 if conditioning == "window" else None
    batch = pack_noise_aware(
        samples,
        None if padding is None else length,
        pad_token=PAD,
        end_token=END if ends else None,
        after_end=ends or "drop",
        conditioning=conditioning,
        window=window,
        layout=layout,
    )

    def sees(row: Token, column: Token) -> bool:
        if row.stream != "noisy":
            return column.stream != "noisy" and column.position <= row.position
        first = {"noisy": 0, "clean": row.block, "window": row.block // 2 * 2}[conditioning]
        if column.stream == "noisy":
            return column.block >= first and column.position <= row.position
        return column.stream == "prompt" or column.block < first

    check_frame(batch, tokens, length, sees)

    at = {(token.sample, token.stream, token.position): row for row, token in enumerate(tokens)}
    ar, students = [], []
    for number, sample in enumerate(samples):
        answer, start = sample.clean.flatten().tolist(), len(sample.prompt)
        stream = [*(("prompt", p) for p in range(start)), *(("clean", start + i) for i in range(len(answer)))]
        last = start + answer.index(END) if ends == "drop" and END in answer else len(stream)
        size = sample.clean.shape[1]
        for p in range(len(stream) - 1):
            row, target, i = at[(number, *stream[p])], tokens[at[(number, *stream[p + 1])]].id, p - start
            block = answer[i // size * size : i + 1] if i >= 0 and (i + 1) % size else []
            released = ends == "keep" and (END in block or target == PAD)
            if p + 1 <= last and not released:
                ar.append((row, target))
        for j, (clean, noisy) in enumerate(zip(sample.clean.tolist(), sample.noisy.tolist())):
            size = len(clean)
            for t in range(size - 1 if conditioning == "clean" else size):
                position = start + j * size + t
                padding = ends == "keep" and noisy[t] == PAD
                if clean[: t + 1] != noisy[: t + 1] and position < last and not padding:
                    students.append((at[number, "noisy", position], at[number, "clean", position]))
    assert list(zip(batch.ar_rows.tolist(), batch.ar_labels.tolist(), strict=True)) == ar
    assert list(zip(batch.student_rows.tolist(), batch.teacher_rows.tolist(), strict=True)) == students


@settings(max_examples=120)
@given(dual_stream_samples(), st.integers(1, 5), st.sampled_from(["causal", "block"]), st.none() | st.integers(0, 7))
def test_dual_stream_batches(samples: list[DualStreamSample], block: int, clean: str, padding: int | None) -> None:
    tokens: list[Token] = []
    ar, masked = [], []
    for number, sample in enumerate(samples):
        start, count, hidden = len(tokens), len(sample.clean), sample.masked.tolist()
        copies = dict(
            noisy=[MASK if h else t for t, h in zip(sample.clean.tolist(), hidden)], clean=sample.clean.tolist()
        )
        tokens += [
            Token(number, stream, p, token, p // block)
            for stream, copy in copies.items()
            for p, token in enumerate(copy)
        ]
        ar += [(start + count + p, copies["clean"][p + 1]) for p in range(count - 1)]
        masked += [(start + p, copies["clean"][p], pytest.approx(1 / sample.p_mask)) for p in range(count) if hidden[p]]
    length = len(tokens) + (padding or 0)
    batch = pack_dual_stream(samples, block, MASK, None if padding is None else length, pad_token=PAD, clean=clean)

    def sees(row: Token, column: Token) -> bool:
        if row.stream == "noisy":
            return column.block == row.block if column.stream == "noisy" else column.block < row.block
        if column.stream == "noisy":
            return False
        return column.position <= row.position if clean == "causal" else column.block <= row.block

    check_frame(batch, tokens, length, sees)
    assert list(zip(batch.ar_rows.tolist(), batch.ar_labels.tolist(), strict=True)) == ar
    columns = (batch.masked_rows, batch.masked_labels, batch.masked_weights)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == masked


def test_samples_are_left_alone_and_may_be_strided_int32() -> None:
    wide = torch.arange(24, dtype=torch.int32).view(4, 6)
    sample = NoiseAwareSample(wide[0, ::2], wide[1:3, ::2], wide[1:3, 1::2])
    before = wide.clone()
    batch = pack_noise_aware([sample])
    assert batch.tokens.dtype == torch.int64
    assert batch.tokens.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 7, 9, 11, 13, 15, 17]
    dual = pack_dual_stream([DualStreamSample(wide[3, ::2], torch.tensor([True, False, True]), 0.5)], 2, MASK)
    assert dual.tokens.tolist() == [MASK, 20, MASK, 18, 20, 22]
    assert torch.equal(wide, before)


GOOD = NoiseAwareSample(*(torch.zeros(shape, dtype=torch.int64) for shape in ((2,), (2, 3), (2, 3))))
DUAL = DualStreamSample(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool), 0.5)


@pytest.mark.parametrize(
    "message, call",
    {
        "pack_noise_aware: noisy must have shape (2, 3), got (2, 2).": lambda: pack_noise_aware(
            [GOOD._replace(noisy=torch.zeros(2, 2, dtype=torch.int64))]
        ),
        "pack_noise_aware: clean must have shape (any, any), got (6,).": lambda: pack_noise_aware(
            [GOOD._replace(clean=torch.zeros(6, dtype=torch.int64))]
        ),
        "TypeError: pack_noise_aware: prompt must be an int32 or int64 tensor, got torch.float32. Convert it with .to(torch.int64).": lambda: (
            pack_noise_aware([GOOD._replace(prompt=torch.zeros(2))])
        ),
        "pack_noise_aware: length must be at least the 28 tokens of the samples, got 27.": lambda: pack_noise_aware(
            [GOOD, GOOD], length=27
        ),
        "pack_dual_stream: masked must have shape (4,), got (3,).": lambda: pack_dual_stream(
            [DUAL._replace(masked=torch.zeros(3, dtype=torch.bool))], 2, MASK
        ),
        "TypeError: pack_dual_stream: masked must be a bool tensor, got torch.float32.": lambda: pack_dual_stream(
            [DUAL._replace(masked=torch.zeros(4))], 2, MASK
        ),
        "TypeError: pack_dual_stream: masked must be a bool tensor, got list.": lambda: pack_dual_stream(
            [DUAL._replace(masked=[True] * 4)], 2, MASK
        ),
        "TypeError: pack_dual_stream: samples must hold DualStreamSamples, got tuple.": lambda: pack_dual_stream(
            [tuple(DUAL)], 2, MASK
        ),
        "TypeError: pack_noise_aware: samples must hold NoiseAwareSamples, got tuple.": lambda: pack_noise_aware(
            [tuple(GOOD)]
        ),
        "TypeError: pack_dual_stream: mask_token must be an integer, got float.": lambda: pack_dual_stream(
            [DUAL], 2, 1.5
        ),
        "TypeError: pack_dual_stream: mask_token must be an integer, got NoneType.": lambda: pack_dual_stream(
            [DUAL], 2, None
        ),
        "pack_dual_stream: mask_token must be 0 or more, got -1.": lambda: pack_dual_stream([DUAL], 2, -1),
        "pack_noise_aware: after_end must be one of 'drop', 'keep', got 'stop'.": lambda: pack_noise_aware(
            [GOOD], after_end="stop"
        ),
        "pack_noise_aware: end_token must be given with after_end='keep', got None.": lambda: pack_noise_aware(
            [GOOD], after_end="keep"
        ),
        "TypeError: pack_noise_aware: pad_token must be an integer, got float.": lambda: pack_noise_aware(
            [GOOD], pad_token=0.5
        ),
        "pack_dual_stream: p_mask must lie in (0, 1], got 0.0.": lambda: pack_dual_stream(
            [DUAL._replace(p_mask=0.0)], 2, MASK
        ),
        "pack_dual_stream: length must be at least the 8 tokens of the samples, got 7.": lambda: pack_dual_stream(
            [DUAL], 2, MASK, length=7
        ),
    }.items(),
)
def test_errors(call: Any, message: str) -> None:
    error, message = kind_of(message)
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == f"pdkernels.training.{message}"


@without_gpu
def test_batches_are_on_the_cpu_wherever_their_samples_are() -> None:
    noisy = NoiseAwareSample(torch.tensor([7]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 9], [3, 4]]))
    masked = DualStreamSample(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]), 0.5)
    expected = pack_noise_aware([noisy], 10), pack_dual_stream([masked], 2, 9, 8)
    with pretended_gpu(), torch.device("cuda"):
        there = NoiseAwareSample(*(ids.to("cuda") for ids in noisy))
        hidden = masked._replace(clean=masked.clean.to("cuda"), masked=masked.masked.to("cuda"))
        for batch, same in zip(
            (pack_noise_aware([there], 10), pack_dual_stream([hidden], 2, 9, 8)), expected, strict=True
        ):
            assert all(
                a == b if name in ("mask", "samples") else torch.equal(a, b)
                for name, a, b in zip(batch._fields, batch, same, strict=True)
            )
