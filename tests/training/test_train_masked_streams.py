"""The example: losses and gradients through the op, compiled, are those of the dense mask, and one graph serves all steps."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from torch._dynamo.testing import CompileCounterWithBackend
from typer.testing import CliRunner

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/train_masked_streams.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_masked_streams", EXAMPLE)
    module = sys.modules["train_masked_streams"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load()
kept_corpus = cache(example.corpus)
SMALL = {
    "length": 192,
    "block": 4,
    "config": replace(example.CONFIG, hidden_size=32, layers=1, head_dim=16, intermediate_size=32, max_positions=192),
}


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def corpus_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "corpus", kept_corpus)


@pytest.mark.parametrize("layout", example.LAYOUTS)
def test_three_steps_equal_the_dense_mask_in_one_graph(layout: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run = example.train(layout, steps=3, compile_backend=counter, **SMALL)
    steps = [next(run)]
    graphs = counter.frame_count
    steps += run
    assert 0 < graphs == counter.frame_count
    assert len({step.pairs for step in steps}) == 3, "every step has another mask"
    for step in steps:
        assert step.within_budget, step
        assert 0 < step.loss_budget < 1e-5 * step.loss and 0 < step.gradient_budget < 1e-5
        assert math.isclose(step.loss, step.dense_loss, rel_tol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", example.LAYOUTS)
def test_generated_code_equals_the_dense_mask(layout: str) -> None:
    assert all(step.within_budget for step in example.train(layout, steps=4, compile_backend="inductor", **SMALL))


def test_the_model_learns_without_a_comparison() -> None:
    steps = list(example.train("noise-aware", steps=30, lr=1e-2, compare=False, compile_backend="eager", **SMALL))
    assert sum(step.loss for step in steps[-5:]) < 0.8 * sum(step.loss for step in steps[:5])
    assert all(step.dense_loss is None and step.within_budget for step in steps)


@pytest.mark.parametrize("spoilt", ["loss", "gradients"])
def test_a_small_error_is_over_the_budget(spoilt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = example.outcome

    def outcome(losses_of: Callable, model: Any, mask: Any, *rest: Any) -> example.Outcome:
        result = honest(losses_of, model, mask, *rest)
        if isinstance(mask, torch.Tensor):
            return result
        if spoilt == "loss":
            return result._replace(loss=result.loss * (1 + 1e-5))
        return result._replace(gradients=[gradient * (1 + 1e-5) for gradient in result.gradients])

    monkeypatch.setattr(example, "outcome", outcome)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    (step,) = example.train("noise-aware", steps=1, **SMALL)
    assert not step.within_budget


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(example, "train", partial(example.train, config=SMALL["config"]))
    app = typer.Typer()
    app.command()(example.main)
    picture = tmp_path / "losses.png"
    arguments = ["--steps", "2", "--length", "192", "--block", "4", "--plot", str(picture)]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    assert "a dense boolean mask 36,864" in " ".join(answer.output.split())
    assert picture.read_bytes().startswith(b"\x89PNG")

    over = dict(dense_loss=9.0, loss_budget=0.5, gradient_error=0.0, dense_gradient_error=0.0, gradient_budget=1.0)
    monkeypatch.setattr(example, "judge", lambda *outcomes: over)
    answer = CliRunner().invoke(app, [*arguments, "--layout", "dual-stream"])
    assert answer.exit_code == 1 and "dual-stream, step 0; dual-stream, step 1" in " ".join(answer.output.split())


@pytest.mark.parametrize("steps", [0, 2])
def test_stopped_it_says_what_is_kept(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        yield from [example.Step(1.0, 0.5, 8)] * steps
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "train", interrupted)
    app, picture = typer.Typer(), tmp_path / "losses.png"
    app.command()(example.main)
    answer = CliRunner().invoke(app, ["--plot", str(picture)])
    assert answer.exit_code == 130 and f"stopped after {steps} steps of noise-aware" in answer.output
    kept = f"the losses so far are kept in {picture}." if steps else "nothing is kept."
    assert kept in answer.output and picture.exists() == bool(steps)
