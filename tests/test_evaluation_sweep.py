"""Sweeps: which combinations there are, what is saved and resumed, which of them are shown as best, and against what."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pdkernels import cli, evaluation, models
from pdkernels.evaluation import (
    Candidate,
    SweepRow,
    Task,
    compare,
    frontier,
    make_task,
    pareto,
    parse_sweep,
    plot_frontier,
    sweep,
    sweep_candidates,
    without_many_rows,
)
from pdkernels.evaluation.frontier import paired_difference, paired_ratio
from pdkernels.evaluation.sweep import rows_of
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig


def small_model(mask_token: int | None = 257) -> Transformer:
    torch.manual_seed(3)
    config = TransformerConfig(
        vocab_size=258, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=16
    )
    return Transformer(config, tokenizer=ByteTokenizer(), end_tokens=(256,), mask_token=mask_token).requires_grad_(
        False
    )


def task(problems: int = 3) -> Task:
    return make_task("sums", problems)._replace(limit=12)


def row(
    label: str, right: int, seconds: float, *, baseline: bool = False, forwards: float = 10.0, model: str = "m"
) -> SweepRow:
    answers = [number < right for number in range(10)]
    method = "recurrent_static" if baseline else "recurrent_diffusion"
    settings = {"recurrences": label} if label else {}
    batches = [seconds / 5] * 5
    return SweepRow(model, method, settings, baseline, 10, right, (0.0, 1.0), answers, 100, forwards, seconds, batches)


# ---- what is swept


@pytest.mark.parametrize("text", ["threshold", "=3", "threshold=", "threshold= , ", ""])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="sweep must have the form option=value,value"):
        parse_sweep(text)


def test_values_are_what_they_look_like() -> None:
    assert parse_sweep(" x-y = 1, .5,true,False,none,1e-3,causal,1").values == (
        1,
        0.5,
        True,
        False,
        None,
        1e-3,
        "causal",
    )
    assert parse_sweep("x-y=1").option == "x_y"


def test_all_combinations_of_the_options_that_a_method_has() -> None:
    found = sweep_candidates(
        {"small": small_model()},
        [parse_sweep("block_size=2,4"), parse_sweep("threshold=.5,none")],
        ["jacobi", "block_diffusion"],
    )
    assert [one.label for one in found] == [
        "autoregressive",
        "jacobi, block_size 2",
        "jacobi, block_size 4",
        *(f"block_diffusion, block_size {size}, threshold {limit}" for size in (2, 4) for limit in (0.5, None)),
    ]


def test_an_option_may_be_of_one_method() -> None:
    found = sweep_candidates({"small": small_model()}, [parse_sweep("jacobi.block_size=2,4")])
    assert [one.label for one in found] == ["autoregressive", "jacobi, block_size 2", "jacobi, block_size 4"]


def test_methods_that_need_a_mask_token_are_for_models_that_have_one() -> None:
    methods = {one.method for one in sweep_candidates({"small": small_model(None)}, [parse_sweep("block_size=2")])}
    assert "jacobi" in methods and not methods & {"block_diffusion", "linear_self_speculation"}


@pytest.mark.parametrize(
    ("swept", "methods", "said"),
    [
        (["thresold=1"], [], "name an option of a method that the models can run, got thresold"),
        (["threshold=1"], ["jacobi"], "name an option of a method that the models can run, got threshold"),
        (["block_size=1", "jacobi.block_size=2"], [], "name an option once"),
        (["block_size=2"], ["nonsense"], "nonsense"),
    ],
)
def test_what_cannot_be_swept_is_refused(swept: list[str], methods: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sweep_candidates({"small": small_model()}, [parse_sweep(text) for text in swept], methods)


@pytest.mark.parametrize(
    ("candidate", "rows"),
    [
        (Candidate("m", "autoregressive"), 1),
        (Candidate("m", "linear_self_speculation", 16), 16),
        (Candidate("m", "quadratic_self_speculation", 16), 272),
        (Candidate("m", "quadratic_self_speculation", 4, (("masks_per_group", 9),)), 40),
        (Candidate("m", "jacobi_multiblock", 64, (("blocks", 1), ("verification_size", 4))), 256),
        (Candidate("m", "recurrent_diffusion", settings=(("max_wavefront", 8),)), 8),
        (Candidate("m", "llada", 16), 1),
    ],
)
def test_rows_of_a_forward(candidate: Candidate, rows: int) -> None:
    assert rows_of(candidate) == rows
    assert without_many_rows([candidate], rows)[0] == [candidate]
    assert without_many_rows([candidate], rows - 1)[0] == []


# ---- what is measured


def test_rows_are_sums_over_batches() -> None:
    found = {"small": small_model()}
    candidates = sweep_candidates(found, [parse_sweep("block_size=3")], ["jacobi"])
    greedy, jacobi = sweep(found, candidates, task(5), batch_size=2)
    assert greedy.baseline and not jacobi.baseline and greedy.problems == len(greedy.answers) == 5
    assert greedy.answers == jacobi.answers and len(jacobi.batches) == 3
    assert greedy.forwards == greedy.tokens == jacobi.tokens and jacobi.forwards <= greedy.forwards
    assert greedy.seconds == pytest.approx(sum(greedy.batches)) and greedy.right == sum(greedy.answers)
    assert jacobi.as_json()["tokens_per_forward"] == jacobi.tokens / jacobi.forwards


def test_what_was_kept_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"small": small_model()}
    candidates = sweep_candidates(found, [parse_sweep("block_size=2,3")], ["jacobi"])
    calls = 0
    generate = evaluation.sweep.__globals__["_generate"]

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setitem(evaluation.sweep.__globals__, "_generate", counted)
    kept: dict[str, Any] = {}
    states = []
    with pytest.raises(KeyboardInterrupt):
        sweep(found, candidates, task(), measured=kept, keep=lambda now: states.append(json.dumps(now)))
    measured = sum(map(len, kept.values()))
    assert 0 < measured < 9 and len(states) == measured
    calls = -100
    before = json.loads(states[-1])
    rows = sweep(found, candidates, task(), measured=json.loads(states[-1]))
    assert calls + 100 == 9 - measured + 3, "what is missing, and a warm-up for each"
    for one in rows:
        for number, batch in before.get(f"small: {one.label}", {}).items():
            assert one.batches[int(number)] == batch["seconds"]
    whole = sweep(found, candidates, task())
    assert [(one.answers, one.tokens, one.forwards) for one in rows] == [
        (o.answers, o.tokens, o.forwards) for o in whole
    ]


def test_source_text_is_neither_right_nor_wrong() -> None:
    found = {"small": small_model()}
    with pytest.raises(ValueError, match="task must be one whose answers are right or wrong"):
        sweep(found, [Candidate("small", "autoregressive")], task()._replace(problems=None))


# ---- what is shown


def test_fronts_are_what_nobody_dominates() -> None:
    chance = random.Random(1)
    for _ in range(200):
        points = [(chance.randrange(6), chance.randrange(6)) for _ in range(chance.randrange(1, 12))]
        front = pareto(points)
        shown = [points[index] for index in front]
        assert shown == sorted(set(shown)) and [gain for _, gain in shown] == sorted({gain for _, gain in shown})
        for cost, gain in points:
            assert any(other <= cost and more >= gain for other, more in shown)
        for cost, gain in shown:
            assert not any((other <= cost and more > gain) or (other < cost and more >= gain) for other, more in points)
        assert min(points)[0] == shown[0][0] and max(gain for _, gain in points) == shown[-1][1]


def test_intervals_of_pairs() -> None:
    alike = [True] * 60 + [False] * 40
    difference, low, high = paired_difference(alike, alike)
    assert difference == 0 and low == -high and 0 < high < 0.03
    better = [True] * 80 + [False] * 20
    difference, low, high = paired_difference(better, alike)
    assert difference == pytest.approx(0.2) and 0.1 < low < 0.2 < high < 0.3
    assert paired_difference(alike, better)[0] == pytest.approx(-difference)
    with pytest.raises(ValueError, match="answers must be for the same prompts"):
        paired_difference([True], [])
    ratio, low, high = paired_ratio([2.0, 2.2, 1.8, 2.0] * 10, [1.0] * 40)
    assert ratio == pytest.approx(2.0) and 1.9 < low < 2.0 < high < 2.1


def test_speed_is_relative_to_the_cheapest_baseline_that_is_right_as_often() -> None:
    rows = [
        row("", 9, 10.0, baseline=True),
        row("8", 9, 4.0, baseline=True),
        row("4", 8, 3.0, baseline=True),
        row("1", 2, 1.0, baseline=True),
        row("sampler", 9, 2.0),
        row("poor", 1, 2.0),
        row("perfect", 10, 2.0),
        row("other model", 9, 1.0, model="n"),
        row("", 9, 1.0, baseline=True, model="n"),
    ]
    found = {one.label: one for one in compare(rows)}
    sampler = found["recurrent_diffusion, recurrences sampler"]
    assert sampler.baseline == "recurrent_static, recurrences 8" and sampler.speedup == pytest.approx((2.0, 2.0, 2.0))
    assert sampler.own_baseline == "recurrent_static" and sampler.own_speedup[0] == pytest.approx(5.0)
    assert found["recurrent_diffusion, recurrences poor"].baseline == "recurrent_static, recurrences 1"
    assert found["recurrent_diffusion, recurrences perfect"].baseline is None
    assert compare(rows, tolerance=0.1)[0].baseline == "recurrent_static, recurrences 4"
    assert found["recurrent_diffusion, recurrences other model"].model == "n"


def test_fronts_by_forwards_and_by_seconds_differ() -> None:
    rows = [row("a", 5, 1.0, forwards=9), row("b", 5, 2.0, forwards=3), row("c", 9, 3.0, forwards=20)]
    front = frontier.fronts([one.as_json() for one in rows])["m"]
    assert [label[-1] for label in front["forwards"]] == ["b", "c"]
    assert [label[-1] for label in front["seconds"]] == ["a", "c"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    rows = [row("", 9, 10.0, baseline=True, forwards=500), row("a", 5, 1.0), row("b", 0, 0.2, model="n")]
    plot_frontier([one.as_json() for one in rows], tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 8000
    with pytest.raises(ValueError, match="rows must hold at least one"):
        plot_frontier([], tmp_path / "none.png")


# ---- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(models, "load", lambda name: small_model())
    monkeypatch.setattr(evaluation.tasks, "_SUMS_LIMIT", 12)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Any:
        given = ["eval", "--model", "tiny-trimode", "--task", "sums", "--problems", "3", *arguments]
        return CliRunner().invoke(cli.app, given, env={"NO_COLOR": "1", "COLUMNS": "80"})

    return run


SWEEP = ["--method", "block_diffusion", "--sweep", "block_size=2,4", "--sweep", "threshold=.5,none"]


def test_the_command_writes_rows_and_continues_from_them(command: Any, tmp_path: Path) -> None:
    first = command(*SWEEP, "--json", "s.json")
    assert first.exit_code == 0, first.output
    assert max(map(len, first.output.splitlines())) <= 80
    written = json.loads((tmp_path / "s.json").read_text())
    assert [one["label"] for one in written["rows"]][:2] == [
        "autoregressive",
        "block_diffusion, block_size 2, threshold 0.5",
    ]
    assert (
        len(written["rows"]) == 5 and len(written["comparisons"]) == 4 and written["fronts"]["tiny-trimode"]["seconds"]
    )
    again = command(*SWEEP, "--json", "s.json", "--resume")
    assert again.exit_code == 0 and json.loads((tmp_path / "s.json").read_text()) == written
    wider = command(*SWEEP[:2], "--sweep", "block_size=2,4,5", *SWEEP[4:], "--json", "s.json", "--resume")
    rows = {one["label"]: one for one in json.loads((tmp_path / "s.json").read_text())["rows"]}
    assert wider.exit_code == 0 and len(rows) == 7
    assert all(rows[one["label"]] == one for one in written["rows"])


def test_rows_may_be_bounded(command: Any) -> None:
    result = command(*SWEEP, "--max-rows", "3")
    assert (
        result.exit_code == 0
        and "left out tiny-trimode: block_diffusion, block_size 4, threshold 0.5: 4 rows" in result.output
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume"], "--resume and --max-rows need --sweep"),
        ([*SWEEP, "--resume"], "--resume needs --json"),
        ([*SWEEP, "--width", "4"], "--width is not for sweeps. Write --sweep block_size=..."),
        ([*SWEEP, "--json", "other.json", "--resume"], "--resume cannot continue other.json"),
        (
            [*SWEEP, "--json", "seed.json", "--resume"],
            "--resume cannot continue seed.json: its seed is 5, that of this run is 0",
        ),
        (["--sweep", "treshold=1"], "name an option of a method that the models can run, got treshold"),
    ],
)
def test_errors_of_the_command_are_one_sentence(command: Any, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "other.json").write_text("{}")
    facts = {"task": "sums", "problems": 3, "seed": 5}
    (tmp_path / "seed.json").write_text(json.dumps({"facts": facts, "measured": {}}))
    result = command(*arguments)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split()), result.output
    assert json.loads((tmp_path / "other.json").read_text()) == {}


def test_an_interrupted_sweep_keeps_what_it_has(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = evaluation.sweep.__globals__["_generate"], 0

    def stopped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt
        return generate(*arguments)

    with monkeypatch.context() as patched:
        patched.setitem(evaluation.sweep.__globals__, "_generate", stopped)
        result = command(*SWEEP, "--json", "s.json")
    assert result.exit_code == 130 and "s.json holds the results so far; continue with --resume" in " ".join(
        result.output.split()
    )
    before = json.loads((tmp_path / "s.json").read_text())["measured"]
    assert sum(map(len, before.values())) == 11 - 5
    assert command(*SWEEP, "--json", "s.json", "--resume").exit_code == 0
    after = json.loads((tmp_path / "s.json").read_text())["measured"]
    assert all(after[key][number] == batch for key, own in before.items() for number, batch in own.items())


def test_recurrent_models_are_compared_with_fewer_recurrences() -> None:
    found = sweep_candidates(
        {"tiny-recurrent": models.load("tiny-recurrent")},
        [parse_sweep("recurrent_static.recurrences=1,2"), parse_sweep("max_wavefront=2")],
    )
    assert [one.label for one in found] == [
        "recurrent_static",
        "recurrent_static, recurrences 1",
        "recurrent_static, recurrences 2",
        "recurrent_diffusion, max_wavefront 2",
    ]
