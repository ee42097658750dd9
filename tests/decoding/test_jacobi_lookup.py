"""Jacobi decoding with drafts that are looked up: the tokens of greedy decoding, the drafts and acceptances of the plain reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.decoding.causal.lookup import POOL, REACH, Lookup
from pdkernels.reference import jacobi_lookup as reference
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.lookup_draft import GROWTH, looked_up
from tests.decoding.test_jacobi import assert_same, small_transformer
from tests.support.base import KeepsCache, page_sizes, reads_of_the_device
from tests.support.causal import SCRIPTS, FakeModel, Script

LOOPS: dict[str, Script] = {
    "copy": lambda history: history[-6] if len(history) > 5 else 1 + len(history),
    "copy with faults": lambda history: history[-7] if len(history) % 9 and len(history) > 6 else len(history) % 5,
    "few words": lambda history: (history[-1] * 2 + history[-2] + len(history) // 8) % 4 if len(history) > 1 else 1,
}
ALL_SCRIPTS = SCRIPTS | LOOPS
token = st.integers(0, 22)
few = st.integers(0, 3)  # so that prompts repeat themselves
prompts = st.lists(st.lists(token | few, min_size=1, max_size=20), min_size=1, max_size=4)
lengths = st.tuples(st.sampled_from(["block_size", "window"]), st.integers(1, 20))


@settings(max_examples=150, deadline=None)
@given(
    script=st.sampled_from(sorted(ALL_SCRIPTS)),
    ties=st.booleans(),
    batch=prompts,
    limit=st.integers(0, 40),
    length=lengths,
    ends=st.lists(token, max_size=2),
    page_size=page_sizes,
)
def test_equals_greedy_and_the_reference(
    script: str,
    ties: bool,
    batch: list[list[int]],
    limit: int,
    length: tuple[str, int],
    ends: list[int],
    page_size: Any,
) -> None:
    model = FakeModel(ALL_SCRIPTS[script], ties=ties)
    options = {length[0]: length[1], "page_size": page_size, "draft": "lookup"}
    result = generate(model, batch, "jacobi", max_new_tokens=limit, end_tokens=ends, trace=True, **options)
    expected = [
        reference.jacobi_lookup(model.plain, prompt, limit, block_size=length[1], end_tokens=ends) for prompt in batch
    ]
    for one, prompt in zip(expected, batch, strict=True):
        assert one.tokens == autoregressive(model.plain, prompt, limit, end_tokens=ends).tokens
    assert_same(result, expected, limit)


@settings(max_examples=30, deadline=None)
@given(
    weights=st.integers(0, 3),
    batch=prompts,
    limit=st.integers(1, 30),
    length=lengths,
    ends=st.lists(token, max_size=2),
    page_size=page_sizes,
)
def test_a_random_transformer(
    weights: int, batch: list[list[int]], limit: int, length: tuple[str, int], ends: list[int], page_size: Any
) -> None:
    model = small_transformer(weights)

    def plain(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(tokens, positions=positions, mask=mask)

    options = {length[0]: length[1], "page_size": page_size, "draft": "lookup"}
    result = generate(model, batch, "jacobi", max_new_tokens=limit, end_tokens=ends, trace=True, **options)
    expected = [
        reference.jacobi_lookup(plain, prompt, limit, block_size=length[1], end_tokens=ends) for prompt in batch
    ]
    for one, prompt in zip(expected, batch, strict=True):
        assert one.tokens == autoregressive(plain, prompt, limit, end_tokens=ends).tokens
    assert_same(result, expected, limit)


@pytest.mark.parametrize("script", sorted(LOOPS))
def test_long_texts_of_a_batch(script: str) -> None:
    """Long enough for full pools and for drafts of every length."""
    batch = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [2, 7, 2, 7, 2]]
    model = FakeModel(LOOPS[script])
    result = generate(model, batch, "jacobi", max_new_tokens=150, trace=True, draft="lookup")
    expected = [reference.jacobi_lookup(model.plain, prompt, 150) for prompt in batch]
    assert_same(result, expected, 150)
    assert result.stats.tokens_per_forward > 2
    drafted = {len(step.draft) for one in expected for step in one.trace}
    assert 1 in drafted and 16 in drafted and len(drafted) > 4
    for index, prompt in enumerate(batch):
        alone = generate(model, prompt, "jacobi", max_new_tokens=150, trace=True, draft="lookup")
        assert alone.stats.trace[0] == result.stats.trace[index]


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.lists(few, min_size=1, max_size=30), min_size=1, max_size=3),
    pool=st.lists(st.lists(few, min_size=2, max_size=6), max_size=POOL + 2),
    slots=st.integers(6, 18),
)
def test_the_search_is_that_of_the_reference(texts: list[list[int]], pool: list[list[int]], slots: int) -> None:
    lookup = Lookup(len(texts), 40, slots, torch.device("cpu"))
    for number, text in enumerate(texts):
        lookup.text[number] = 3  # rejected parts of earlier drafts
        lookup.text[number, : len(text) - 1] = torch.tensor(text[:-1])
    for entry in pool:
        lookup.keep(torch.tensor([entry + [-1] * (slots - len(entry))] * len(texts)), torch.ones(len(texts)) > 0)
    for text, draft in zip(texts, drafts(lookup, texts, slots), strict=True):
        assert draft == [text[-1], *looked_up(text, pool[-POOL:], slots - 1)]


def drafts(lookup: Lookup, texts: list[list[int]], slots: int) -> list[list[int]]:
    """After texts whose last token is the known one."""
    draft, rows = torch.zeros(len(texts), slots, dtype=torch.int64), torch.full((len(texts),), slots)
    draft[:, 0] = torch.tensor([text[-1] for text in texts])
    lookup.draft_(draft, rows, torch.tensor([len(text) - 1 for text in texts]))
    return [tokens[:count] for tokens, count in zip(draft.tolist(), rows.tolist(), strict=True)]


def test_only_the_sequences_that_rejected_something_keep_it() -> None:
    lookup = Lookup(2, 8, 4, torch.device("cpu"))
    lookup.text[:, :3] = torch.tensor([9, 5, 6])
    lookup.keep(torch.tensor([[5, 6, 7, -1], [5, 6, 8, -1]]), torch.tensor([True, False]))
    assert drafts(lookup, [[9, 5, 6]] * 2, 4) == [[6, 7], [6]]
    lookup.clear()
    lookup.text[:, :3] = torch.tensor([9, 5, 6])
    assert drafts(lookup, [[9, 5, 6]] * 2, 4) == [[6], [6]]


def test_a_quotation_is_drafted_from_the_prompt() -> None:
    """A match grows with what is accepted, and so does the draft; without a match a forward has one row."""
    quoted = [*range(1, 20)]
    model = FakeModel(
        lambda history: 20 if len(history) == 20 else history[len(history) - 21] if len(history) > 20 else 0
    )
    prompt = [*quoted, 21]
    result = generate(model, prompt, "jacobi", max_new_tokens=20, draft="lookup", block_size=8, trace=True)
    assert result.tokens.tolist() == [20, *quoted]
    steps = result.stats.trace[0]
    assert [len(step.draft) for step in steps][:3] == [1, 1, 1 + 2 * GROWTH]
    assert all(step.accepted == len(step.draft) for step in steps)
    assert max(len(step.draft) for step in steps) == 8 and REACH * GROWTH >= 8


def test_one_read_per_step_and_no_row_without_a_match() -> None:
    model = KeepsCache(small_transformer(1))
    result = generate(model, [[1, 2], [3]], "jacobi", max_new_tokens=24, draft="lookup")
    assert (
        reads_of_the_device(model, [[1, 2], [3]], "jacobi", max_new_tokens=24, draft="lookup") == result.stats.forwards
    )
    fake = FakeModel(SCRIPTS["position"])
    generate(fake, [[0]], "jacobi", max_new_tokens=12, draft="lookup")
    assert fake.rows_seen == [1] * 12


SNIPPETS = ["for i in range(10):\n    for i in range(", "import os\nimport re\nimport ", "class Node:\n"]


def test_tiny_code_repeats_itself() -> None:
    model = models.load("tiny-code")
    greedy = generate(model, SNIPPETS, max_new_tokens=96)
    result = generate(model, SNIPPETS, "jacobi", max_new_tokens=96, draft="lookup")
    assert all(torch.equal(one, other) for one, other in zip(result.tokens, greedy.tokens, strict=True))
    assert result.stats.tokens_per_forward > 1.5


@pytest.mark.slow
def test_a_pretrained_model_quotes_its_prompt() -> None:
    """2.8 tokens per forward when this was written."""
    try:
        model = models.load("smollm2-135m-instruct")
    except ImportError as absent:
        pytest.skip(str(absent))
    mail = (
        "Hi team, please send me the report until friday. I has seen that there was some mistakes in the last one, so please check "
        "the numbers twice. The meeting are moved to monday at 10. Thank you very much for you're help, Anna"
    )
    chat = [{"role": "user", "content": f"Correct the grammar of this text and repeat it in full:\n\n{mail}"}]
    greedy = generate(model, chat, max_new_tokens=64)
    result = generate(model, chat, "jacobi", max_new_tokens=64, draft="lookup")
    assert torch.equal(result.tokens, greedy.tokens)
    assert result.stats.tokens_per_forward > 2
