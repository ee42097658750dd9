"""The baselines of planned diffusion: what they are trained on, and that all strategies are measured on the same prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.papers import planned_baselines, tables
from pdkernels import models
from pdkernels.evaluation import held_out_orders
from pdkernels.training import Orders, orders


def texts(form: str, problem: Orders) -> list[tuple[str, str]]:
    """Prompts and answers, for forms without plans."""
    found = planned_baselines.samples(form, problem)
    return [(bytes(one.prompt).decode(), bytes(one.tail).decode()) for one in found]


PROBLEM = Orders("*p;4r;px;\n", ((("4r", "4r:iv v;"), ("*p", "*p:3;")), (("px", "px:3 6;"),)))


def test_what_the_baselines_read() -> None:
    plain, skeleton, *points = texts("autoregressive", PROBLEM)
    assert plain == ("*p;4r;px;\n", "4r:iv v;*p:3;px:3 6;") == texts("diffusion", PROBLEM)[0]
    assert skeleton == ("*p;4r;px;\n1.", "4r\n2.*p\n3.px\n")
    assert points == [
        ("*p;4r;px;\n1.4r\n2.*p\n3.px\n\n1.4r:", "iv v;"),
        ("*p;4r;px;\n1.4r\n2.*p\n3.px\n\n2.*p:", "3;"),
        ("*p;4r;px;\n1.4r\n2.*p\n3.px\n\n3.px:", "3 6;"),
    ]
    (pasta,) = planned_baselines.samples("pasta", PROBLEM)
    assert [[bytes(item.content).decode() for item in items] for items in pasta.rounds] == [
        ["4r:iv v;", "*p:3;"],
        ["px:3 6;"],
    ]


def test_canvases_hold_every_answer_and_its_end() -> None:
    longest = max(len(next(orders(seed, items=(2, 4), picks=0.6)).text) for seed in range(300))
    held_out = max(len(problem.text) for problem in held_out_orders(60))
    assert max(longest, held_out) < planned_baselines.CANVAS
    model: Any = models.load("tiny-planned")
    (batch,) = planned_baselines.batches("diffusion", model, 1)
    rows = batch.masked_rows
    assert bool((batch.tokens[rows] == model.mask_token).all()) and batch.ar_rows.numel() == 0
    assert not bool((batch.masked_labels == model.mask_token).any()) and bool((batch.masked_weights >= 1).all())
    # A prompt is never masked, and its canvas follows it.
    starts = (batch.positions == 0).nonzero()[:, 0].tolist()
    for start, end in zip(starts, [*starts[1:], len(batch.tokens)]):
        prompt = batch.tokens[start : end - planned_baselines.CANVAS].tolist()
        assert prompt[-1] == ord("\n") and model.mask_token not in prompt


def test_all_strategies_answer_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With baselines that have hardly been trained: rows, counts and ratios."""
    monkeypatch.setattr(planned_baselines, "STEPS", 1)
    monkeypatch.setattr(planned_baselines, "TOKENS", 100)
    shares: list[float] = []
    found = planned_baselines.run(1, lambda what, share: shares.append(share))
    assert shares == sorted(shares) and 0 <= shares[0] and shares[-1] <= 1
    names = [row[""] for row in found["rows"]]
    assert names[:7] == list(planned_baselines.PUBLISHED) and all("threshold" in name for name in names[7:])
    rows = {row[""]: row for row in found["rows"]}
    assert rows["diffusion"]["critical path"] == planned_baselines.CANVAS == rows["diffusion"]["tokens"]
    assert rows["Fast-dLLM"]["critical path"] <= planned_baselines.CANVAS // 2
    assert rows["token by token"]["speed ratio, mean"] == 1.0
    assert (
        rows["planned, sparse"]["right"] == found["problems"] == sum(len(one.right("")) for one in held_out_orders(1))
    )
    assert rows["planned, sparse"]["in the paper: ratio of seconds"] == 1.81
    assert rows["planned"]["in the paper: ratio of seconds"] == 1.27
    assert tables.as_table(found).count("\n") == 1 + len(rows)


def test_steps_are_reproducible() -> None:
    losses: list[list[str]] = []
    for _ in range(2):
        losses.append([])
        planned_baselines.trained("pasta", lambda what, share: losses[-1].append(what), 2)
    assert losses[0] == losses[1] and len(losses[0]) == 2
    with torch.no_grad():
        assert planned_baselines.quantile([4.0, 1.0], 0.1) == pytest.approx(1.3)
