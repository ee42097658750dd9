"""Earlier texts over the pages of a pool: what is found, what is forgotten, and that it is as if computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels.cache import PagePool
from pdkernels.decoding import generate
from pdkernels.engine.tree import SHORTEST, PrefixTree

PAGE = 8


def tree_of(pages: int = 64, limit: int = 1000, even: int = 10**9) -> PrefixTree:
    return PrefixTree(PagePool(1, pages, PAGE, 1, 4), limit, even)


def keep(tree: PrefixTree, text: list[int], root: tuple[Any, ...] = ()) -> None:
    """As a request does, which then gives its pages back."""
    pages = tree.pool.allocate(-(-len(text) // PAGE))
    tree.keep(root, text, pages)
    tree.pool.release(pages)


def common(left: list[int], right: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


texts = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=8).map(
    lambda ends: [[0] * SHORTEST + end for end in ends]
)


@given(texts=texts, wanted=st.lists(st.integers(0, 1), max_size=12))
def test_the_longest_common_beginning_is_found(texts: list[list[int]], wanted: list[int]) -> None:
    tree, text = tree_of(), [0] * SHORTEST + wanted
    for one in texts:
        keep(tree, one)
    found = tree.find((), text)
    assert found.length == max((common(one, text) for one in texts), default=0)
    assert len(found.pages) == found.length // PAGE and (found.partial is None) == (found.length % PAGE == 0)
    assert tree.tokens == sum(len(page.tokens) for page in tree._pages)
    assert tree.pool.num_pages - tree.pool.available == len(tree._pages)


def test_texts_of_different_roots_share_nothing() -> None:
    tree, text = tree_of(), list(range(30))
    keep(tree, text, ("one",))
    assert [tree.find((name,), text).length for name in ("one", "another")] == [30, 0]
    keep(tree, text, ("another",))
    first, second = (tree.find((name,), text) for name in ("one", "another"))
    assert first.length == second.length == 30 and not {*first.pages} & {*second.pages}


def test_what_is_old_is_forgotten_before_what_is_new() -> None:
    tree = tree_of(limit=3 * 24)
    old, used, new, newest = ([n, *range(23)] for n in range(4))
    for text in (old, used, new):
        keep(tree, text)
    tree.find((), used)
    tree.find((), new)
    keep(tree, newest)
    assert [tree.find((), text).length for text in (old, used, new, newest)] == [0, 24, 24, 24]
    assert tree.forgotten == 24


def test_what_costs_little_is_forgotten_before_what_costs_much() -> None:
    """Rows with many before them cost more, so the end of a long text outlives younger short ones, but not all."""
    tree = tree_of(limit=160, even=40)
    long, short = [0] * 120, [[n, *range(23)] for n in range(1, 9)]
    keep(tree, long)
    for text in short[:3]:
        keep(tree, text)
    assert tree.find((), short[0]).length < 24 and len(tree._roots[()].after) == 3
    assert max(page.end for page in tree._pages) == 120
    for _ in range(5):
        for text in short[3:7]:
            keep(tree, text)
    assert max(page.end for page in tree._pages) < 120


def test_pages_that_a_request_holds_are_not_taken() -> None:
    tree = tree_of(pages=4)
    keep(tree, list(range(16)))
    held = tree.find((), list(range(16))).pages
    tree.pool.hold(held)
    keep(tree, list(range(50, 66)))
    assert not tree.reclaim(3) and tree.pool.available == 2
    assert tree.find((), list(range(16))).length == 16


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return pd.models.load("tiny-hybrid")


def drawn(seed: int, count: int) -> list[int]:
    return torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


NEW: dict[str, Any] = {"max_new_tokens": 40, "end_tokens": (60,), "temperature": 1.0}
SIZES: dict[str, Any] = {"max_prompt_tokens": 700, "max_new_tokens": 40, "prompt_tokens_per_step": 100}


def reused(engine: pd.Engine, model: Any, text: list[int]) -> tuple[int, list[int]]:
    """Tokens of a prompt that were known, and the answer, which is that of `generate`."""
    handle = engine.submit(text, **NEW)
    tokens = handle.result(60).tokens
    assert tokens.equal(generate(model, text, **NEW).tokens)
    return handle.reused, tokens.tolist()


def test_the_next_turn_of_a_chat_begins_where_the_last_one_ended(hybrid: Any) -> None:
    with pd.Engine(hybrid, **SIZES) as engine:
        text = drawn(0, 200)
        _, answer = reused(engine, hybrid, text)
        known, answer_2 = reused(engine, hybrid, [*text, *answer, *drawn(1, 50)])
        # The last token of an answer has not run.
        assert known == len(text) + len(answer) - 1
        known, _ = reused(engine, hybrid, [*text, *answer, *drawn(1, 50), *answer_2, *drawn(2, 30)])
        assert known == 200 + len(answer) + 50 + len(answer_2) - 1
    assert engine.metrics().kept_states > 2


def test_states_are_kept_at_multiples_and_after_the_last_end_token(
    hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdkernels.engine.tree.PrefixTree.every", 192)
    with pd.Engine(hybrid, **SIZES) as engine:
        text = [*drawn(0, 150), 60, *drawn(1, 130), 60, *drawn(2, 150)]
        reused(engine, hybrid, text)
        # An edit of an earlier turn goes back to a multiple, even if it is further back than any pending row.
        assert reused(engine, hybrid, [*text[:250], *drawn(3, 100)])[0] == 192
        # A template that writes the beginning of the last answer in another way.
        assert reused(engine, hybrid, [*text[:285], *drawn(4, 90)])[0] == 282
        # Where two texts have parted, the second has left its states for a third.
        assert reused(engine, hybrid, [*text[:250], *drawn(5, 100)])[0] == 250


@pytest.mark.parametrize("name", ["tiny-code", "tiny-hybrid"])
def test_kept_rows_have_the_bits_of_computed_ones(name: str) -> None:
    model: Any = pd.models.load(name)
    with pd.Engine(model, **SIZES) as engine:
        text = drawn(0, 150)
        text += engine.submit(text, **NEW).result(60).tokens.tolist()
    tree: Any = engine._memory.pages
    path, partial, length = tree._walk((), text)
    assert length == len(text) - 1
    cache = model.new_cache(1, len(text))
    with torch.inference_mode():
        model(torch.tensor([text[:length]]), cache=cache)
        cache.commit_(torch.tensor([length]))
        pages = torch.tensor([page.number for page in (*path, partial)])
        for kept, computed in zip((tree.pool.k, tree.pool.v), cache.row(0, length)):
            assert torch.equal(kept[:, pages].flatten(1, 2)[:, :length], computed)
        if partial.states:
            other = model.new_cache(1, len(text))
            other.kv.copy_row_(0, cache.kv, 0, length)
            other.load_states_(0, partial.states[length].saved)
            last = torch.tensor([text[-1:]])
            assert torch.equal(model(last, cache=other), model(last, cache=cache))


def test_states_count_in_the_limit_and_are_forgotten(hybrid: Any) -> None:
    with pd.Engine(hybrid, **SIZES, kept_prompt_tokens=600) as engine:
        tree: Any = engine._memory.pages
        for seed in range(4):
            reused(engine, hybrid, drawn(seed, 300))
            assert tree._size <= 600
            assert tree.states == sum(len(page.states) for page in tree._pages)
    assert engine.metrics().forgotten_tokens > 0
