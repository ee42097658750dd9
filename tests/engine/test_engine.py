"""An engine gives each request what it has alone, whatever else runs, and loses none."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import find, generate
from pdkernels.engine import Engine, EngineFull, EngineMetrics, Generation
from tests.support.causal import FakeModel, by_history
from tests.support.drafters import with_drafters

STARTS = [
    "import os\n",
    "def f(x):\n    return",
    "class Node:",
    "x = [1, 2, 3]\nfor",
    "a",
    "import os\nimport sys\nfrom typing",
]
SUMS = ["12+30=", "7+5=", "48+21="]

# Every method whose sequences can join, on a model that it is for.
JOINING: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("tiny-code", "autoregressive", [{}, {"temperature": 0.9}]),
    ("tiny-code", "jacobi", [{}, {"draft": "lookup", "window": 5, "temperature": 0.7}]),
    ("tiny-code", "draft_model", [{"block_size": 3}]),
    ("tiny-code", "eagle", [{"temperature": 0.6}]),
    ("tiny-code", "dflash", [{"temperature": 0.6}]),
    ("tiny-code", "mtp", [{"temperature": 0.6}]),
    ("tiny-trimode", "linear_self_speculation", [{"block_size": 4}]),
    ("tiny-trimode", "quadratic_self_speculation", [{"block_size": 3}]),
    ("tiny-trimode", "block_diffusion", [{"block_size": 4}]),
    ("tiny-recurrent", "recurrent_diffusion", [{}]),
    ("tiny-masked", "llada", [{}]),
    ("tiny-masked", "fast_dllm", [{"threshold": 0.9}]),
    ("tiny-masked", "dream", [{}, {"algorithm": "origin"}]),
    ("tiny-masked", "slowfast", [{}, {"prompt_interval": 3, "gen_interval": 2, "transfer_ratio": 0.5}]),
    ("tiny-masked", "dllm_cache", [{"gen_interval": 2}]),
    ("tiny-trimode", "fast_dllm_v2", [{"block_size": 4, "small_block_size": 2}]),
]
CANVASES = {method for _, method, _ in JOINING if find(method).fills_canvases}
MODELS = sorted({name for name, _, _ in JOINING})


def loaded(name: str) -> Any:
    return with_drafters(pd.models.load(name)) if name == "tiny-code" else pd.models.load(name)


def kinds_of(model: str) -> list[tuple[str, dict[str, Any]]]:
    return [(method, options) for name, method, several in JOINING if name == model for options in several]


class Submitted:
    """A request with random settings, and what `generate` gives for it."""

    def __init__(self, engine: Engine, name: str, chance: random.Random) -> None:
        method, options = chance.choice(kinds_of(name))
        masked = name == "tiny-masked"
        prompt = chance.choice(SUMS if masked else STARTS)
        settings: dict[str, Any] = {
            # A canvas shares its batch with those of its length.
            "max_new_tokens": 6 if masked else chance.choice([7, 16]) if method in CANVASES else chance.randint(1, 16),
            "end_tokens": chance.choice([None, ()]),
            "seed": chance.randrange(2**40),
            "stop_strings": chance.choice([(), (), ("e", " = ")]),
            "trace": chance.random() < 0.3,
        }
        if method in {"autoregressive", "jacobi"} and chance.random() < 0.2:
            settings |= chance.choice(
                [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.5, "suppress_tokens": [10]}]
            )
        steps = find(method).steps
        if steps is not None and steps.draws_by_row(options) and chance.random() < 0.5:
            options = options | {"temperature": chance.choice([0.0, 0.5, 1.1]), "top_p": chance.choice([None, 0.9])}
        self.arguments = prompt, method, settings | options
        self.handle = engine.submit(prompt, method, **settings, **options)
        self.withdrawn = False

    def compare(self, model: Any) -> None:
        prompt, method, settings = self.arguments
        alone = generate(model, prompt, method, **settings)
        if self.handle.finish_reason == "cancelled":
            tokens = [token for piece in self.handle for token in piece.ids]
            assert self.withdrawn and tokens == alone.tokens.tolist()[: len(tokens)]
            return
        result = self.handle.result(60)
        assert result.tokens.tolist() == alone.tokens.tolist()
        assert [token for piece in self.handle for token in piece.ids] == alone.tokens.tolist()
        assert "".join(piece.text or "" for piece in self.handle) == result.text == alone.text
        for fact in ("accepted", "trace", "forwards", "tokens", "method"):
            assert getattr(result.stats, fact) == getattr(alone.stats, fact), fact


def arrivals(name: str, seed: int, count: int, **more: Any) -> EngineMetrics:
    model, chance = loaded(name), random.Random(seed)
    sizes = {"max_running": chance.randint(1, 5), "max_batches": chance.randint(1, 3), "max_new_tokens": 16}
    pieces = {"prompt_tokens_per_step": chance.choice([1, 4, 256]), "kept_prompt_tokens": chance.choice([0, 40, 4096])}
    with Engine(model, max_prompt_tokens=64, **sizes, **pieces, **more) as engine:
        sent = []
        for _ in range(count):
            sent.append(Submitted(engine, name, chance))
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.02)
            if chance.random() < 0.15:
                victim = chance.choice(sent)
                victim.withdrawn = True
                victim.handle.cancel()
    metrics = engine.metrics()
    assert all(one.handle.done for one in sent)
    assert sum(metrics.finished.values()) == metrics.submitted == count
    assert metrics.waiting == metrics.running == 0
    assert metrics.accepted_tokens == sum(piece.accepted for one in sent for piece in one.handle.pieces)
    for one in sent:
        one.compare(model)
    if (pages := engine._memory.shared_pages) is not None:
        # Earlier texts hold a page each, and nobody else any.
        assert metrics.used_pages == len(pages._pages) and metrics.shared_pages == 0
    return metrics


@pytest.mark.parametrize("name", MODELS)
def test_requests_that_arrive_at_random_are_as_they_are_alone(name: str) -> None:
    arrivals(name, seed=1, count=10)


@pytest.mark.parametrize("name", ["tiny-code", "tiny-trimode"])
def test_requests_give_up_their_pages_and_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has room for the longest request alone, in small pages."""
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", 4)
    metrics = arrivals(name, seed=3, count=10, cache_tokens=1)
    assert metrics.pages == (64 + 16) // 4 + 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["tiny-code", "tiny-trimode"])
def test_many_requests_give_up_their_pages(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", 4)
    arrivals(name, seed, count=40, cache_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MODELS)
def test_many_requests_that_arrive_at_random(name: str, seed: int) -> None:
    arrivals(name, seed, count=40)


def test_the_table_of_joining_methods_is_whole() -> None:
    named = {method for _, method, _ in JOINING}
    assert named == {name for name in pd.decoding.available() if find(name).steps is not None}


def test_a_batch_grows_with_its_requests_and_shrinks_again() -> None:
    model = pd.models.load("tiny-code")
    with Engine(model, max_running=4, max_prompt_tokens=20, max_new_tokens=120) as engine:
        long = engine.submit("import os\n", max_new_tokens=120, end_tokens=())
        next(iter(long))
        method_batch = next(iter(engine._method_batches.values()))
        assert method_batch.batch is not None and len(method_batch.batch.sessions) == 1
        short = [engine.submit("def f(", max_new_tokens=30, end_tokens=()) for _ in range(3)]
        for one in short:
            one.result(60)
        long.result(60)
        assert max(method_batch._batches) == 4 and len(method_batch.batch.sessions) == 1


def test_a_request_that_comes_after_others_is_alone() -> None:
    """Not beside the free rows of a batch that they have left."""
    model = pd.models.load("tiny-code")
    with Engine(model, max_running=4, max_prompt_tokens=20, max_new_tokens=40) as engine:
        for one in [engine.submit("def f(", max_new_tokens=6, end_tokens=()) for _ in range(4)]:
            one.result(60)
        method_batch, sizes = next(iter(engine._method_batches.values())), set[int]()
        batch_of = lambda *_: sizes.add(len(method_batch.batch.sessions))  # noqa: E731
        engine.submit("import os\n", max_new_tokens=12, end_tokens=(), on_tokens=batch_of).result(60)
    assert max(method_batch._batches) == 4 and sizes == {1}


def test_a_batch_has_settings_for_each_of_its_requests() -> None:
    model, told = pd.models.load("tiny-code"), threading.Event()
    kinds = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 4}, {"temperature": 0.8, "top_p": 0.7}]
    with Engine(model, max_running=4, max_batches=1, max_new_tokens=30) as engine:
        first = engine.submit("import os\n", max_new_tokens=30, end_tokens=(), on_tokens=lambda *_: told.wait(60))
        handles = [engine.submit("def f(", max_new_tokens=12, end_tokens=(), seed=4, **kind) for kind in kinds]
        with pytest.raises(ValueError, match="Engine.submit: top_p must be in 0"):
            engine.submit("def f(", max_new_tokens=12, temperature=1.0, top_p=2.0)
        told.set()
        for handle, kind in zip(handles, kinds, strict=True):
            alone = generate(model, "def f(", max_new_tokens=12, end_tokens=(), seed=4, **kind)
            assert handle.result(60).tokens.equal(alone.tokens)
        assert engine.metrics().batches == 1
        # Three of them ran beside the first one; by themselves, each kind would have had to wait for the one before.
        assert first.ended is None or sum(handle.joined < first.ended for handle in handles) >= 3


@pytest.mark.parametrize(
    ("name", "method", "prompt", "limit"),
    [
        ("tiny-masked", "llada", "482 + 967 = ?", 12),
        ("tiny-masked", "fast_dllm", "482 + 967 = ?", 12),
        ("tiny-masked", "slowfast", "482 + 967 = ?", 12),
        ("tiny-trimode", "fast_dllm_v2", "class Node:", 14),
        ("tiny-trimode", "block_diffusion", "class Node:", 14),
    ],
)
def test_provisional_text_stands_after_the_text(name: str, method: str, prompt: str, limit: int) -> None:
    model = pd.models.load(name)
    with Engine(model, max_new_tokens=limit) as engine:
        handle = engine.submit(prompt, method, max_new_tokens=limit, provisional=True)
        plain = engine.submit(prompt, method, max_new_tokens=limit)
        found: list[tuple[int, list[int | None]]] = []
        known: list[int] = []
        for piece in handle:
            known += piece.ids
            if piece.provisional is not None:
                assert piece.ids == [] and piece.text == ""
                found.append((len(known), piece.provisional))
        assert all(piece.provisional is None for piece in plain)
        assert known == handle.result().tokens.tolist() == plain.result().tokens.tolist()
        assert [piece.ids for piece in handle.pieces] == [piece.ids for piece in plain.pieces]
        # Nothing that these methods fill changes, so what stood there came.
        for at, tokens in found:
            assert all(token in (None, final) for token, final in zip(tokens, known[at:], strict=False))
        if name == "tiny-trimode":
            with pytest.raises(
                NotImplementedError, match="write provisional text, got autoregressive. These do: block"
            ):
                engine.submit(prompt, max_new_tokens=limit, provisional=True)


def test_a_model_need_not_say_where_it_is() -> None:
    model = FakeModel(by_history)
    assert not hasattr(model, "device")
    with Engine(model, max_running=3, max_prompt_tokens=8, max_new_tokens=12) as engine:
        prompts = [[3, 1, 4], [5], [2, 7], [1, 8, 2, 8]]
        handles = [engine.submit(prompt, "jacobi", max_new_tokens=12, block_size=3) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            text = list(prompt)
            for _ in range(12):
                text.append(by_history(text))
            assert handle.result(60).tokens.tolist() == text[len(prompt) :]


def test_a_shared_beginning_runs_once() -> None:
    model = pd.models.load("tiny-code")
    prompt = "import os\nimport sys\nfrom typing import Any\n"
    counted: list[int] = []
    forward = type(model).forward

    def counting(self: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        counted.append(tokens.shape[1])
        return forward(self, tokens, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", counting)
        with Engine(model, max_new_tokens=4) as engine:
            engine.submit(prompt, max_new_tokens=1).result(60)
            whole = max(counted)
            counted.clear()
            result = engine.submit(prompt + "x = 1\n", max_new_tokens=4, end_tokens=()).result(60)
    assert whole >= len(prompt) and max(counted) == len("x = 1\n")
    assert engine.metrics().reused_tokens == len(prompt)
    assert result.tokens.equal(generate(model, prompt + "x = 1\n", max_new_tokens=4, end_tokens=()).tokens)


@pytest.mark.parametrize("way", ["a mask", "all rows", "hidden states"])
def test_a_prompt_in_shared_pages_is_not_run_anew(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward over a whole prompt would write rows that others read; it is refused before it writes."""
    model, prompt = loaded("tiny-code"), "import os\n" * 20
    kind: Any = find("autoregressive").steps
    plainly, ways = kind.start, list[str]()

    def start(self: Any, session: Any) -> None:
        if not ways:
            plainly(self, session)
            return
        tokens, lengths = session.packed_prompts(session.longest, self.cache.device)
        self.cache.lengths.zero_()
        mask = pd.masks.full(session.longest).plan(16, 64) if way == "a mask" else None
        if way == "hidden states":
            self.model.hidden(tokens, cache=self.cache)
        rows = None if way == "all rows" else (lengths - 1)[:, None]
        self.model(tokens, cache=self.cache, mask=mask, rows=rows)

    monkeypatch.setattr(kind, "start", start)
    with Engine(model, max_new_tokens=16) as engine:
        expected = engine.submit(prompt, max_new_tokens=16).result(60).text
        pool: Any = engine._memory.pages.pool
        before = pool.k.clone(), pool.v.clone()
        ways.append(way)
        with pytest.raises(NotImplementedError, match="over tokens in pages that other requests hold"):
            engine.submit(prompt, max_new_tokens=16).result(60)
        held = [page for page in range(pool.num_pages) if pool.holders(page)]
        assert held and all(torch.equal(was[:, held], now[:, held]) for was, now in zip(before, (pool.k, pool.v)))
        ways.clear()
        assert engine.submit(prompt, max_new_tokens=16).result(60).text == expected
        assert engine.metrics().reused_tokens > 128


@pytest.mark.parametrize("pieces", [3, 256])
def test_penalties_do_not_count_the_prompt(pieces: int) -> None:
    model, settings = pd.models.load("tiny-code"), {"max_new_tokens": 5, "end_tokens": (), "frequency_penalty": 2.0}
    with Engine(model, max_new_tokens=5, prompt_tokens_per_step=pieces) as engine:
        for prompt in ("import os\nimport sys\n", "import os\nimport sys\nimport ssss ssss"):
            alone = generate(model, prompt, **settings)
            assert engine.submit(prompt, **settings).result(60).tokens.equal(alone.tokens)


@pytest.mark.parametrize("kept", [0, 64])
def test_a_preempted_request_shares_pages_and_gets_its_tokens(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, told = pd.models.load("tiny-code"), "import os\nimport sys\nfrom typing import ", threading.Event()
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", 8)
    sizes: dict[str, Any] = {"max_running": 3, "max_prompt_tokens": 48, "max_new_tokens": 40}
    settings: dict[str, Any] = {"max_new_tokens": 40, "end_tokens": (), "temperature": 0.9}
    with Engine(model, **sizes, cache_tokens=96, kept_prompt_tokens=kept) as engine:
        found = [
            engine.submit(prompt + end, seed=seed, on_tokens=lambda *_: told.wait(60), **settings)
            for seed, end in enumerate("abc")
        ]
        told.set()
        for seed, (handle, end) in enumerate(zip(found, "abc", strict=True)):
            alone = generate(model, prompt + end, seed=seed, **settings)
            result = handle.result(60)
            assert result.tokens.equal(alone.tokens) and result.stats.forwards == alone.stats.forwards
    metrics = engine.metrics()
    assert metrics.preemptions > 0 and metrics.recomputed_tokens > 0
    # Whole pages of the beginning are shared, and the rest of it is copied.
    assert metrics.reused_tokens == (2 * len(prompt) if kept else 0)
    assert [handle.number for handle in sorted(found, key=lambda one: one.ended or 0)] == [0, 1, 2]


def test_a_long_prompt_does_not_stall_the_others() -> None:
    model = pd.models.load("tiny-code")
    order: list[str] = []
    with Engine(model, max_prompt_tokens=400, max_new_tokens=60, prompt_tokens_per_step=16) as engine:
        started = threading.Event()

        def short(_sequence: int, _ids: list[int], _accepted: int) -> None:
            order.append("short")
            started.set()

        first = engine.submit("a", max_new_tokens=60, end_tokens=(), on_tokens=short)
        assert started.wait(60)
        long = engine.submit("x" * 390, max_new_tokens=1, end_tokens=(), on_tokens=lambda *_: order.append("long"))
        long.result(60)
        first.result(60)
    at = order.index("long")
    assert order[:at].count("short") >= 390 // 16 - 2


def test_long_prompts_of_several_methods_share_the_tokens_of_a_step() -> None:
    model = pd.models.load("tiny-code")
    order: list[str] = []
    with Engine(model, max_prompt_tokens=400, max_new_tokens=60, prompt_tokens_per_step=16) as engine:
        started, told = threading.Event(), threading.Event()

        def short(_sequence: int, _ids: list[int], _accepted: int) -> None:
            order.append("short")
            started.set()
            told.wait(60)

        first = engine.submit("a", max_new_tokens=60, end_tokens=(), on_tokens=short)
        assert started.wait(60)
        settings: dict[str, Any] = {"max_new_tokens": 1, "end_tokens": ()}
        others = [
            engine.submit(letter * 300, on_tokens=lambda *_: order.append("long"), **settings, **more)
            for letter, more in (("x", {"method": "jacobi", "block_size": 4}), ("y", {"presence_penalty": 0.5}))
        ]
        told.set()
        for handle in (first, *others):
            handle.result(60)
    at = len(order) - order[::-1].index("long")
    assert order[:at].count("short") >= 2 * 300 // 16 - 2


def test_kinds_beyond_the_batches_take_turns_in_their_order() -> None:
    model = pd.models.load("tiny-code")
    done: list[int] = []
    with Engine(model, max_batches=1, max_running=2, max_new_tokens=12) as engine:
        handles = [
            engine.submit("import", end_tokens=(), max_new_tokens=6, presence_penalty=0.5 + number % 3, seed=number)
            for number in range(9)
        ]
        for handle in handles:
            handle.result(60)
            done.append(handle.number)
        assert engine.metrics().batches == 1
    joined = sorted(handles, key=lambda handle: handle.joined or 0)
    assert [handle.number for handle in joined][:1] == [0] and done == list(range(9))
    for number, handle in enumerate(handles):
        alone = generate(model, "import", end_tokens=(), max_new_tokens=6, presence_penalty=0.5 + number % 3)
        assert handle.result().tokens.equal(alone.tokens)


def test_cancelled_late_and_refused_requests() -> None:
    model = pd.models.load("tiny-code")
    gate = threading.Event()
    with Engine(model, max_running=1, max_waiting=2, max_new_tokens=50, max_prompt_tokens=30) as engine:
        first = engine.submit("import", max_new_tokens=50, end_tokens=(), on_tokens=lambda *_: gate.wait(60))
        while first.joined is None:
            time.sleep(0.001)
        waiting = engine.submit("import", max_new_tokens=3)
        late = engine.submit("import", max_new_tokens=3, timeout=0.01)
        with pytest.raises(EngineFull, match="2 requests wait already"):
            engine.submit("import", max_new_tokens=3)
        rest = engine.submit("import", max_new_tokens=3, after=first)  # which was let in
        with Engine(model) as another:
            for other in (
                first,
                waiting,
                another.submit("import", max_new_tokens=3),
            ):  # gone on from, not let in, not ours
                with pytest.raises(
                    ValueError, match="after must be a generation of this engine that has joined a batch"
                ):
                    engine.submit("import", max_new_tokens=3, after=other)
        with pytest.raises(TimeoutError, match="request 1 has not ended within 0.0"):
            waiting.result(0.01)
        waiting.cancel()
        gate.set()
        with pytest.raises(CancelledError, match="before it began: cancelled"):
            waiting.result(60)
        with pytest.raises(CancelledError, match="before it began: timeout"):
            late.result(60)
        assert rest.result(60).stats.tokens == 3
        assert first.result(60).stats.tokens == 50 and first.finish_reason == "length"

        for wrong, words in (
            ({"max_new_tokens": 51}, r"max_new_tokens must be in 1 \.\. 50, the engine's, got 51"),
            ({"max_new_tokens": 0}, r"must be in 1 \.\. 50"),
            ({"prompt": "x" * 31}, "prompt must have at most 30 tokens, the engine's, got 31"),
            ({"prompt": ["a", "b"]}, "prompt must be one prompt, got a batch of 2"),
            ({"temperature": -1.0}, "temperature"),
            ({"method": "jacobi", "block_size": 0}, "block_size must be at least 1"),
            ({"timeout": 0}, "timeout must be above 0 seconds"),
            ({"method": "no_such"}, "method must name a decoding method"),
        ):
            with pytest.raises(ValueError, match=words):
                engine.submit(**({"prompt": "import", "max_new_tokens": 3} | wrong))
        for wrong, kind in (({"seed": [1]}, TypeError), ({"no_such": 1}, TypeError), ({"timeout": "1"}, TypeError)):
            with pytest.raises(kind):
                engine.submit("import", max_new_tokens=3, **wrong)
        with pytest.raises(NotImplementedError, match="let requests join and leave a batch, got jacobi_multiblock"):
            engine.submit("import", "jacobi_multiblock", max_new_tokens=3)
        with pytest.raises(NotImplementedError, match="revise"):
            with Engine(pd.models.load("tiny-masked")) as masked:
                masked.submit("12+30=", "llada", max_new_tokens=6, revise=0.2)
        for hook in ("logits_hook", "tokens_hook"):
            with pytest.raises(NotImplementedError, match=f"let requests join and leave a batch, got a `{hook}`"):
                with Engine(pd.models.load("tiny-masked")) as masked:
                    masked.submit("12+30=", "dream", max_new_tokens=6, **{hook: lambda *given: given[-1]})
        assert engine.submit("import", max_new_tokens=3).result(60).stats.tokens == 3
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit("import", max_new_tokens=3)


def test_errors_end_the_requests_they_concern() -> None:
    model = pd.models.load("tiny-code")

    def fails(_sequence: int, _ids: list[int], _accepted: int) -> None:
        raise OSError("closed")

    with Engine(model, max_new_tokens=30) as engine:
        bad = engine.submit("import", max_new_tokens=9, on_tokens=fails)
        good = engine.submit("import", max_new_tokens=9, end_tokens=())
        with pytest.raises(OSError, match="closed"):
            bad.result(60)
        assert good.result(60).stats.tokens == 9
        forward = type(model).forward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model), "forward", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no memory")))
            broken = engine.submit("import", max_new_tokens=9)
            with pytest.raises(RuntimeError, match="no memory"):
                broken.result(60)
        assert type(model).forward is forward
        assert engine.submit("import", max_new_tokens=9, end_tokens=()).result(60).tokens.equal(good.result().tokens)
    assert engine.metrics().finished == {"error": 2, "length": 2}


def test_close_cancels_or_finishes() -> None:
    model = pd.models.load("tiny-code")
    engine = Engine(model, max_new_tokens=200, max_prompt_tokens=50)
    handles = [engine.submit("import", max_new_tokens=200, end_tokens=()) for _ in range(3)]
    assert engine.close(finish=False, timeout=60)
    assert all(handle.done and handle.finish_reason == "cancelled" for handle in handles)
    engine = Engine(model, max_new_tokens=20, max_prompt_tokens=50)
    handles = [engine.submit("import", max_new_tokens=20, end_tokens=()) for _ in range(3)]
    assert engine.close(timeout=60)
    assert [handle.finish_reason for handle in handles] == ["length"] * 3


def test_grammars_hooks_and_log_probabilities() -> None:
    model = pd.models.load("tiny-code")
    grammar = pd.decoding.Grammar.regex("(yes|no), [0-9]{2}")
    with Engine(model, max_new_tokens=16) as engine:
        written = [
            engine.submit("def ", max_new_tokens=16, grammar=grammar, temperature=1.0, seed=seed) for seed in range(4)
        ]
        likely = engine.submit("import", max_new_tokens=5, logprobs=3, end_tokens=())
        hooked = engine.submit("import", max_new_tokens=5, end_tokens=(), logits_processor=lambda ids, scores: -scores)
        stopped = engine.submit("import", max_new_tokens=16, end_tokens=(), stop_sequences=[[10]])
        for seed, handle in enumerate(written):
            alone = generate(model, "def ", max_new_tokens=16, grammar=grammar, temperature=1.0, seed=seed)
            assert handle.result(60).text == alone.text and re.fullmatch("(yes|no), [0-9]{2}", alone.text)
        expected = generate(model, "import", max_new_tokens=5, logprobs=3, end_tokens=())
        found = likely.result(60)
        assert found.logprobs is not None and expected.logprobs is not None
        assert torch.equal(found.logprobs.top_ids, expected.logprobs.top_ids)
        assert torch.equal(found.logprobs.tokens, expected.logprobs.tokens)
        least = generate(model, "import", max_new_tokens=5, end_tokens=(), logits_processor=lambda ids, scores: -scores)
        assert hooked.result(60).tokens.equal(least.tokens)
        until = generate(model, "import", max_new_tokens=16, end_tokens=(), stop_sequences=[[10]])
        assert stopped.result(60).tokens.equal(until.tokens)
        slow = engine.submit(
            "def ", max_new_tokens=16, grammar=grammar, on_tokens=lambda *_: time.sleep(0.2), timeout=0.3
        )
        assert slow.result(60).stats.tokens < 8 and slow.finish_reason == "timeout"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("llada", {}),
        ("llada", {"block_size": 4, "steps": 6, "remasking": "random"}),
        ("llada", {"guidance": 0.5, "repetition_penalty": 1.2}),
        ("fast_dllm", {"block_size": 8, "threshold": 0.4}),
        ("dream", {}),
        ("dream", {"algorithm": "origin", "steps": 5}),
        ("slowfast", {}),
        ("dllm_cache", {"gen_interval": 2}),
        ("fast_dllm_v2", {"block_size": 8, "small_block_size": 4}),
    ],
)
def test_grammars_of_canvases(method: str, options: dict[str, Any]) -> None:
    """The tokens of `generate`: prompts of several lengths, drawn and most probable texts, beside requests without."""
    model, prompts = pd.models.load(find(method).example), ["58 + 31 = ?\n", "7 + 9 = ?\n", "123 + 456 + 9 = ?\n"]
    limit: dict[str, Any] = {"max_new_tokens": 12, **options}
    pattern = "[0-9]{1,3} = [0-9]{2}\n(x|yz)+"
    with Engine(model, max_new_tokens=12, max_canvases=3) as engine:
        free = [engine.submit(prompt, method, **limit) for prompt in prompts]
        for fill, temperature in (("each", 0.0), ("joint", 0.0), ("each", 1.0)):
            given = {**limit, "grammar": pd.decoding.Grammar.regex(pattern, fill=fill), "temperature": temperature}
            handles = [engine.submit(prompt, method, seed=seed, **given) for seed, prompt in enumerate(prompts)]
            for seed, (prompt, handle) in enumerate(zip(prompts, handles, strict=True)):
                found, alone = handle.result(60), generate(model, prompt, method, seed=seed, **given)
                assert found.tokens.equal(alone.tokens) and re.fullmatch(pattern, str(found.text))
                assert found.stats.forwards == alone.stats.forwards
        for prompt, handle in zip(prompts, free, strict=True):
            assert handle.result(60).tokens.equal(generate(model, prompt, method, **limit).tokens)


@pytest.mark.parametrize("options", [{}, {"block_size": 8, "threshold": None, "steps_per_block": 3}])
def test_grammars_of_blocks(options: dict[str, Any]) -> None:
    """As those of canvases, with several blocks to a text, and a recursive grammar."""
    model, prompts = pd.models.load("tiny-trimode"), ["a = ", "tree: ", "x"]
    limit: dict[str, Any] = {"max_new_tokens": 40, **options}
    rules, pattern = 'start: "[" start "]" start | "x" /[0-9]{3}/', "[0-9]{1,3} = [0-9]{12}\n(x|yz)+"
    with Engine(model, max_new_tokens=48) as engine:
        free = [engine.submit(prompt, "block_diffusion", **limit) for prompt in prompts]
        for fill, temperature in (("each", 0.0), ("joint", 0.0), ("each", 1.0)):
            for grammar in (
                pd.decoding.Grammar.regex(pattern, fill=fill),
                pd.decoding.Grammar.ebnf(rules, depth=None, fill=fill),
            ):
                given = {**limit, "grammar": grammar, "temperature": temperature}
                handles = [
                    engine.submit(prompt, "block_diffusion", seed=n, **given) for n, prompt in enumerate(prompts)
                ]
                for seed, (prompt, handle) in enumerate(zip(prompts, handles, strict=True)):
                    found, alone = handle.result(60), generate(model, prompt, "block_diffusion", seed=seed, **given)
                    assert found.tokens.equal(alone.tokens) and grammar.matches(str(found.text))
                    assert found.stats.forwards == alone.stats.forwards
        for prompt, handle in zip(prompts, free, strict=True):
            assert handle.result(60).tokens.equal(generate(model, prompt, "block_diffusion", **limit).tokens)


def test_asynchronous_readers() -> None:
    model = pd.models.load("tiny-code")

    async def read(handle: Generation) -> str:
        return "".join([piece.text or "" async for piece in handle])

    async def main() -> list[str]:
        handles = [engine.submit(start, "jacobi", max_new_tokens=12, seed=7) for start in STARTS]
        return await asyncio.gather(*map(read, handles))

    with Engine(model, max_running=3, max_new_tokens=16) as engine:
        texts = asyncio.run(main())
    assert texts == [generate(model, start, "jacobi", max_new_tokens=12, seed=7).text for start in STARTS]


def test_limits_of_an_engine_are_checked() -> None:
    model = pd.models.load("tiny-code")
    for wrong in (
        "max_running",
        "max_batches",
        "max_prompt_tokens",
        "max_new_tokens",
        "max_waiting",
        "prompt_tokens_per_step",
    ):
        with pytest.raises(ValueError, match=f"Engine: {wrong} must be 1 or more, got 0"):
            Engine(model, **{wrong: 0})
    with pytest.raises(TypeError, match="Engine: model must be a model, got str"):
        Engine("tiny-code")
