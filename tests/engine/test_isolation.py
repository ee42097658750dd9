"""What a request's callback, hook, tokenizer or logits do costs no other request."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.decoding.steps import RunningBatch
from pdkernels.engine import BrokenModel, Engine, Generation
from tests.support.causal import VOCABULARY, FakeModel, by_history

LIMIT: dict[str, Any] = {"max_new_tokens": 8, "end_tokens": ()}


class Odd(BaseException):
    """No Exception."""


KINDS = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, Odd, OSError]


def raiser(kind: type[BaseException], at: int) -> Callable[..., Any]:
    """Raises at its call number `at`; as a hook or a criterion it changes nothing before."""
    calls: list[None] = []

    def call(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) > at:
            raise kind("from the user")
        return arguments[1] if len(arguments) == 2 else None

    return call


def alone_and_after(engine: Engine, before: Generation) -> None:
    """Another request has the tokens that it has alone, and so has one that comes later."""
    expected = generate(engine.model, "import os\n", **LIMIT).tokens
    assert before.result(60).tokens.equal(expected)
    assert engine.running and engine.failure is None
    assert engine.submit("import os\n", **LIMIT).result(60).tokens.equal(expected)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_callback_raises_ends_its_request_alone(kind: type[BaseException], at: int) -> None:
    with Engine(pd.models.load("tiny-code"), max_running=4, max_new_tokens=8) as engine:
        other = engine.submit("import os\n", **LIMIT)
        bad = engine.submit("def f(", on_tokens=raiser(kind, at), **LIMIT)
        with pytest.raises(kind, match="from the user"):
            bad.result(60)
        with pytest.raises(kind, match="from the user"):
            list(bad)
        assert bad.done and bad.finish_reason is None and len(bad.pieces) == at + 1
        alone_and_after(engine, other)
    assert engine.metrics().finished == {"error": 1, "length": 2}


@pytest.mark.parametrize("kind", [SystemExit, OSError])
@pytest.mark.parametrize("hook", ["logits_processor", "stopping_criteria"])
def test_whatever_a_hook_raises_ends_its_request_alone(hook: str, kind: type[BaseException]) -> None:
    with Engine(pd.models.load("tiny-code"), max_running=4, max_new_tokens=8) as engine:
        other = engine.submit("import os\n", **LIMIT)
        for at in (0, 3):
            with pytest.raises(kind, match="from the user"):
                engine.submit("def f(", **LIMIT, **{hook: raiser(kind, at)}).result(60)
        alone_and_after(engine, other)


@pytest.mark.parametrize("place", ["feed", "flush", "decode"])
@pytest.mark.parametrize("kind", [SystemExit, OSError])
def test_whatever_a_tokenizer_raises_ends_its_request_alone(
    place: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, told = pd.models.load("tiny-code"), threading.Event()
    tokenizer: Any = model.tokenizer
    incremental, decode = tokenizer.incremental, tokenizer.decode
    text = generate(model, "def f(", **LIMIT).text

    class Decoder:
        def __init__(self) -> None:
            self.inner = incremental()

        def feed(self, ids: list[int]) -> str:
            if place == "feed":
                raise kind("from the user")
            return str(self.inner.feed(ids))

        def flush(self) -> str:
            if place == "flush":
                raise kind("from the user")
            return str(self.inner.flush())

    def decoded(ids: list[int]) -> str:
        if (found := str(decode(ids))) == text:
            raise kind("from the user")
        return found

    with Engine(model, max_running=4, max_new_tokens=8) as engine:
        other = engine.submit("import os\n", on_tokens=lambda *_: told.wait(60), **LIMIT)
        with monkeypatch.context() as patch:
            if place != "decode":
                patch.setattr(tokenizer, "incremental", Decoder)
            bad = engine.submit("def f(", **LIMIT)
        with monkeypatch.context() as patch:
            if place == "decode":
                patch.setattr(tokenizer, "decode", decoded)
            told.set()
            with pytest.raises(kind, match="from the user"):
                bad.result(60)
        alone_and_after(engine, other)
        assert engine.metrics().finished["error"] == 1


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda ids, scores: None, "must return a tensor of logits, got NoneType"),
        (lambda ids, scores: scores[0], r"must return the shape of its logits, \(1, 257\), got \(257,\)"),
        (lambda ids, scores: scores[:, :1], r"must return the shape of its logits, \(1, 257\), got \(1, 1\)"),
        (lambda ids, scores: scores.argmax(-1, keepdim=True), "must return a tensor of logits, got torch.int64"),
        (lambda ids, scores: scores * torch.nan, "leave no token to choose"),
        (lambda ids, scores: scores - torch.inf, "leave no token to choose"),
    ],
)
def test_what_a_hook_returns_is_checked(hook: Any, words: str) -> None:
    model = pd.models.load("tiny-code")
    with pytest.raises((ValueError, TypeError), match=words):
        generate(model, "def f(", logits_processor=hook, **LIMIT)
    with Engine(model, max_running=4, max_new_tokens=8) as engine:
        other = engine.submit("import os\n", **LIMIT)
        with pytest.raises((ValueError, TypeError), match=words):
            engine.submit("def f(", logits_processor=hook, **LIMIT).result(60)
        alone_and_after(engine, other)


class Breaks(FakeModel):
    """Texts that begin with 9 have NaN as logits from their seventh token on."""

    def logits(self, ids: list[int], first: int) -> torch.Tensor:
        rows = super().logits(ids, first)
        if ids[0] == 9:
            rows[max(0, 6 - first) :] = torch.nan
        return rows


@pytest.mark.parametrize(("method", "options"), [("autoregressive", {}), ("jacobi", {"block_size": 3})])
def test_logits_without_a_choice_fail_their_row_alone(method: str, options: dict[str, Any]) -> None:
    prompts = [[3, 1, 4], [9, 2], [5], [9], [2, 7]]
    with Engine(Breaks(by_history), max_running=3, max_prompt_tokens=8, max_new_tokens=12) as engine:
        handles = [engine.submit(prompt, method, max_new_tokens=12, **options) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            if prompt[0] == 9:
                with pytest.raises(ValueError, match="leave no token to choose"):
                    handle.result(60)
                continue
            text = list(prompt)
            for _ in range(12):
                text.append(by_history(text))
            assert handle.result(60).tokens.tolist() == text[len(prompt) :]
    assert VOCABULARY > 9 and engine.metrics().finished == {"length": 3, "error": 2}


@pytest.mark.parametrize("name", ["tiny-code", "tiny-hybrid", "tiny-trimode"])
def test_a_prompt_with_nan_leaves_nothing_in_pages_and_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are taken by others afterwards, and masked keys are multiplied by 0, which NaN survives."""
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", 4)
    model: Any = pd.models.load(name)
    settings: dict[str, Any] = {**LIMIT, "suppress_tokens": [7]}
    with torch.no_grad():
        weights = next(weight for key, weight in model.named_parameters() if "embed" in key)
        weights[7] = torch.nan
    alone = generate(model, "import os\n", **settings).tokens
    with Engine(model, max_running=2, max_prompt_tokens=24, max_new_tokens=8) as engine:
        for _ in range(3):
            bad, good = engine.submit([7] * 12, **settings), engine.submit("import os\n", **settings)
            with pytest.raises(ValueError, match="leave no token to choose"):
                bad.result(60)
            assert good.result(60).tokens.equal(alone)


@pytest.mark.parametrize("way", ["result", "for", "async for", "other"])
def test_a_callback_that_waits_for_its_engine_is_refused(way: str) -> None:
    model, handles, told = pd.models.load("tiny-code"), list[Generation](), threading.Event()

    async def read(handle: Generation) -> None:
        async for _ in handle:
            pass

    def wait(*_: Any) -> None:
        told.wait(60)
        if way in ("result", "other"):
            handles[way == "other"].result()
        elif way == "for":
            list(handles[0])
        else:
            asyncio.run(read(handles[0]))

    with Engine(model, max_running=4, max_new_tokens=8) as engine:
        handles.append(engine.submit("def f(", on_tokens=wait, **LIMIT))
        handles.append(engine.submit("import os\n", **LIMIT))
        told.set()
        with pytest.raises(RuntimeError, match=f"must not wait for request {int(way == 'other')}: the engine's thread"):
            handles[0].result(60)
        alone_and_after(engine, handles[1])
        # What has ended can be read.
        read_late = engine.submit("a", on_tokens=lambda *_: handles[1].result() and list(handles[1]), **LIMIT)
        assert read_late.result(60).stats.tokens == 8


def test_a_callback_may_submit_and_cancel_and_close() -> None:
    model, more, closed = pd.models.load("tiny-code"), list[Generation](), list[bool]()
    engine = Engine(model, max_running=2, max_new_tokens=8)
    handles: list[Generation] = []

    def submits(*_: Any) -> None:
        if len(more) < 3:
            more.append(engine.submit("import os\n", **LIMIT))

    handles.append(engine.submit("def f(", on_tokens=submits, **LIMIT))
    assert handles[0].result(60).stats.tokens == 8
    expected = generate(model, "import os\n", **LIMIT).tokens
    assert all(handle.result(60).tokens.equal(expected) for handle in more) and len(more) == 3
    own: list[Generation] = []
    told = threading.Event()
    own.append(engine.submit("def f(", on_tokens=lambda *_: told.wait(60) and own[0].cancel(), **LIMIT))
    told.set()
    assert own[0].result(60).stats.tokens < 8 and own[0].finish_reason == "cancelled"
    last = engine.submit("def f(", on_tokens=lambda *_: closed.append(engine.close()), **LIMIT)
    assert last.result(60).stats.tokens == 8 and closed == [False] * 8
    assert engine.close(timeout=60) and engine.close(finish=False) and not engine.running
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit("a")


def test_a_dead_engine_fails_its_requests_and_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = Engine(pd.models.load("tiny-code"), max_running=1, max_new_tokens=8), threading.Event()
    prefilling = engine.submit("def f(", on_tokens=lambda *_: told.wait(60), **LIMIT)
    waiting = engine.submit("import os\n", **LIMIT)

    def dies() -> None:
        raise SystemExit("no more")

    monkeypatch.setattr(engine, "_open_batches", dies)
    told.set()
    for handle in (prefilling, waiting):
        with pytest.raises(RuntimeError, match=r"the engine has ended: SystemExit\('no more'\) ended its thread"):
            handle.result(60)
        with pytest.raises(RuntimeError, match="the engine has ended"):
            list(handle)
    with pytest.raises(RuntimeError, match=r"Engine.submit: the engine is closed: SystemExit\('no more'\)"):
        engine.submit("a")
    assert isinstance(engine.failure, SystemExit) and engine.metrics().finished == {"error": 2}
    assert engine.close(timeout=60) and not engine.running and engine.metrics().waiting == 0


@pytest.mark.parametrize("method", ["autoregressive", "jacobi", "linear_self_speculation"])
def test_a_model_that_computes_nothing_ends_the_engine_and_says_so(method: str) -> None:
    model, told = pd.models.load("tiny-trimode"), threading.Event()
    with torch.no_grad():
        model.layers[1].mlp_norm.fill_(torch.nan)
    engine = Engine(model, max_running=1, max_new_tokens=8)
    engine._lock.acquire()  # until all requests are there
    handles = [engine.submit("17 + 25", method, **LIMIT) for _ in range(3)]
    handles.append(
        engine.submit("17 + 25", "autoregressive", suppress_tokens=[7], on_tokens=lambda *_: told.set(), **LIMIT)
    )
    engine._lock.release()
    for handle in handles:
        with pytest.raises(RuntimeError, match="the engine has ended: pdkernels.Engine: the model's logits are NaN"):
            handle.result(60)
    assert isinstance(engine.failure, BrokenModel) and not engine.running and not told.is_set()
    with pytest.raises(RuntimeError, match="logits are NaN whatever the text is"):
        engine.submit("17 + 25")


def test_a_batch_that_cannot_grow_keeps_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that joins fails; those that run stay where they are."""
    model, told = pd.models.load("tiny-code"), threading.Event()
    failed: list[None] = []

    def fails(*_: Any) -> None:
        failed.append(None)
        raise RuntimeError("no memory")

    with Engine(model, max_running=4, max_new_tokens=8) as engine:
        first = engine.submit("import os\n", on_tokens=lambda *_: told.wait(60), **LIMIT)
        with monkeypatch.context() as patch:
            patch.setattr(RunningBatch, "take_over", fails)
            second = engine.submit("import os\n", **LIMIT)
            told.set()
            with pytest.raises(RuntimeError, match="no memory"):
                second.result(60)
        alone_and_after(engine, first)
    assert failed


def test_an_engine_that_nobody_refers_to_is_freed() -> None:
    model = pd.models.load("tiny-code")
    engine = Engine(model, max_new_tokens=8)
    thread, gone = engine._thread, weakref.ref(engine)
    handle = engine.submit("import os\n", **LIMIT)
    del engine
    assert handle.result(60).tokens.equal(generate(model, "import os\n", **LIMIT).tokens)
    gc.collect()
    thread.join(60)
    assert gone() is None and not thread.is_alive()
    # One whose last reference goes before its thread has seen the request.
    assert Engine(model, max_new_tokens=8).submit("a", max_new_tokens=2).result(60).stats.tokens == 2


def test_closing_ends_the_loops_of_other_threads() -> None:
    engine = Engine(pd.models.load("tiny-code"), max_new_tokens=400)
    handles = [engine.submit("a", max_new_tokens=400, end_tokens=()) for _ in range(3)]
    read: list[int] = []

    def reads(handle: Generation) -> None:
        read.append(sum(len(piece.ids) for piece in handle))

    threads = [threading.Thread(target=reads, args=(handle,)) for handle in handles]
    closers = [threading.Thread(target=engine.close, kwargs={"finish": False}) for _ in range(3)]
    for thread in (*threads, *closers):
        thread.start()
    for thread in (*threads, *closers):
        thread.join(60)
        assert not thread.is_alive()
    assert len(read) == 3 and all(handle.done for handle in handles)


def test_a_loop_of_asyncio_that_has_ended_costs_nobody() -> None:
    model, told = pd.models.load("tiny-code"), threading.Event()

    async def reads(handle: Generation) -> None:
        async for _ in handle:
            told.set()

    async def main(handle: Generation) -> None:
        task = asyncio.create_task(reads(handle))
        while not handle.pieces:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Engine(model, max_running=4, max_new_tokens=8) as engine:
        handle = engine.submit("import os\n", on_tokens=lambda *_: told.wait(60), **LIMIT)
        asyncio.run(main(handle))
        assert handle._listeners == []
        # A loop that is closed while somebody still listens.
        loop = asyncio.new_event_loop()
        late = engine.submit("def f(", **LIMIT)

        async def first() -> None:
            reader = aiter(late)
            await anext(reader)
            readers.append(reader)

        readers: list[Any] = []
        loop.run_until_complete(first())
        loop.close()
        assert late.result(60).stats.tokens == 8
        alone_and_after(engine, handle)


@pytest.mark.parametrize("name", ["result", "close", "submit"])
def test_times_to_wait_are_checked(name: str) -> None:
    with Engine(pd.models.load("tiny-code"), max_new_tokens=8) as engine:
        handle = engine.submit("a", max_new_tokens=1)

        def call(timeout: Any) -> Any:
            if name == "submit":
                return engine.submit("a", max_new_tokens=1, timeout=timeout).result(60)
            return handle.result(timeout) if name == "result" else engine.close(timeout=timeout)

        for wrong in ("1", True, [1], 1j):
            with pytest.raises(TypeError, match="timeout must be a number, got"):
                call(wrong)
        with pytest.raises(ValueError, match="timeout must be"):
            call(float("nan"))
        for long in (1e30, float("inf"), 10**400):
            assert call(long)
        with pytest.raises((TypeError, CancelledError)):
            call({})
