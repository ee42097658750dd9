"""Adapters are not unloaded under a request, wherever it stands: in no list of the engine, between two of them, or between
the parts of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding.steps import RunningBatch
from pdkernels.engine.method_batch import MethodBatch
from pdkernels.engine.pages import Memory
from tests.support.lora import random_adapter

PROMPT = "def add(a, b):\n    return a + b\n" * 3


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    model = pd.models.load("tiny-code")
    with pd.Engine(model, max_new_tokens=100, cache_tokens=512, prompt_tokens_per_step=16) as made:
        made.load_adapter("mine", random_adapter(model, tmp_path / "mine", 8, 0))
        yield made


@pytest.mark.parametrize(
    ("place", "name", "requests"),
    [(MethodBatch, "_keep_answer", 1), (RunningBatch, "retire", 1), (RunningBatch, "leave", 4)],
)
def test_not_while_a_request_is_in_no_list(
    engine: pd.Engine, place: Any, name: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves its row, or gives up its pages and is about to wait again."""
    function, refusals = getattr(place, name), list[str]()

    def unloads(*arguments: Any, **options: Any) -> Any:
        if not refusals:
            with pytest.raises(ValueError, match="must be that of an adapter that no request uses") as refused:
                engine.unload_adapter("mine")
            refusals.append(str(refused.value))
        return function(*arguments, **options)

    monkeypatch.setattr(place, name, unloads)
    handles = [
        engine.submit(PROMPT, adapter="mine", max_new_tokens=100, end_tokens=(), seed=seed) for seed in range(requests)
    ]
    texts = [handle.result(60).text for handle in handles]
    assert refusals == [
        f"pdkernels.Engine.unload_adapter: name must be that of an adapter that no request uses, got 'mine', which {requests} use."
    ]
    assert len(set(texts)) == 1
    engine.unload_adapter("mine")


def test_a_request_that_is_submitted_meanwhile_is_refused(engine: pd.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Memory.prepare

    def unloads(*arguments: Any) -> Any:
        engine.unload_adapter("mine")
        return prepare(*arguments)

    monkeypatch.setattr(Memory, "prepare", unloads)
    with pytest.raises(ValueError, match=r"adapter must stay loaded until it is submitted, got 'mine'\."):
        engine.submit(PROMPT, adapter="mine", max_new_tokens=4)
    assert engine.metrics().submitted == 0
