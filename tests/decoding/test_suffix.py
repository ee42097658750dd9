"""Drafts from suffix automata: those of the plain form, pools, and what a token costs."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import SuffixPool, generate
from pdkernels.decoding.suffixes import Reader, SuffixIndex
from pdkernels.reference.suffix import suffix_draft
from tests.support.causal import SCRIPTS, FakeModel
from tests.support.tri_mode import small_transformer

TEXTS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=40))


@settings(max_examples=300)
@given(text=TEXTS, pool=st.lists(TEXTS, max_size=4), maximum=st.integers(1, 12))
def test_drafts_are_those_of_the_plain_form(text: list[int], pool: list[list[int]], maximum: int) -> None:
    """After every token of a text."""
    shared = SuffixPool()
    for other in pool:
        shared.add(other)
    for given_pool, texts in ((None, []), (shared, pool)):
        reader = Reader(given_pool)
        for count, token in enumerate(text, 1):
            reader.append(token)
            assert reader.draft(maximum) == suffix_draft(text[:count], texts, maximum)


def test_texts_that_join_the_pool_are_read_at_once() -> None:
    pool = SuffixPool()
    pool.add([1, 2, 3, 4])
    reader = Reader(pool)
    for token in (9, 1, 2):
        reader.append(token)
    assert reader.draft(9) == [3, 4]
    pool.add([1, 2, 5, 6])  # splits states that the reader is in
    reader.append(5)
    assert reader.draft(9) == [6]


def test_a_pool_forgets_its_oldest_texts() -> None:
    pool = SuffixPool(max_tokens=100)
    for number in range(40):
        pool.add(range(10 * number, 10 * number + 10))
        assert pool.tokens <= 100 + 22
    reader = Reader(pool)
    for token in (390, 391):
        reader.append(token)
    assert reader.draft(3) == [392, 393, 394]
    reader = Reader(pool)
    for token in (0, 1):
        reader.append(token)
    assert reader.draft(3) == []


def test_a_token_costs_the_same_in_long_texts() -> None:
    """Counted in states that are looked at, for repeating, random and growing patterns."""
    choice = random.Random(0)
    for text in ([1] * 4000, [n % 7 for n in range(4000)], [choice.randrange(3) for _ in range(4000)]):
        index = SuffixIndex()
        looked, link = 0, index._link

        class Counted(list):  # type: ignore[type-arg]
            def __getitem__(self, at: Any) -> Any:
                nonlocal looked
                looked += 1
                return list.__getitem__(self, at)

        index._link = Counted(link)
        index.begin()
        for token in text:
            index.append(token)
        assert looked < 70 * len(text) and len(index._len) <= 2 * len(text)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("page_size", [None, 3])
def test_a_pool_changes_forwards_and_no_tokens(temperature: float, page_size: int | None) -> None:
    model, prompts = small_transformer(1, head_dim=16).float(), [[3, 1, 4, 1, 5], [9], [2, 6]]
    drawn = {"temperature": temperature, "seed": 3, "max_new_tokens": 24, "end_tokens": ()}
    expected = generate(model, prompts, **drawn).tokens
    pool = SuffixPool()
    first, second = (generate(model, prompts, "suffix", pool=pool, page_size=page_size, **drawn) for _ in range(2))
    for found in (first, second):
        assert all(map(torch.equal, found.tokens, expected))
    # The second time the texts are known, so nearly everything is drafted.
    assert pool.tokens >= 2 * (8 + 3 * 24) and second.stats.forwards < 8 < first.stats.forwards


def test_steps_are_those_of_the_plain_form() -> None:
    for name, script in SCRIPTS.items():
        model = FakeModel(script)
        result = generate(model, [1, 2, 1, 2], "suffix", max_new_tokens=20, end_tokens=(), block_size=6, trace=True)
        text = [1, 2, 1, 2, int(result.tokens[0])]
        for step in result.stats.trace[0]:
            left = 24 - len(text)
            drafted = suffix_draft(text, [], min(6, left) - 1)[: min(6, left) - 1] if left > 1 else []
            assert list(step.draft) == [text[-1], *drafted], name
            text += [*step.draft[1 : step.accepted], step.predictions[step.accepted - 1]]
        assert text[4:] == result.tokens.tolist()


def test_threads_share_a_pool() -> None:
    model, pool = small_transformer(1, head_dim=16).float(), SuffixPool()
    expected = generate(model, [1, 2], max_new_tokens=12, end_tokens=()).tokens
    found: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(4):
            found.append(generate(model, [1, 2], "suffix", pool=pool, max_new_tokens=12, end_tokens=()).tokens)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and all(torch.equal(tokens, expected) for tokens in found)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_pool_can_be_copied(again: Any) -> None:
    """The copy has the texts, and a lock of its own."""
    pool = SuffixPool(8)
    for text in ([1, 2, 3, 4, 5], [6, 7, 8, 9]):
        pool.add(text)
    other = again(pool)
    pool.add([2, 3, 9])
    assert other.tokens == 9 and other.max_tokens == 8 and other.lock is not pool.lock
    other.add([7, 8, 1])
    readers = [Reader(other), Reader(pool)]
    for reader in readers:
        for token in (0, 2, 3):
            reader.append(token)
    assert [reader.draft(4) for reader in readers] == [[4, 5], [9]]


def test_what_is_refused() -> None:
    model = small_transformer(0)
    with pytest.raises(TypeError, match="pdkernels.decoding.suffix: pool must be a SuffixPool or None, got list"):
        generate(model, [1], "suffix", max_new_tokens=4, pool=[1])
    with pytest.raises(ValueError, match="pdkernels.decoding.SuffixPool: max_tokens must be at least 1, got 0"):
        SuffixPool(0)
    with pytest.raises(TypeError, match="max_tokens must be an int, got float"):
        SuffixPool(1.5)  # type: ignore[arg-type]
