"""The example: losses and gradients through the op, compiled, are those of the dense mask, and one graph serves all steps."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
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
    sys.path.insert(0, str(EXAMPLE.parent))  # the folder of the modules that the scripts share
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLE.parent))
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


@pytest.mark.slow
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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of `main` for a small model, not compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(example, "train", partial(example.train, config=SMALL["config"]))
    return dict(layout="all", steps=3, length=192, block=4, compare=False)


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C inside of a step."""
    honest, seen = example.outcome, []

    def outcome(*arguments: Any) -> example.Outcome:
        seen.append(1)
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(*arguments)

    monkeypatch.setattr(example, "outcome", outcome)


# A step of the first layout, its last one, one of the second layout.
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_resumed_training_is_one_that_was_never_stopped(
    at: int, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(example, "draw", lambda runs, path: drawn.append(runs))
    example.main(**small, plot=tmp_path / "whole.png")
    parts = tmp_path / "parts.png"
    with monkeypatch.context() as patched:
        interrupt(patched, at)
        with pytest.raises(typer.Exit) as stopped:
            example.main(**small, plot=parts)
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        stopped.value.exit_code == 130
        and "parts.resume.pt is kept, continue with --resume" in printed
        and len(drawn) == 1
    )
    with pytest.raises(typer.Exit):
        example.main(**{**small, "lr": 0.1}, plot=parts, resume=True)
    assert "but --lr was 0.003, now 0.1." in " ".join(capsys.readouterr().err.split())
    torch.manual_seed(99)  # draws in between must not matter
    example.main(**small, plot=parts, resume=True)
    whole, resumed = drawn
    assert resumed == whole and [len(steps) for steps in whole.values()] == [3] * len(example.LAYOUTS)
    assert not list(tmp_path.glob("*resume*")), "nothing is left to resume"


def test_stopped_before_a_step_it_reports_that_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "train", interrupted)
    with pytest.raises(typer.Exit):
        example.main(plot=tmp_path / "losses.png")
    assert "stopped: nothing is kept; " in capsys.readouterr().out and not list(tmp_path.iterdir())
