"""The ablations of training: what each row trains on, that rows are shared, and that trainings differ only in what they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.papers import nemotron_ablations as ablations
from bench.papers import plot_losses, tables
from bench.papers.nemotron_ablations import Recipe
from pdkernels.training import DualStreamBatch


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DualStreamBatch, Recipe]]:
    """Trainings of two steps, with the batches of their steps."""
    make_task, losses, seen = ablations.make_task, ablations.losses, []
    monkeypatch.setattr(ablations, "make_task", lambda *given: make_task(*given)._replace(limit=8))
    for name, value in {"STEPS": 4, "TUNED_STEPS": 2, "CURVE": 2, "HELD_OUT": 8, "RANKS": 3}.items():
        monkeypatch.setattr(ablations, name, value)
    for name in ("_bases", "_trained"):
        monkeypatch.setattr(ablations, name, {})

    def watched(model: Any, batch: DualStreamBatch, recipe: Recipe) -> Any:
        if torch.is_grad_enabled():
            seen.append((batch, recipe))
        return losses(model, batch, recipe)

    monkeypatch.setattr(ablations, "losses", watched)
    return seen


def ratios(batch: DualStreamBatch) -> list[float]:
    """1 / p_mask of the texts that have masks."""
    return [float(batch.masked_weights[batch.masked_samples == n].unique()) for n in batch.masked_samples.unique()]


def test_recipes_differ_in_what_they_name(small: list[tuple[DualStreamBatch, Recipe]]) -> None:
    kinds = {name: Recipe(noise=name) for name in ("step", "rank", "sequence")}  # type: ignore[arg-type]
    for recipe in kinds.values():
        ablations.base(recipe, lambda done: None)
    firsts = {recipe.noise: batch for batch, recipe in reversed(small)}
    levels = {name: len(set(ratios(batch))) for name, batch in firsts.items()}
    texts = ablations.RANKS * ablations.TEXTS
    assert levels["step"] == 1 and 1 < levels["rank"] <= ablations.RANKS < levels["sequence"] <= texts
    assert {batch.samples for batch in firsts.values()} == {texts}
    # The texts are the same, and each is whole: prompts are labels and may be masked.
    assert torch.equal(firsts["step"].ar_labels, firsts["rank"].ar_labels)
    assert torch.equal(firsts["step"].ar_labels, firsts["sequence"].ar_labels)
    assert len(small) == 3 * ablations.STEPS


def test_the_tables_share_their_trainings(small: list[tuple[DualStreamBatch, Recipe]]) -> None:
    told: list[float] = []
    found = {
        name: tables.find("nemotron", name)[0].run(1, lambda what, share: told.append(share))  # type: ignore[misc]
        for name in ("techniques", "alpha", "preserved")
    }
    every = [*ablations.TECHNIQUES.values(), *ablations.ALPHAS.values(), *ablations.PRESERVED.values()]
    bases, tuned = {one._replace(tuned=False) for one in every}, {one for one in every if one.tuned}
    assert len(small) == len(bases) * ablations.STEPS + len(tuned) * ablations.TUNED_STEPS
    assert all(0 <= share <= 1 for share in told)

    assert [row[""] for row in found["techniques"]["rows"]] == list(ablations.TECHNIQUES)
    assert len(found["alpha"]["rows"]) == 2 * len(ablations.ALPHAS)
    curves = found["alpha"]["curves"]
    assert list(curves) == [name for name, recipe in ablations.ALPHAS.items() if recipe.seed == 0]
    assert all(len(curve) == 2 for curve in curves.values())
    for name, curve in curves.items():
        # Without the autoregressive loss the clean stream sees its labels, and there is no such loss to show.
        assert ("autoregressive" in curve[0]) == (name != "no autoregressive loss") and curve[0]["masked"] > 0
    assert "curves" not in tables.page("<!-- figure: nemotron alpha -->\n<!-- /figure -->", tables.Path("nowhere"))


def test_what_is_not_weighed_is_not_learned(small: list[tuple[DualStreamBatch, Recipe]]) -> None:
    """After the same steps the mask's vector has moved where a masked loss was trained, and only decayed where it was not."""
    start = ablations.with_mask("tiny-code").embedding.detach()[-1]
    alone, joint = (ablations.base(Recipe(alpha), lambda done: None).weights["embedding"][-1] for alpha in (0.0, 0.3))
    assert (joint - start).abs().max() > 3 * (alone - start).abs().max()


def test_tuning_asks_for_answers_alone(small: list[tuple[DualStreamBatch, Recipe]]) -> None:
    ablations.trained(Recipe(tuned=True), 1, lambda done: None)
    tuned = small[ablations.STEPS :]
    assert len(tuned) == ablations.TUNED_STEPS
    for batch, _ in tuned:
        for number in range(batch.samples):
            answer = bytes(batch.ar_labels[batch.ar_samples == number].clamp(max=255).tolist())
            assert b"?" not in answer and b"answer" in answer


def test_the_rate_warms_up_stays_and_falls() -> None:
    rates = [ablations.rate(step, 200, False) for step in range(201)]
    assert rates[0] == pytest.approx(ablations.RATE / 20) and set(rates[20:161]) == {ablations.RATE}
    assert rates[200] == pytest.approx(0.3 * ablations.RATE) and rates[180] == pytest.approx(0.65 * ablations.RATE)
    tuned = [ablations.rate(step, 200, True) for step in (100, 200)]
    assert tuned == pytest.approx([2.5e-6 / 1e-5 * ablations.RATE, 2.5e-7 / 1e-5 * ablations.RATE])


def test_the_losses_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    curves = {
        "0.3": [{"step": 20, "autoregressive": 0.1, "masked": 2.0}],
        "no autoregressive loss": [{"step": 20, "masked": 1}],
    }
    plot_losses({"curves": curves}, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 5000
