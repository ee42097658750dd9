"""The seven decoding strategies of planned diffusion beside each other, on orders.

`tiny-planned` writes planned diffusion, dense and sparse. The baselines are `tiny-planned` after the same number of further steps on
the same orders in another form: plain answers token by token, plain answers by diffusion, plans whose chunks are written token by
token (Pasta-SFT), and skeletons whose points are written apart (Skeleton-of-Thought).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F

from bench.papers.runs import Progress
from pdkernels import masks, models
from pdkernels.training import (
    Orders,
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
from pdkernels.training.planned import PlanItem

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
        rounds = [[PlanItem(list(topic.encode()), list(text.encode())) for topic, text in items] for items in problem.rounds]
        yield PlannedSample(list(question.encode()), rounds)
    elif form == "skeleton":
        skeleton = skeleton_of(problem)
        asked = SKELETON.format(question=question) + "1."
        yield PlannedSample(list(asked.encode()), (), list(skeleton.removeprefix("1.").encode()))
        for index, (topic, text) in enumerate(answers, 1):
            asked = POINT.format(question=question, skeleton=skeleton, index=index, point=topic)
            yield PlannedSample(list(asked.encode()), (), list(text.removeprefix(f"{topic}:").encode()))
    else:
        yield PlannedSample(list(question.encode()), (), list(problem.text.encode()))


def batches(form: str, model: Any, steps: int) -> Iterator[Any]:
    """A batch for each step, of about `TOKENS` tokens."""
    for step in range(steps):
        generator, layouts, used = torch.Generator().manual_seed(step), [], 0
        for problem in orders(step, items=(2, 4), picks=0.6):
            for sample in samples(form, problem):
                layouts.append(lay_out(sample, model.plan_tokens, model.end_tokens[0], max_pads=MAX_PADS, generator=generator))
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


def trained(form: str, progress: Progress, steps: int = STEPS, start: str = "tiny-planned") -> Any:
    """The baseline, with what its decoding needs: no plans but for Pasta, canvases for diffusion."""
    loaded: Any = models.load(start)
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
