"""What docs/threads.md promises: one model for many threads with their own caches, in a child process, and after pickling."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels import models
from pdkernels.cache import Cache
from pdkernels.decoding import find, generate
from pdkernels.models import Transformer, TransformerConfig

THREADS = 8
pytestmark = pytest.mark.filterwarnings("ignore:pdkernels.decoding.generate")


def new_model() -> Transformer:
    """With tables of rotations that are made, and outgrown, while the threads run."""
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate_size=48, max_positions=4
    )
    model = Transformer(config).requires_grad_(False)
    model.embedding.mul_(20)
    return model


def by_hand(model: Any, number: int) -> list[Tensor]:
    """Logits of a few forwards on a cache of this thread's own, and what the cache holds in the end."""
    kind: Literal["contiguous", "paged"] = ("contiguous", "paged")[number % 2]
    cache: Cache = model.new_cache(2, 40, kind=kind, page_size=4)
    generator, seen = torch.Generator().manual_seed(number), []
    for rows in (number + 1, 1, 3, 2):
        if kind == "paged":
            cache.reserve_(cache.lengths + rows)
        tokens = torch.randint(64, (2, rows), generator=generator)
        seen.append(model(tokens, cache=cache))
        cache.commit_(torch.full((2,), rows))
    return [*seen, cache.lengths, *cache.k, *cache.v]


def generated(model: Any, number: int) -> list[Tensor]:
    """A method, a prompt and a kind of cache for each thread; some of them draw."""
    method = ("autoregressive", "jacobi", "jacobi_multiblock", "autoregressive")[number % 4]
    options: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 4 == 3 else {}
    page_size = 4 if number % 2 else None
    prompt = torch.arange(3 + number) * 5 % 60
    options |= {"max_new_tokens": 12 + number, "page_size": page_size, "overflow": "warn"}
    result = generate(model, prompt, find(method), **options)
    return [result.tokens]


@pytest.mark.parametrize("work", [by_hand, generated])
def test_threads_with_their_own_caches_share_a_model(work: Callable[[Any, int], list[Tensor]]) -> None:
    """Bit for bit what each of them gets alone."""
    shared, barrier = new_model(), Barrier(THREADS)

    def together(number: int) -> list[Tensor]:
        barrier.wait()
        return [part for _ in range(2) for part in work(shared, number)]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(together, range(THREADS)))
    with ThreadPoolExecutor(1) as pool:
        alone = list(pool.map(lambda number: work(new_model(), number), range(THREADS)))
    assert len({tuple(parts[0].flatten().tolist()) for parts in alone}) > THREADS // 2, "all did the same"
    for parts, expected in zip(found, alone, strict=True):
        assert all(part.equal(right) for part, right in zip(parts, expected * 2, strict=True))


def test_a_forked_child_with_one_thread_works() -> None:
    model = new_model()
    expected = generate(model, [1, 2, 3], max_new_tokens=8, overflow="warn").tokens
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            same = generate(model, [1, 2, 3], max_new_tokens=8, overflow="warn").tokens.equal(expected)
            os._exit(0 if same else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_forked_child_runs_ops_on_threads_of_its_own() -> None:
    """Which hung while loops ran on OpenMP's threads."""
    x, weight = torch.randn(4, 256), torch.randn(1024, 256)
    expected = pd.linear(x, weight).numpy().tobytes()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        try:
            os._exit(0 if all(pd.linear(x, weight).numpy().tobytes() == expected for _ in range(50)) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("two_threads")
def test_bits_do_not_depend_on_threads() -> None:
    """Whoever computes a chunk rounds, and treats subnormal numbers, as the caller does."""
    x, weight = torch.randn(8, 512), torch.randn(2048, 512)
    logits, tiny = torch.randn(8, 50_000), torch.full((64, 4096), 1e-39)
    seen = []
    try:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            for threads in (1, 2, 3, 2):
                torch.set_num_threads(threads)
                for _ in range(20):
                    statistics = pd.token_statistics(logits)
                    parts = [pd.linear(x, weight), statistics.logsumexp, statistics.ids, pd.silu_and_mul(tiny)]
                    seen.append((flush, b"".join(part.numpy().tobytes() for part in parts)))
    finally:
        torch.set_flush_denormal(False)
    assert len(set(seen)) == 2


def again(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [again, copy.deepcopy])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_copies_continue_where_the_originals_were(
    copied: Callable[[Any], Any], kind: Literal["contiguous", "paged"]
) -> None:
    model = new_model()
    cache = model.new_cache(2, 40, kind=kind, page_size=4)
    tokens = torch.arange(10).view(2, 5)
    if kind == "paged":
        cache.reserve_(torch.tensor([5, 5]))
    model(tokens, cache=cache)
    cache.commit_(torch.tensor([5, 3]))
    twins = [(model, cache), (copied(model), copied(cache))]
    found = []
    for some, place in twins:
        if kind == "paged":
            place.reserve_(place.lengths + 5)  # more pages, none of which the copy may treat as free
        logits = some(tokens, cache=place)
        place.commit_(torch.tensor([5, 5]))
        found.append([logits, place.lengths, some(tokens[:, :1], cache=place)] if kind == "contiguous" else [logits])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_models_with_tokenizers_and_results_are_pickled() -> None:
    model = models.load("tiny-code")
    result = generate(model, "import o", max_new_tokens=4)
    twin = again(model)
    assert twin.tokenizer.encode("né") == [110, 195, 169]
    assert again(result).text == result.text == generate(twin, "import o", max_new_tokens=4).text
