"""Philox4x32-10 against the known answers published with Random123, and the layout of its counter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdkernels.decoding.causal._filler import filler_words
from pdkernels.reference.philox import as_seeds, philox4x32, random_words

ONES = 0xFFFFFFFF

# counter, key, answer: the three philox4x32 10 lines of Random123's kat_vectors
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert philox4x32(torch.tensor(counter), torch.tensor(key)).tolist() == list(answer)


def test_vectorised_equals_one_at_a_time() -> None:
    counters = torch.randint(0, 2**32, (5, 7, 4), generator=torch.Generator().manual_seed(1))
    key = torch.tensor([3, 5])
    together = philox4x32(counters, key)
    assert together.shape == (5, 7, 4)
    for i in range(5):
        for j in range(7):
            assert torch.equal(together[i, j], philox4x32(counters[i, j], key))


word = st.integers(0, ONES)


@given(st.integers(0, 2**64 - 1), word, word, st.integers(0, 2**34 - 1))
def test_random_words_counter_layout(seed: int, step: int, row: int, column: int) -> None:
    got = random_words(seed, torch.tensor(step), torch.tensor(row), torch.tensor(column)).item()
    counter = torch.tensor([column // 4, row, step, 0])
    key = torch.tensor([seed % 2**32, seed // 2**32])
    assert got == philox4x32(counter, key)[column % 4].item()


@given(st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 13))
def test_decoder_words_have_the_same_bits(seed: int, steps: int, slots: int) -> None:
    expected = random_words(seed, torch.arange(steps)[:, None], torch.tensor(0), torch.arange(slots)[None])
    assert torch.equal(filler_words(as_seeds(seed, torch.device("cpu")), steps, slots), expected)
