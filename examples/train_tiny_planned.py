"""Train `tiny-planned`: a byte-level model that plans its answer, then fills in the parts side by side.

    python examples/train_tiny_planned.py

takes about half an hour on one CPU core and writes tiny-planned.safetensors into the current folder.

The model starts from `tiny-trimode`, which knows causal rows and masks. It learns to answer orders (`pdkernels.training.orders`): to
list them in a plan, in any sequence, and to write the list that belongs to each chunk, knowing from the plan alone which one that is.
Lists of a digit that the answer itself picks need their own round.

Prompts have one or two orders at first and up to six in the end. Batches alternate between chunks that see each other and chunks that
do not, so that the same weights decode both ways. In each text one round is noisy, half of the time masked as a whole, and the
others are clean.

`--tags-removed` trains the autoregressive model of the same answers to compare with, `--ablate topic` a model whose plans name no
topics, `--ablate sync` one that does everything in a single round.

Source: Planned Diffusion, section 4 and equation 10; the ablations: section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
import typer
from torch import Tensor
from training_run import Output, Resume, Run, Score, save, start_model

from pdkernels.evaluation import held_out_orders, score_orders
from pdkernels.models import ByteTokenizer, PlanTokens, Transformer
from pdkernels.training import (
    NoisyPlan,
    Orders,
    PlanItem,
    PlannedBatch,
    PlannedSample,
    draw_chunk_masks,
    lay_out,
    orders,
    pack_planned,
    planned_loss,
    plans,
)

Ablation: TypeAlias = Literal["none", "topic", "sync"]
Past: TypeAlias = Literal["noisy", "clean", "clean_plans"]

END_TOKEN, MASK_TOKEN = ByteTokenizer.end_token, ByteTokenizer.vocab_size
UNIT = 8
"""Chunks of 8 n tokens begin 8 n + 2 apart: how far one is from its plan, modulo 8, says which one it is."""
PLAN_TOKENS = PlanTokens(*range(MASK_TOKEN + 1, MASK_TOKEN + 7), digits=range(ord("0"), ord("9") + 1), unit=UNIT)
MAX_PADS = 4
MIN_MASKED = 0.3
ALL_MASKED = 0.5
"""Share of the texts whose round is masked as a whole, as it is when its first tokens are filled in."""
TILE = 64


def with_plan_tokens(model: Transformer) -> Transformer:
    """The same model, without its adapter, with six more ids, which start near the mean of the others."""
    config = replace(model.config, vocab_size=MASK_TOKEN + 7)
    names = {"tokenizer": model.tokenizer, "end_tokens": model.end_tokens, "mask_token": MASK_TOKEN}
    wider = Transformer(config, **names, plan_tokens=PLAN_TOKENS)
    state = {name: tensor for name, tensor in model.state_dict().items() if "adapter" not in name}
    known = state["embedding"]
    if len(known) < config.vocab_size:
        new = known.mean(0) + known.std(0) * torch.randn(config.vocab_size - len(known), known.shape[1]) / 2
        state["embedding"] = torch.cat([known, new])
    wider.load_state_dict(state)
    return wider


# ---- batches


def sample_of(problem: Orders, *, tags_removed: bool = False, ablate: Ablation = "none") -> PlannedSample:
    prompt = list(problem.prompt.encode())
    if tags_removed:
        return PlannedSample(prompt, (), list(problem.text.encode()))
    rounds = tuple(
        tuple(PlanItem(list(topic.encode()), list(content.encode())) for topic, content in items)
        for items in problem.rounds
    )
    if ablate == "topic":
        rounds = plans.without_topics(rounds, [ord("_")])
    elif ablate == "sync":
        rounds = plans.without_syncs(rounds)
    return PlannedSample(prompt, rounds)


def hardness(progress: float) -> dict[str, object]:
    """The orders of a step: one or two at first, then up to four, then more and more that have to wait."""
    if progress < 0.1:
        return {"items": (1, 2), "picks": 0.0}
    if progress < 0.2:
        return {"items": (1, 3), "picks": 0.2}
    return {"items": (2, 4), "picks": 0.5 if progress < 0.7 else 0.8}


def batch_of(
    step: int,
    progress: float,
    tokens: int,
    seed: int,
    *,
    tags_removed: bool = False,
    ablate: Ablation = "none",
    attention: str = "both",
    past: Past = "noisy",
) -> PlannedBatch:
    """A batch of at least `tokens` tokens, the same for every step, seed and progress."""
    number = seed * 1_000_003 + step
    generator = torch.Generator().manual_seed(number)
    sparse = step % 2 == 0 if attention == "both" else attention == "sparse"
    noisy: list[NoisyPlan] = []
    used = 0
    for problem in orders(number, **hardness(progress)):
        sample = sample_of(problem, tags_removed=tags_removed, ablate=ablate)
        layout = lay_out(sample, PLAN_TOKENS, END_TOKEN, max_pads=MAX_PADS, generator=generator)
        min_p_mask = 1.0 if torch.rand((), generator=generator) < ALL_MASKED else MIN_MASKED
        noisy.append(draw_chunk_masks(layout, generator, noise="one", min_p_mask=min_p_mask))
        used += len(layout.tokens)
        if used >= tokens:
            break
    return pack_planned(noisy, PLAN_TOKENS, MASK_TOKEN, sparse=sparse, past=past)


def step_loss(model: Transformer, batch: PlannedBatch, plan_weight: float) -> tuple[Tensor, dict[str, float]]:
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan(TILE, TILE))[0]
    loss = planned_loss(model.logits(hidden[batch.ar_rows]), model.logits(hidden[batch.masked_rows]), batch)
    return plan_weight * loss.autoregressive + loss.masked, {
        "plans": loss.autoregressive.item(),
        "chunks": loss.masked.item(),
    }


# ---- scores


def look(model: Transformer, problems: int, advance: Callable[[int], None] = lambda count: None, **options: Any) -> str:
    """How many of the orders in held-out prompts are right."""
    return str(score_orders(model, held_out_orders(problems), batch_size=8, advance=advance, **options))


def main(
    output: Output = Path("tiny-planned.safetensors"),
    start: Annotated[str, typer.Option(help="Name, folder or file of the model to start from.")] = "tiny-trimode",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3000,
    tokens: Annotated[int, typer.Option(help="Tokens of a batch, copies apart.")] = 1500,
    attention: Annotated[str, typer.Option(help="Chunks of a batch see each other: dense, sparse, or both.")] = "both",
    tags_removed: Annotated[bool, typer.Option("--tags-removed", help="Train the autoregressive baseline.")] = False,
    ablate: Annotated[str, typer.Option(help="What plans lack: none, topic or sync.")] = "none",
    past: Annotated[
        str, typer.Option(help="What later rounds see of earlier ones: noisy, clean, or clean_plans.")
    ] = "noisy",
    plan_weight: Annotated[float, typer.Option(help="Weight of the loss of plans, which have few tokens.")] = 3.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 50,
    minutes: Annotated[float, typer.Option(help="End after this time, if it comes first; 0 is no limit.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights, masks and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    look_every: Annotated[int, typer.Option(help="Steps between looks at held-out orders.")] = 200,
    scored: Annotated[int, typer.Option(help="Held-out prompts that the stored model is scored on.")] = 100,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train tiny-planned and save it, rounded to bf16."""
    settings = {"start": start, "steps": steps, "tokens": tokens, "attention": attention, "past": past, "lr": lr}
    settings |= {
        "plan_weight": plan_weight,
        "tags_removed": tags_removed,
        "ablate": ablate,
        "minutes": minutes,
        "seed": seed,
    }
    run = Run(output, resume, settings, threads)
    torch.manual_seed(seed)
    model = with_plan_tokens(start_model(start, masks=True)).requires_grad_(True)
    kind = {"tags_removed": tags_removed, "ablate": ablate, "attention": attention, "past": past}

    def progress(number: int) -> float:
        return max(number / steps, run.seconds() / (60 * minutes) if minutes else 0.0)

    def rate(number: int) -> float | None:
        done = progress(number)
        return (
            None
            if done >= 1
            else lr * min(1.0, (number + 1) / warmup) * (0.495 * (1 + math.cos(math.pi * done)) + 0.01)
        )

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        return step_loss(model, batch_of(number, progress(number), tokens, seed, **kind), plan_weight)

    scores: dict[str, dict[str, Any]] = {
        "dense": {},
        "sparse": {"sparse": True},
        "dense_quarter_of_the_steps": {"steps_ratio": 0.25},
        "sparse_quarter_of_the_steps": {"sparse": True, "steps_ratio": 0.25},
        "sparse_threshold": {"sparse": True, "threshold": 0.9},
        "sparse_drawn": {"sparse": True, "threshold": 0.9, "temperature": 1.0},
    }
    if tags_removed:
        model.plan_tokens = None
        scores = {"autoregressive": {"method": "autoregressive"}}

    def glance() -> str:
        name = next(reversed(scores)) if tags_removed else "sparse_threshold"
        return f"{name.replace('_', ' ')}: {look(model, 16, **scores[name])}"

    with run.stoppable():
        weights = list(model.parameters())
        run.optimise("training", model, weights, steps, rate, step, look=glance, look_every=look_every)
        model.to(torch.bfloat16).float().requires_grad_(False)
        facts: dict[str, str] = {}
        if score:
            with run.scoring(len(scores) * scored) as advance:
                for name, options in scores.items():
                    facts[f"held_out_{name}"] = look(model, scored, advance, **options)
        kind_of_model = "autoregressive" if tags_removed else "planned diffusion"
        save(run, model, f"byte-level, {kind_of_model}, orders", **facts)


if __name__ == "__main__":
    typer.run(main)
