"""Tables of the recurrent-depth paper on other weights: the recipe of the fine-tuning, and rows for each setting."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from bench.papers import recurrent_ablations as ablations
from bench.papers import runs
from pdkernels import models
from pdkernels.decoding.recurrent._parts import Schedule
from pdkernels.evaluation.tasks import make_task
from pdkernels.training import arithmetic


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps on two rows, and answers of eight tokens."""
    sizes = {"STEPS": 2, "ROWS": 2, "CONTEXT": 40, "AVERAGED": 1, "SETTINGS": {"noise": (0.5,)}}
    for name, value in sizes.items():
        monkeypatch.setattr(ablations, name, value)
    task = lambda *given: make_task(*given)._replace(limit=8)  # noqa: E731
    monkeypatch.setattr(ablations, "make_task", task)
    ablations._trained.cache_clear()
    yield
    ablations._trained.cache_clear()


def test_the_rate_is_a_trapezoid() -> None:
    rates = [ablations.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)]) and rates[10:71] == [1.0] * 61
    assert rates[71:] == pytest.approx([(100 - step) / 30 for step in range(71, 100)])


def test_only_answers_are_counted() -> None:
    ids, answers = ablations.rows_of_sums(arithmetic(0), 2, 60, 256)
    problems = arithmetic(0)
    one = next(problems)
    text = [*one.prompt.encode(), *one.steps.encode(), 256]
    assert ids.shape == (2, 61) and ids[0, : len(text)].tolist() == text[:61]
    assert ids[0, 1:][answers[0]].tolist()[: len(text) - len(one.prompt)] == text[len(one.prompt) : 61]


def test_weights_are_trained_and_averaged(short: None) -> None:
    start = models.load(ablations.BASE)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    tuned, averaged = ablations.fine_tuned(start, lambda share: None)
    assert all(torch.equal(before[name], value) for name, value in start.state_dict().items())
    last, mean = tuned.state_dict(), averaged.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in last.items())
    # The mean of three sets of weights gives the second, which is a step of Adam away from the first.
    moves = [(3 * mean[name] - before[name] - last[name] - before[name]).abs().max().item() for name in before]
    assert 0 < max(moves) < 1.05 * ablations.PEAK
    assert torch.equal(ablations.fine_tuned(start, lambda share: None)[0].adapter, tuned.adapter), "not reproducible"


def test_rows_of_both_tables(short: None) -> None:
    quiet = lambda what, share: None  # noqa: E731
    result = ablations.variants(2, quiet)
    assert [row["weights"] for row in result["rows"]] == ["as published", "weights averaged", "fine-tuned on sums"]
    assert all(row["recurrences in a row, static over sampler"] > 0 for row in result["rows"])
    assert (result["steps"], result["seed"]) == (2, ablations.SEED) and result["processor"]
    rows = ablations.robustness(2, quiet)["rows"]
    assert [row["sampler"] for row in rows] == ["defaults", "noise 0.5"] and len(rows[0]) == 5


def test_recurrences_in_a_row_are_those_of_each_prompt_alone() -> None:
    model: Any = models.load(ablations.BASE)
    task = make_task("sums", 2)._replace(limit=8)
    waited = 0
    for prompt in task.prompts:
        stats = ablations.decoding.generate(model, prompt, "recurrent_diffusion", max_new_tokens=8).stats
        waited += stats.recurrences
    assert ablations._scored(model, task, "recurrent_diffusion")[2] == waited
    static = ablations._scored(model, task, "recurrent_static")
    assert static[1] == 1 and static[2] == 16 * model.config.mean_recurrence


def test_every_schedule_has_rows() -> None:
    options, noise = (text.partition("=")[2].split(",") for text in ablations.SCHEDULES)
    assert set(options) == set(get_args(Schedule)) and len(noise) > 1


@pytest.mark.parametrize(
    ("first", "second", "expected"), [([1, 2, 3], [3, 2, 9, 9], 4 / 7), ([1], [], 0.0), ([5], [5], 1.0)]
)
def test_unigrams_in_common(first: list[int], second: list[int], expected: float) -> None:
    assert runs.rouge_1(first, second) == runs.rouge_1(second, first) == pytest.approx(expected)
