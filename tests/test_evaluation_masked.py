"""`eval --family masked`: its candidates, tasks that fit a canvas, the pictures."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner

from pdkernels import decoding, evaluation
from pdkernels.cli import app
from pdkernels.decoding.methods import METHODS
from pdkernels.evaluation.comparison import wing_of
from pdkernels.evaluation.masked import masked_candidates, plot_canvas, plot_masked
from pdkernels.generation.traces import MaskedStep
from pdkernels.models import ByteTokenizer
from pdkernels.models.architectures.transformer import Transformer, TransformerConfig


def small_model(**changes: object) -> Transformer:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 258,
        "hidden_size": 16,
        "layers": 1,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 16,
        "intermediate_size": 16,
    }
    config = TransformerConfig(**sizes, **({"attention": "bidirectional", "predicts": "own"} | changes))
    tokenizer = ByteTokenizer()
    return Transformer(config, tokenizer=tokenizer, end_tokens=tokenizer.end_tokens, mask_token=257).requires_grad_(
        False
    )


def test_the_baseline_comes_first_and_every_option_is_known() -> None:
    found = masked_candidates("some")
    assert found[0] == evaluation.Candidate("some", "llada")
    assert len(set(found)) == len(found)
    assert {candidate.method for candidate in found} == {
        name for name, known in METHODS.items() if known.wing == "masked"
    }
    for candidate in found:
        assert set(candidate.options) <= set(decoding.method_options(candidate.method)), candidate.label


def test_families() -> None:
    assert wing_of(small_model()) == "masked"
    assert wing_of(small_model(attention="causal", predicts="next")) == "causal"
    competing, skipped = evaluation.candidates({"some": small_model()})
    assert competing == masked_candidates("some") and skipped == []


def test_methods_for_other_models_are_skipped() -> None:
    models = {"masked": small_model(), "plain": small_model(attention="causal", predicts="next")}
    competing, skipped = evaluation.candidates(models, ["slowfast", "recurrent_static"])
    assert [(candidate.model, candidate.method) for candidate in competing] == [
        ("masked", "llada"),
        ("masked", "slowfast"),
        ("plain", "autoregressive"),
    ]
    assert skipped == [
        "masked with recurrent_static: that method is for models of another kind, such as tiny-recurrent",
        "plain with slowfast: that method is for models of another kind, such as tiny-masked",
        "plain with recurrent_static: that method is for models of another kind, such as tiny-recurrent",
    ]


def test_a_task_for_a_canvas() -> None:
    task = evaluation.make_task("sums", 20, canvas=60)
    assert task.limit == 60 and len(task.prompts) == 20
    assert all(len(problem.steps) < 60 for problem in task.problems)
    assert any(len(problem.steps) >= 60 for problem in evaluation.make_task("sums", 20).problems)
    with pytest.raises(
        ValueError, match=r"pdkernels.evaluation.make_task: canvas must have room for 6 different sums, got 12\."
    ):
        evaluation.make_task("sums", 1, canvas=12)


def test_a_comparison_of_few() -> None:
    """The figures of a run by hand."""
    model, task = small_model(), evaluation.make_task("sums", 2, canvas=60)
    competing = [
        evaluation.Candidate("some", "llada"),
        evaluation.Candidate("some", "fast_dllm", settings=(("block_size", 8),)),
    ]
    rows = evaluation.evaluate({"some": model}, competing, task)
    assert [row.verdict for row in rows][0] == "is greedy" and not any(row.broken for row in rows)
    for row in rows:
        results = [
            decoding.generate(model, prompt, row.method, max_new_tokens=60, **dict(row.settings))
            for prompt in task.prompts
        ]
        assert row.tokens == sum(result.stats.tokens for result in results)
        forwards = sum(result.stats.forwards for result in results)
        assert row.tokens_per_forward == pytest.approx(row.tokens / forwards)
    with pytest.raises(
        ValueError,
        match=r"pdkernels.evaluation: competing must begin with llada for some, got fast_dllm, block_size 8\.",
    ):
        evaluation.evaluate({"some": model}, competing[1:], task)


def step(
    window: tuple[int, int], committed: dict[int, int], confidence: dict[int, float], tokens: list[int]
) -> MaskedStep:
    return MaskedStep(tokens, committed, confidence, window)


def test_pictures(tmp_path: Path) -> None:
    mask = 9
    trace = [
        step((1, 4), {2: 66}, {1: 0.2, 2: 0.9, 3: 0.4}, [65, mask, mask, mask]),
        step((1, 4), {1: 67, 3: 68}, {1: 0.8, 3: 0.7}, [65, mask, 66, mask]),
    ]
    plot_canvas(trace, tmp_path / "canvas.png", tokenizer=ByteTokenizer(), mask_token=mask)
    picture = matplotlib.image.imread(tmp_path / "canvas.png")
    assert picture.ndim == 3 and picture.std() > 0.05
    with pytest.raises(
        ValueError, match=r"pdkernels.evaluation.plot_canvas: trace must hold steps, got an empty one\."
    ):
        plot_canvas([], tmp_path / "none.png")
    row = {
        "task": "sums",
        "method": "slowfast",
        "right": 3,
        "problems": 4,
        "speedup": 2.0,
        "tokens_per_forward": 3.0,
        "model": "m",
        "candidate": "slowfast",
    }
    plot_masked([row, {**row, "method": "llada", "candidate": "llada"}], tmp_path / "rows.png")
    assert matplotlib.image.imread(tmp_path / "rows.png").std() > 0.05
    with pytest.raises(ValueError, match="rows must hold figures of masked-diffusion methods on sums, got none"):
        plot_masked([{**row, "method": "jacobi"}], tmp_path / "none.png")


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkernels.models.load", lambda name: small_model())
    monkeypatch.setitem(evaluation.FAMILIES, "masked", evaluation.FAMILIES["masked"]._replace(canvas=60))
    arguments = [
        "eval",
        "--family",
        "masked",
        "--model",
        "some",
        "--method",
        "slowfast",
        "--problems",
        "2",
        "--plot",
        str(tmp_path / "a.png"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "llada" in result.output and "slowfast" in result.output and (tmp_path / "a.png").exists()
