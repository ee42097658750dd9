"""Log-probabilities in an engine: those of `generate`, by a pass that holds nobody up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.engine import Engine
from pdkernels.engine.scoring import Ended, Scoring
from pdkernels.generation import logprobs
from pdkernels.models import Hybrid, HybridConfig, from_callable
from pdkernels.models.architectures.windows import Window
from pdkernels.models.checkpoints import adapters
from tests.decoding.test_windows import model_with
from tests.support.causal import FakeModel, by_history

LIMIT: dict[str, Any] = {"end_tokens": (), "logprobs": 3}


def hybrid() -> Hybrid:
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=40, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=48, max_positions=512,
        mixers=("delta", "attention"), key_heads=2, value_heads=4, key_dim=8, value_dim=8,
    )  # fmt: skip
    return Hybrid(config).eval().requires_grad_(False)


def without_cache() -> Any:
    table = torch.randn(39, 39, generator=torch.Generator().manual_seed(1))
    return from_callable(lambda tokens: table[tokens], vocab_size=39, end_tokens=[], max_positions=512)


MODELS: dict[str, Any] = {
    "pages": lambda: pd.models.load("tiny-code"),
    "int8": lambda: _narrow(pd.models.load("tiny-code")),
    "windows": lambda: model_with((Window(7), None)),
    "states": hybrid,
    "a function": without_cache,
    "recurrences": lambda: pd.models.load("tiny-recurrent"),
}


def _narrow(model: Any) -> Any:
    model.cache_dtype = torch.int8
    return model


@pytest.mark.parametrize("kept", [0, 4000])
@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_a_text_alone(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its prompt is kept or not, and however it is cut."""
    monkeypatch.setattr("pdkernels.generation.logprobs.CHUNK", 16)
    model, drawn = MODELS[name](), torch.Generator().manual_seed(2)
    prompts = [torch.randint(39, (size,), generator=drawn).tolist() for size in (70, 1, 33)]
    prompts.append(prompts[0][:50] + prompts[2])
    with Engine(model, max_new_tokens=40, max_prompt_tokens=200, kept_prompt_tokens=kept) as engine:
        handles = [engine.submit(prompt, max_new_tokens=40, **LIMIT) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            expected: Any = generate(model, prompt, max_new_tokens=40, **LIMIT)
            found: Any = handle.result(60)
            assert found.tokens.equal(expected.tokens)
            assert all(map(torch.equal, found.logprobs, expected.logprobs))


def test_others_go_on_meanwhile() -> None:
    """A text and its prompt run in pieces, with a step of the others after each."""
    model, between = pd.models.load("tiny-code"), list[None]()
    with Engine(
        model, max_new_tokens=250, max_prompt_tokens=250, prompt_tokens_per_step=16, kept_prompt_tokens=0
    ) as engine:
        begun = threading.Event()
        likely = engine.submit("import os\n" * 20, max_new_tokens=100, on_tokens=lambda *_: begun.wait(60), **LIMIT)

        def told(*_: Any) -> None:
            if not likely.done and sum(len(piece.ids) for piece in likely.pieces) == 100:
                between.append(None)

        other = engine.submit("def ", max_new_tokens=250, end_tokens=(), on_tokens=told)
        begun.set()
        assert len(other.result(60).tokens) == 250 and likely.done
    assert len(between) > 4  # 200 and 99 tokens, 64 at a time


def test_a_prompt_that_is_kept_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, counted = pd.models.load("tiny-code"), "import os\n" * 20, list[int]()
    forward = type(model).forward

    def counting(self: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        counted.append(tokens.shape[1])
        return forward(self, tokens, **options)

    monkeypatch.setattr(type(model), "forward", counting)
    with Engine(model, max_new_tokens=8) as engine:
        handles = [engine.submit(prompt, max_new_tokens=8, temperature=1.0, seed=seed, **LIMIT) for seed in range(4)]
        texts = {handle.result(60).text for handle in handles}
    assert len(texts) == 4 and sum(counted) < 2 * len(prompt)


def test_nothing_is_computed_for_a_text_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, plainly = list[None](), logprobs.scored

    def counted(*arguments: Any, **options: Any) -> Any:
        passes.append(None)
        return plainly(*arguments, **options)

    monkeypatch.setattr("pdkernels.engine.scoring.scored", counted)
    with Engine(FakeModel(by_history), max_prompt_tokens=8, max_new_tokens=12) as engine:
        for unread in (True, False):
            handles, made = list[Any](), threading.Event()

            def cancel(*_: Any, unread: bool = unread, handles: Any = handles, made: Any = made) -> None:
                assert made.wait(60)
                handles[0].cancel(unread=unread)

            handle = engine.submit([1, 2], max_new_tokens=12, on_tokens=cancel, **LIMIT)
            handles.append(handle)
            made.set()
            result = handle.result(60)
            assert handle.finish_reason == "cancelled" and 0 < len(result.tokens) < 12
            assert (result.logprobs is None) == unread
    assert len(passes) == 1


def test_no_more_texts_wait_than_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else requests whose prompts are kept would end faster than their log-probabilities are computed."""
    model, lengths, plainly = pd.models.load("tiny-code"), list[int](), Scoring.turn

    def turn(self: Scoring, *arguments: Any) -> None:
        lengths.append(len(self))
        plainly(self, *arguments)

    monkeypatch.setattr(Scoring, "turn", turn)
    with Engine(model, max_running=2, max_new_tokens=4, prompt_tokens_per_step=2, kept_prompt_tokens=4000) as engine:
        prompt = "import os\n" * 10
        engine.submit(prompt, max_new_tokens=1, end_tokens=()).result(60)
        handles = [engine.submit(prompt + letter, max_new_tokens=2, **LIMIT) for letter in "abcdefghij"]
        for handle in handles:
            assert handle.result(60).logprobs is not None
    assert 1 < max(lengths) <= 4  # two that wait, and the two that ran then


def test_a_text_that_nobody_reads_leaves_from_behind_others() -> None:
    ended, scoring = list[Any](), Scoring()
    session: Any = SimpleNamespace(params=SimpleNamespace(logprobs=1))
    for name in "abc":
        handle: Any = SimpleNamespace(unread=False)
        scoring.add(Ended(handle, session, (), lambda *result, name=name: ended.append((name, *result))))
    scoring._ended[1].handle.unread = True
    scoring.turn(None, 0, 4)
    assert ended == [("b", None, None)] and len(scoring) == 2


def test_an_error_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")
        yield

    model = pd.models.load("tiny-code")
    with Engine(model, max_new_tokens=8) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("pdkernels.engine.scoring.scored", fail)
            with pytest.raises(MemoryError, match="no room"):
                engine.submit("import os\n", max_new_tokens=8, **LIMIT).result(60)
        assert engine.running and engine.metrics().finished == {"error": 1}
        assert engine.submit("import os\n", max_new_tokens=8, **LIMIT).result(60).logprobs is not None
        assert engine.metrics().running == 0


def test_an_adapter_is_not_read_while_others_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Its files may be large."""
    from tests.support.lora import random_adapter

    model = pd.models.load("tiny-code")
    folder = random_adapter(model, tmp_path / "adapter", 8, 0)
    module = "pdkernels.models.checkpoints.request_adapters"
    plainly = adapters.read_adapter
    with Engine(model, max_new_tokens=8) as engine:

        def read(*arguments: Any) -> Any:
            assert len(engine.submit("import os\n", max_new_tokens=8, end_tokens=()).result(20).tokens) == 8
            assert engine.metrics().submitted == 1
            return plainly(*arguments)

        monkeypatch.setattr(f"{module}.read_adapter", read)
        engine.load_adapter("poems", folder)
        assert engine.submit("import os\n", max_new_tokens=8, adapter="poems").result(60)
