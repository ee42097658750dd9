"""The seven decoding strategies of planned diffusion beside each other, on orders.

`tiny-planned` writes planned diffusion, dense and sparse. The baselines are `tiny-planned` after the same number of further steps on
the same orders in another form: token by token (plain answers, and skeletons and their points, since a model of this size follows no
prompt that it was not trained on), by diffusion (plain answers), and plans whose chunks are written token by token (Pasta-SFT).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bench.papers.runs import Progress
from pdkernels import decoding, masks, models
from pdkernels.evaluation.machine import processor
from pdkernels.evaluation.planned import KINDS, held_out_orders
from pdkernels.training import (
    Orders,
    PlanItem,
    PlannedBatch,
    PlannedSample,
    draw_chunk_masks,
    draw_masks,
    lay_out,
    orders,
    pack_pasta,
    pack_planned,
    planned_loss,
)
from pdkernels.training.lists import PICK, PICKED

STEPS, TOKENS, RATE, WARMUP = 500, 1200, 1e-3, 20
MAX_PADS = 4
CANVAS = 144
"""New tokens of a canvas: the longest answer has 134, and an end token."""
SKELETON, POINT = "{question}", "{question}{skeleton}\n{index}.{point}:"
"""Prompts for skeletons, which begin with "1.", and for their points: the model is trained on them instead of told what to do."""


def skeleton_of(problem: Orders) -> str:
    topics = [topic for items in problem.rounds for topic, _ in items]
    return "".join(f"{index}.{topic}\n" for index, topic in enumerate(topics, 1))


def samples(form: str, problem: Orders) -> Iterator[PlannedSample]:
    """The texts that a baseline is trained on, of one problem."""
    question, answers = problem.prompt, [item for items in problem.rounds for item in items]
    if form == "pasta":
        rounds = [
            [PlanItem(list(topic.encode()), list(text.encode())) for topic, text in items] for items in problem.rounds
        ]
        yield PlannedSample(list(question.encode()), rounds)
    else:
        yield PlannedSample(list(question.encode()), (), list(problem.text.encode()))
    if form == "autoregressive":
        skeleton = skeleton_of(problem)
        asked = SKELETON.format(question=question) + "1."
        yield PlannedSample(list(asked.encode()), (), list(skeleton.removeprefix("1.").encode()))
        for index, (topic, text) in enumerate(answers, 1):
            asked = POINT.format(question=question, skeleton=skeleton, index=index, point=topic)
            yield PlannedSample(list(asked.encode()), (), list(text.removeprefix(f"{topic}:").encode()))


def batches(form: str, model: Any, steps: int) -> Iterator[Any]:
    """A batch for each step, of about `TOKENS` tokens."""
    for step in range(steps):
        generator, layouts, used = torch.Generator().manual_seed(step), [], 0
        for problem in orders(step, items=(2, 4), picks=0.6):
            for sample in samples(form, problem):
                layouts.append(
                    lay_out(sample, model.plan_tokens, model.end_tokens[0], max_pads=MAX_PADS, generator=generator)
                )
                used += max(len(layouts[-1].tokens), CANVAS if form == "diffusion" else 0)
            if used >= TOKENS:
                break
        if form == "diffusion":
            yield canvases(layouts, model, generator)
        elif form == "pasta":
            yield pack_pasta(layouts, model.plan_tokens)
        else:
            noisy = [draw_chunk_masks(layout, generator) for layout in layouts]
            yield pack_planned(noisy, model.plan_tokens, model.mask_token)


def canvases(layouts: list[Any], model: Any, generator: torch.Generator) -> PlannedBatch:
    """Plain answers on canvases that end tokens fill up, noisy as in equation 3."""
    tokens, hidden, weights = [], [], []
    for layout in layouts:
        ids = layout.tokens
        ids = torch.cat([ids, ids.new_full((layout.prompt_len + CANVAS - len(ids),), model.end_tokens[0])])
        masked, share = draw_masks(len(ids), generator, frozen_prefix=layout.prompt_len)
        tokens.append(ids)
        hidden.append(masked)
        weights.append(torch.full((len(ids),), 1 / share))
    ids, masked = torch.cat(tokens), torch.cat(hidden)
    mask = masks.pack([masks.full(len(own)) for own in tokens])
    rows, none = masked.nonzero()[:, 0], torch.empty(0, dtype=torch.int64)
    normaliser = torch.tensor(float(CANVAS * len(layouts)))
    noisy = ids.masked_fill(masked, model.mask_token)
    own = rows, ids[rows], torch.cat(weights)[rows]
    return PlannedBatch(noisy, mask.positions, mask, none, none, none.float(), *own, normaliser)


def trained(form: str, progress: Progress, steps: int | None = None) -> Any:
    """The baseline, with what its decoding needs: no plans but for Pasta, canvases for diffusion. `steps`: None is `STEPS`."""
    loaded: Any = models.load("tiny-planned")
    steps = STEPS if steps is None else steps
    config = loaded.config
    if form == "diffusion":
        config = replace(config, attention="bidirectional", predicts="own")
    names = {name: getattr(loaded, name) for name in ("tokenizer", "end_tokens", "mask_token", "plan_tokens")}
    model = models.Transformer(config, **names)
    model.load_state_dict(loaded.state_dict())
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    smooth = 0.0
    for step, batch in enumerate(batches(form, model, steps)):
        done = step / steps
        rate = RATE * min(1.0, (step + 1) / WARMUP) * (0.495 * (1 + math.cos(math.pi * done)) + 0.01)
        optimizer.param_groups[0]["lr"] = rate
        hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan(64, 64))[0]
        loss = planned_loss(model.logits(hidden[batch.ar_rows]), model.logits(hidden[batch.masked_rows]), batch).total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        progress(f"{form}, loss {smooth:.3f}", done)
    if form != "pasta":
        model.plan_tokens = None
    return model.requires_grad_(False)


class Answer(NamedTuple):
    """What a strategy wrote for a prompt."""

    text: str
    path: int
    """Forwards that waited for each other."""
    tokens: int
    """New ones, with control tokens and filler."""


Strategy = Callable[[str, dict[str, Any]], Answer]
SAMPLING: dict[str, Any] = {"temperature": 0.2, "top_p": 0.95}
"""The paper's."""
LIMIT = 320
"""New tokens of a text with plans."""
PUBLISHED = {
    "token by token": (6.272, 50.00),
    "diffusion": (154.124, 52.59),
    "Fast-dLLM": (77.723, 40.20),
    "Pasta-SFT": (5.740, 26.13),
    "Skeleton-of-Thought": (3.101, 40.72),
    "planned": (4.934, 49.17),
    "planned, sparse": (3.471, 44.59),
}
"""Table 1: seconds and length-controlled win rate. What it calls PD is sparse, as section 5 says."""


def strategies(trained_models: dict[str, Any]) -> dict[str, Strategy]:
    """The seven of section 5, with the options that it names, and planned diffusion with the threshold of section 6."""
    planner: Any = models.load("tiny-planned")

    def plain(form: str, method: str, **own: Any) -> Strategy:
        def run(prompt: str, sampling: dict[str, Any]) -> Answer:
            given = {"max_new_tokens": CANVAS, **own, **sampling}
            found: Any = decoding.generate(trained_models[form], prompt, decoding.find(method), **given)
            return Answer(found.text, found.stats.forwards, found.stats.tokens)

        return run

    def chunks(model: Any, **own: Any) -> Strategy:
        def run(prompt: str, sampling: dict[str, Any]) -> Answer:
            given = {"max_new_tokens": LIMIT, "joiner": "", **own, **sampling}
            found: Any = decoding.generate(model, prompt, "planned", **given)
            return Answer(found.text, found.stats.plans[0].critical_path, found.stats.tokens)

        return run

    def skeleton(prompt: str, sampling: dict[str, Any]) -> Answer:
        templates: dict[str, Any] = {
            "skeleton_template": SKELETON,
            "point_template": POINT,
            "piece": "{point}:{expansion}",
            "joiner": "",
        }
        found = decoding.skeleton_of_thought(trained_models["autoregressive"], prompt, **templates, **sampling)
        tokens = sum(stats.tokens for stats in found.stats if stats is not None)
        return Answer(found.text, found.critical_path, tokens)

    half: dict[str, Any] = {"algorithm": "confidence_threshold", "threshold": 0.9, "steps": CANVAS // 2}
    return {
        "token by token": plain("autoregressive", "autoregressive"),
        "diffusion": plain("diffusion", "dream", steps=CANVAS),
        "Fast-dLLM": plain("diffusion", "dream", **half),
        "Pasta-SFT": chunks(trained_models["pasta"], chunks="autoregressive"),
        "Skeleton-of-Thought": skeleton,
        "planned": chunks(planner),
        "planned, sparse": chunks(planner, sparse=True),
        "planned, threshold 0.9": chunks(planner, threshold=0.9),
        "planned, sparse, threshold 0.9": chunks(planner, sparse=True, threshold=0.9),
    }


FORMS = ("autoregressive", "diffusion", "pasta")


def _within(progress: Progress, start: float) -> Progress:
    return lambda what, share: progress(what, start + 0.2 * share)


def run(problems: int, progress: Progress) -> dict[str, Any]:
    """Trains the baselines, then measures all strategies."""
    made, took = {}, {}
    for number, form in enumerate(FORMS):
        part, started = 0.2 * number, time.process_time()
        made[form] = trained(form, _within(progress, part))
        took[form] = time.process_time() - started
    return measured(made, took, problems, progress)


def measured(
    trained_models: dict[str, Any], took: dict[str, float], problems: int, progress: Progress
) -> dict[str, Any]:
    """Every strategy on every prompt, one after the other, in an order that rotates. Times are those of the process on the CPU, so
    that other work on the machine does not count; `took` are those of the trainings."""
    known, prompts = strategies(trained_models), held_out_orders(problems)
    right = {name: {kind: [0, 0] for kind in KINDS} for name in known}
    seconds: dict[str, list[float]] = {name: [] for name in known}
    answers: dict[str, list[Answer]] = {name: [] for name in known}
    names = list(known)
    for name in names:
        known[name](prompts[0].prompt, {})  # what is compiled or allocated once
    for number, problem in enumerate(prompts):
        sampling = {**SAMPLING, "seed": number}
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            progress(name, 0.6 + 0.4 * number / len(prompts))
            started = time.process_time()
            answer = known[name](problem.prompt, sampling)
            seconds[name].append(time.process_time() - started)
            answers[name].append(answer)
            for order, solved in problem.right(answer.text).items():
                kind = KINDS[1 if order == PICK else 2 if order[0] == PICKED else 0]
                right[name][kind][0] += solved
                right[name][kind][1] += 1
    orders_of = sum(count for _, count in right[names[0]].values())
    rows = []
    for name in names:
        paths = [answer.path for answer in answers[name]]
        ratios = [first / own for first, own in zip(seconds[names[0]], seconds[name])]
        low, middle, high = (quantile(ratios, share) for share in (0.1, 0.5, 0.9))
        base, (published, win) = PUBLISHED[names[0]][0], PUBLISHED.get(name, (None, None))
        rows.append(
            {
                "": name,
                "right": sum(good for good, _ in right[name].values()),
                **{kind: "{} of {}".format(*right[name][kind]) for kind in KINDS},
                "critical path": round(sum(paths) / len(paths), 1),
                "tokens": round(sum(answer.tokens for answer in answers[name]) / len(paths), 1),
                "ms": round(1e3 * sum(seconds[name]) / len(paths), 1),
                "speed ratio, mean": round(sum(ratios) / len(ratios), 2),
                "10 %, median, 90 %": f"{low:.2f}, {middle:.2f}, {high:.2f}",
                "in the paper: ratio of seconds": None if published is None else round(base / published, 2),
                "win rate": None if win is None else f"{win:.1f}%",
            }
        )
    return {
        "model": "tiny-planned, and trained on from it",
        "steps": STEPS,
        "tokens of a step": TOKENS,
        "seconds of training": ", ".join(f"{form} {seconds:.0f}" for form, seconds in took.items()),
        "seeds": f"the step, and 0 to {len(prompts) - 1}",
        "temperature": SAMPLING["temperature"],
        "top_p": SAMPLING["top_p"],
        "threads": torch.get_num_threads(),
        "device": processor(),
        "prompts": len(prompts),
        "problems": orders_of,
        "rows": rows,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([0.0, 10.0], 0.9)
    (2.0, 9.0)
    """
    return float(torch.tensor(list(values), dtype=torch.float64).quantile(share))
