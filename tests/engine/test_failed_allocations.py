"""An allocation of pages that fails ends the requests that it was for, with an error, and the engine serves the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pdkernels.cache import PagePool, WindowedPool
from pdkernels.cache.windowed_pool import SPARE, most_pages
from pdkernels.decoding import generate
from pdkernels.engine import Engine
from pdkernels.engine.tree import PrefixTree
from pdkernels.models.architectures.windows import Window
from tests.decoding.test_windows import model_with
from tests.engine.test_windows import NEW, PAGE, PIECE, check_given_back, drawn, engine, pool_of, small_pages

__all__ = ["small_pages"]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "end_tokens": ()}
SECONDS = 30
"""For all requests of a test, on a busy machine: one that waits for ever takes longer."""


def check_free(one: Engine) -> None:
    """No page is held but by earlier texts."""
    tree, pool = one._memory.pages, one._memory.pages.pool
    if isinstance(pool, WindowedPool):
        check_given_back(one)
    assert pool.num_pages - pool.available == len(tree._pages)


def failing(patch: pytest.MonkeyPatch, kind: type, name: str, fails: Callable[[], bool]) -> None:
    """Makes calls of a method fail, some of them."""
    method = getattr(kind, name)

    def wrapped(self: Any, *arguments: Any) -> Any:
        if arguments[-1] != 0 and fails():  # of no pages at all never fails
            raise MemoryError("out of pages")
        return method(self, *arguments)

    patch.setattr(kind, name, wrapped)


@pytest.mark.parametrize(
    "windows, kept",
    [((Window(16), None), 5000), ((Window(16), Window(33)), 5000), ((Window(16), None), 0), ((None, None), 5000)],
    ids=["both", "windows alone", "nothing kept", "no windows"],
)
@pytest.mark.parametrize(
    "kind, name",
    [
        (PagePool, "allocate"),
        (PagePool, "copy_slots_"),
        (WindowedPool, "take"),
        (WindowedPool, "promise"),
        (PrefixTree, "keep"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_requests_end_whatever_allocation_fails(
    kind: type, name: str, windows: tuple[Window | None, ...], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (windows == (None, None) and kind is WindowedPool) or (name == "copy_slots_" and not kept):
        pytest.skip("it is not called")
    model, chance, begun = model_with(windows), random.Random(7), drawn(1, 300)
    texts = [[*begun[: chance.randint(20, 300)], *drawn(seed, chance.randint(1, 60))] for seed in range(10)]
    expected = [generate(model, text, **GREEDY).tokens for text in texts]
    with engine(model, kept_prompt_tokens=kept, cache_tokens=2000, max_running=4) as one:
        one.submit(texts[0], **GREEDY).result(SECONDS)
        with monkeypatch.context() as patch:
            failing(patch, kind, name, lambda: chance.random() < 0.2)
            handles = [
                one.submit(text, ("autoregressive", "jacobi")[at % 2], **GREEDY) for at, text in enumerate(texts)
            ]
            failed = 0
            for handle, tokens in zip(handles, expected):
                try:
                    assert handle.result(SECONDS).tokens.equal(tokens)
                except MemoryError as error:
                    assert "out of pages" in str(error)
                    failed += 1
        assert failed
        for text, tokens in zip(texts, expected):
            assert one.submit(text, **GREEDY).result(SECONDS).tokens.equal(tokens)
    check_free(one)


def test_a_request_that_would_wait_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that nobody gives back, of either kind."""
    monkeypatch.setattr("pdkernels.engine.pages._ALONE", 0.2)
    model, text = model_with((Window(16), None)), drawn(1, 100)
    expected = generate(model, text, **GREEDY).tokens
    with engine(model, kept_prompt_tokens=0) as one:
        pool = pool_of(one)
        lost = pool.allocate(pool.available - 2)
        handles = [one.submit(text, **GREEDY) for _ in range(3)]
        for number, handle in enumerate(handles):
            with pytest.raises(
                MemoryError, match=f"request {number} finds too few pages, and no other request has any"
            ):
                handle.result(SECONDS)
        pool.release(lost)
        assert one.submit(text, **GREEDY).result(SECONDS).tokens.equal(expected)
        pool.promise(lost_need := {16: pool.room(16) - 2})
        with pytest.raises(MemoryError, match="request 4 finds too few pages"):
            one.submit(text, **GREEDY).result(SECONDS)
        pool.take_back(lost_need)
        assert one.submit(text, **GREEDY).result(SECONDS).tokens.equal(expected)
    check_free(one)


def test_many_requests_join_a_small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for the longest request and hardly more; one that is too long for the windows is refused among them."""
    model, need = model_with((Window(16), None)), most_pages(16, 2 * PIECE, PAGE)
    monkeypatch.setattr("pdkernels.engine.pages._sizes", lambda *_: (45, {16: 3 * need + SPARE}))
    texts = [drawn(seed, 20 + 23 * (seed % 13)) for seed in range(14)]
    with engine(model, kept_prompt_tokens=2000, max_running=8, max_prompt_tokens=400) as one:
        handles = [
            one.submit(text, ("autoregressive", "jacobi")[at % 3 == 0], **GREEDY) for at, text in enumerate(texts)
        ]
        refused = one.submit(drawn(30, 400), **GREEDY)
        for text, handle in zip(texts, handles):
            assert handle.result(SECONDS).tokens.equal(generate(model, text, **GREEDY).tokens)
        with pytest.raises(MemoryError, match="a request needs 5. pages of 45. Raise cache_tokens"):
            refused.result(SECONDS)
        assert one.metrics().preemptions > 0
    check_free(one)
