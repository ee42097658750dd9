"""Tables of the recurrent-depth paper on other weights and schedules: variants of a model, ablations on one of them, schedules of noise."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.papers.runs import CHAINS, DEEP, Progress, swept
from pdkernels import decoding, models
from pdkernels.evaluation.machine import processor
from pdkernels.evaluation.tasks import Task, make_task

# ---- schedules of noise

SCHEDULES = ["recurrent_diffusion.schedule=linear,root,harmonic,constant", "recurrent_diffusion.noise=0.3,0.5"]


def schedules(problems: int, progress: Progress) -> dict[str, Any]:
    """Each schedule with some levels of noise."""
    return swept(DEEP, "recurrent", SCHEDULES, problems, progress, CHAINS)


# ---- variants of a model

BASE, SEED, BACKWARD = "tiny-recurrent", 400, 4
STEPS, ROWS, CONTEXT, PEAK = 80, 8, 160, 5e-4
WARMUP, DECAY, AVERAGED = 0.1, 0.3, 20
"""Shares of the steps in which the rate rises and falls, and steps between the weights that are averaged."""


def rate(step: int, steps: int) -> float:
    """A trapezoid: up, level, down (appendix A.3).

    >>> [rate(step, 20) for step in (0, 1, 10, 19)]
    [0.5, 1.0, 1.0, 0.16666666666666666]
    """
    return min(1.0, (step + 1) / (WARMUP * steps), (steps - step) / (DECAY * steps))


def rows_of_sums(problems: Any, rows: int, context: int, end: int) -> tuple[Tensor, Tensor]:
    """``(rows, context + 1)`` ids of sums one after the other, and which of the ids from 1 on belong to answers."""
    ids, answers = [], []
    for _ in range(rows):
        text: list[int] = []
        counted: list[bool] = []
        while len(text) <= context:
            one = next(problems)
            prompt, answer = one.prompt.encode(), one.steps.encode()
            text += [*prompt, *answer, end]
            counted += [False] * len(prompt) + [True] * (len(answer) + 1)
        ids.append(text[: context + 1])
        answers.append(counted[1 : context + 1])
    return torch.tensor(ids), torch.tensor(answers)


def fine_tuned(start: Any, report: Callable[[float], None]) -> tuple[Any, Any]:
    """The model after the paper's recipe on sums alone, and the mean of its weights along the way, the first ones included.

    Randomised unrolling with an exponential number of recurrences, as many on average as the model was trained with, and a trapezoidal
    learning rate (appendix A.3).
    """
    from pdkernels.training import arithmetic, draw_recurrences, unrolled_logits

    model = copy.deepcopy(start).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0)
    generator, sums = torch.Generator().manual_seed(SEED), arithmetic(SEED)
    kept = [copy.deepcopy(start.state_dict())]
    for step in range(STEPS):
        report(step / STEPS)
        ids, answers = rows_of_sums(sums, ROWS, CONTEXT, model.end_tokens[0])
        count = draw_recurrences(model.config.mean_recurrence, generator, law="exponential")
        logits = unrolled_logits(model, ids[:, :-1], count, generator, backward_recurrences=BACKWARD)
        loss = F.cross_entropy(logits[answers], ids[:, 1:][answers])
        optimizer.param_groups[0]["lr"] = PEAK * rate(step, STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % AVERAGED == 0:
            kept.append(copy.deepcopy(model.state_dict()))
    averaged = copy.deepcopy(start)
    averaged.load_state_dict({name: torch.stack([one[name] for one in kept]).mean(0) for name in kept[0]})
    return model.requires_grad_(False), averaged.requires_grad_(False)


@cache
def _trained() -> tuple[dict[str, Any], float]:
    """The variants, and the seconds of the training, which a process runs once."""
    start: Any = models.load(BASE)
    began = time.perf_counter()
    tuned, averaged = fine_tuned(start, lambda share: None)
    return {
        "as published": start,
        "weights averaged": averaged,
        "fine-tuned on sums": tuned,
    }, time.perf_counter() - began


def _scored(model: Any, task: Task, method: str, **options: Any) -> tuple[int, float, float]:
    """Right answers, tokens per forward, and recurrences that waited for each other, of all prompts together."""
    found = decoding.generate(model, task.prompts, decoding.find(method), max_new_tokens=task.limit, **options)
    pairs = zip(task.problems or (), found.text or (), strict=True)
    depth = model.config.mean_recurrence
    if method == "recurrent_static":
        waited = depth * sum(map(len, found.tokens))
    else:
        inner = options.get("inner_recurrence", decoding.default_option(method, "inner_recurrence"))
        waited = sum(depth + inner * len(steps) for steps in found.stats.accepted)
    return sum(problem.is_solved_by(text) for problem, text in pairs), found.stats.tokens_per_forward, waited


def _facts(seconds: float, problems: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": BASE,
        "task": "sums",
        "problems": problems,
        "steps": STEPS,
        "seed": SEED,
        "seconds of training": round(seconds),
        "processor": processor(),
        "rows": rows,
    }


def variants(problems: int, progress: Progress) -> dict[str, Any]:
    """Static decoding and the sampler with its defaults, on three sets of weights."""
    progress("training", 0.0)
    trained, seconds = _trained()
    task, rows = make_task("sums", problems), []
    for number, (name, model) in enumerate(trained.items()):
        progress(name, 0.4 + 0.2 * number)
        static, _, waited = _scored(model, task, "recurrent_static")
        right, tokens, own = _scored(model, task, "recurrent_diffusion")
        rows.append(
            {
                "weights": name,
                "static, right": share(static, problems),
                "sampler, right": share(right, problems),
                "difference": right - static,
                "sampler, tokens per forward": round(tokens, 3),
                "recurrences in a row, static over sampler": round(waited / own, 2),
            }
        )
    return _facts(seconds, problems, rows)


def share(right: int, problems: int) -> str:
    """Right answers in per cent.

    >>> share(3, 4)
    '75%'
    """
    return f"{right / problems:.0%}"


SETTINGS: dict[str, tuple[Any, ...]] = {
    "inner_recurrence": (2, 8),
    "threshold": (0.1, 0.3),
    "momentum": (0.0, 0.5),
    "noise": (0.2, 0.5),
}
"""Options that are changed one at a time."""


def robustness(problems: int, progress: Progress) -> dict[str, Any]:
    """Options of the sampler, on the published weights and on those that were trained further."""
    progress("training", 0.0)
    trained, seconds = _trained()
    task, rows = make_task("sums", problems), []
    settings = [("defaults", {}), *((f"{name} {v}", {name: v}) for name, values in SETTINGS.items() for v in values)]
    for number, (name, options) in enumerate(settings):
        progress(name, 0.3 + 0.7 * number / len(settings))
        row: dict[str, Any] = {"sampler": name}
        for weights in ("as published", "fine-tuned on sums"):
            right, tokens, _ = _scored(trained[weights], task, "recurrent_diffusion", **options)
            row[f"{weights}, right"] = share(right, problems)
            row[f"{weights}, tokens per forward"] = round(tokens, 3)
        rows.append(row)
    return _facts(seconds, problems, rows)
