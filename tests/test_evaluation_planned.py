"""The evaluation of models that plan, on an untrained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import pdkernels as pd
from pdkernels import cli, evaluation
from pdkernels.evaluation import planned
from pdkernels.generation.traces import ChunkStep
from pdkernels.models import ByteTokenizer, PlanTokens, Transformer, TransformerConfig


def small(plans: bool) -> Transformer:
    torch.manual_seed(1)
    config = TransformerConfig(
        vocab_size=264, hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=32
    )
    plan_tokens = PlanTokens(*range(258, 264), digits=range(48, 58), unit=8) if plans else None
    names = {"tokenizer": ByteTokenizer(), "end_tokens": ByteTokenizer.end_tokens, "mask_token": 257}
    return Transformer(config, **names, plan_tokens=plan_tokens).requires_grad_(False)


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "_LIMIT", 12)
    monkeypatch.setattr(planned, "PLANNED_SETTINGS", planned.PLANNED_SETTINGS[::11])


def test_models_with_plans_and_without() -> None:
    problems = evaluation.held_out_orders(3)
    asked = sum(len(items) for problem in problems for items in problem.rounds)
    seen: list[float] = []
    scores = evaluation.evaluate_planned(
        "small", small(True), problems, batch_size=2, progress=lambda what, share: seen.append(share)
    )
    assert list(scores) == ["planned, sparse False, steps_ratio 1.0", "planned, sparse True, steps_ratio 1.0"]
    assert seen == [0.0, 0.5, 1.0]
    for score in scores.values():
        assert score.items[1] == asked and sum(score.reasons.values()) == 3
        assert score.critical_path == pytest.approx(sum(score.forwards.values())) and score.valid_plans == 0
    (score,) = evaluation.evaluate_planned("plain", small(False), problems).values()
    assert score.items[1] == asked and score.valid_plans is None and score.critical_path == pytest.approx(12)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd.models, "available", lambda: ("tiny-planned",))
    monkeypatch.setattr(pd.models, "load", lambda name: small(True))
    path = tmp_path / "figures.json"
    runner = CliRunner()
    options = ["--problems", "2", "--json", str(path), "--plot", str(tmp_path / "figures.png")]
    answer = runner.invoke(cli.app, ["eval", "--family", "planned", *options])
    assert answer.exit_code == 0, answer.output
    assert "planned, sparse True, steps_ratio 1.0: 0.0% of" in answer.output and "critical path" in answer.output
    (first, _) = json.loads(path.read_text())["benchmarks"]
    assert first["extra_info"]["problems"] == 2 and first["extra_info"]["items"][0] == 0
    assert (tmp_path / "figures.png").stat().st_size > 10_000
    swept = ["--problems", "1", "--sweep", "threshold=.5,.9", "--sweep", "temperature=1"]
    answer = runner.invoke(cli.app, ["eval", "--family", "planned", *swept])
    assert [line.partition(":")[0] for line in answer.output.splitlines() if "orders right" in line] == [
        f"tiny-planned, planned, sparse {sparse}, threshold {threshold}, temperature 1"
        for sparse in (False, True)
        for threshold in (0.5, 0.9)
    ]
    for wrong, said in (
        (["--task", "sums"], "--family planned takes no --method"),
        (["--sweep", "treshold=1"], "sweep must name an option of planned, got treshold"),
        (["--sweep", "threshold=1", "--sweep", "threshold=.5"], "sweep must name an option once"),
        (["--sweep", "threshold=1", "--resume"], "--family planned takes neither --resume nor --max-rows"),
    ):
        refused = runner.invoke(cli.app, ["eval", "--family", "planned", *wrong])
        assert refused.exit_code == 2 and said in " ".join(refused.output.split()), refused.output


def test_a_run_as_a_picture(tmp_path: Path) -> None:
    steps = [ChunkStep(0, [[9, 9], [9]], {(0, 1): 65, (1, 0): 263}), ChunkStep(1, [[9]], {(0, 0): 66})]
    evaluation.plot_chunks(steps, tmp_path / "plain.png")
    evaluation.plot_chunks(steps, tmp_path / "named.png", tokenizer=ByteTokenizer(), topics=[["a", "b"]])
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("plain.png", "named.png"))
    with pytest.raises(ValueError, match="evaluation.plot_chunks: trace must hold steps, got an empty one"):
        evaluation.plot_chunks([], tmp_path / "none.png")
