"""Train `tiny-planned`: a byte-level model that plans its answer, then fills in the parts side by side.

    python examples/train_tiny_planned.py

takes about an hour and a half on one CPU core and writes tiny-planned.safetensors into the current folder.

The model starts from `tiny-trimode`, which knows causal rows and masks, and learns to carry out orders (`pdkernels.training.orders`):
to list them in a plan, in any order, and to write the chunk of each, knowing from the plan alone which one it is. Echoes repeat what
another chunk has picked, so they need a round of their own.

Words grow longer and orders more numerous in the first half. Batches alternate between chunks that see each other and chunks that do
not, so that the same weights decode both ways. Every round is learnt as it is decoded, noisy while the rounds before it are clean.

`--tags-removed` trains the autoregressive model of the same data to compare with, `--ablate topic` or `--ablate sync` models whose
plans name no topics, or which do everything in one round.

Source: Planned Diffusion, section 4 and equation 10; the ablations: section 5.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import torch
import typer
from torch import Tensor
from training_run import Output, Resume, Run, Score, save, start_model

from pdkernels.models import ByteTokenizer, PlanTokens, Transformer
from pdkernels.training import (
    NoisyPlan,
    Orders,
    PlanItem,
    PlannedBatch,
    PlannedLayout,
    PlannedSample,
    draw_chunk_masks,
    lay_out,
    orders,
    pack_planned,
    planned_loss,
)

Ablation: TypeAlias = Literal["none", "topic", "sync"]
Past: TypeAlias = Literal["noisy", "clean"]

END_TOKEN, MASK_TOKEN = ByteTokenizer.end_token, ByteTokenizer.vocab_size
UNIT = 8
"""Chunks of 8 n tokens begin 8 n + 2 apart: how far one is from its plan, modulo 8, says which one it is."""
PLAN_TOKENS = PlanTokens(*range(MASK_TOKEN + 1, MASK_TOKEN + 7), digits=range(ord("0"), ord("9") + 1), unit=UNIT)
MOST_PADS = 4
LEAST_MASKED = 0.3
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
    rounds = [[PlanItem(list(topic.encode()), list(content.encode())) for topic, content in r] for r in problem.rounds]
    if ablate == "topic":
        rounds = [[item._replace(topic=[ord("_")]) for item in items] for items in rounds]
    elif ablate == "sync":
        rounds = [[item for items in rounds for item in items]]
    return PlannedSample(prompt, rounds)


def hardness(progress: float) -> dict[str, object]:
    """What orders of a step look like: one or two at first, then up to four, then some that have to wait."""
    if progress < 0.1:
        return {"items": (1, 2), "picks": 0.0}
    return {"items": (1, 3), "picks": 0.2} if progress < 0.2 else {"items": (2, 4), "picks": 0.5}


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
        layout = lay_out(sample, PLAN_TOKENS, END_TOKEN, most_pads=MOST_PADS, generator=generator)
        noisy.append(draw_chunk_masks(layout, generator, noise="round", least=LEAST_MASKED))
        used += len(layout.tokens)
        if used >= tokens:
            break
    return pack_planned(noisy, PLAN_TOKENS, MASK_TOKEN, sparse=sparse, past=past)


def step_loss(model: Transformer, batch: PlannedBatch) -> tuple[Tensor, dict[str, float]]:
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan(TILE, TILE))[0]
    loss = planned_loss(model.logits(hidden[batch.ar_rows]), model.logits(hidden[batch.masked_rows]), batch)
    return loss.total, {"plans": loss.autoregressive.item(), "chunks": loss.masked.item()}


# ---- what came of it


@torch.no_grad()
def fill(model: Transformer, layouts: list[PlannedLayout], *, sparse: bool, steps: int) -> list[PlannedLayout]:
    """The same texts and plans, their chunks written by the model, round by round, each chunk `steps` steps, the surest tokens first.

    The whole text is computed in each step. Where a chunk has letters to pick the guesses are drawn at random.
    """
    for number in range(max(len(layout.stages) for layout in layouts) - 1):
        open_ = [layout.content & (layout.rounds == number) for layout in layouts]
        for step in range(steps):
            plain = [torch.ones(len(layout.tokens)) for layout in layouts]
            noisy = [NoisyPlan(*parts) for parts in zip(layouts, open_, plain, strict=True)]
            batch = pack_planned(noisy, PLAN_TOKENS, MASK_TOKEN, sparse=sparse)
            if len(batch.masked_rows) == 0:
                break
            hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan(TILE, TILE))[0]
            logits = model.logits(hidden[batch.masked_rows]).float()
            logits[:, MASK_TOKEN : PLAN_TOKENS.pad] = logits[:, END_TOKEN] = -torch.inf
            sure, guess = logits.softmax(-1).max(-1)
            read = 0
            for index, layout in enumerate(layouts):
                places = open_[index].nonzero()[:, 0]
                mine, guessed = sure[read : read + len(places)], guess[read : read + len(places)]
                read += len(places)
                # Chunks are numbered by their opening tags.
                chunk = (layout.tokens == PLAN_TOKENS.chunk_open).cumsum(0)[places]
                for one in chunk.unique():
                    own = (chunk == one).nonzero()[:, 0]
                    best = own[mine[own].topk(-(-len(own) // (steps - step))).indices]
                    layout.tokens[places[best]] = guessed[best]
                    open_[index][places[best]] = False
    return layouts


def look(model: Transformer, seed: int, count: int, *, sparse: bool, steps: int = 8, **kind: object) -> str:
    """Held-out orders right when the plan is given, by operation."""
    counts: dict[str, list[bool]] = {}
    generator = torch.Generator().manual_seed(seed)
    problems = list(islice(orders(seed, held_out=True, **kind), count))
    layouts = [
        lay_out(sample_of(problem), PLAN_TOKENS, END_TOKEN, most_pads=MOST_PADS, generator=generator)
        for problem in problems
    ]
    for problem, layout in zip(problems, fill(model, layouts, sparse=sparse, steps=steps), strict=True):
        text = bytes(token for token in layout.tokens[layout.content].tolist() if token < 256).decode()
        for key, right in problem.right(text).items():
            counts.setdefault({"*": "picks", "p": "of picks"}.get(key[0], "lists"), []).append(right)
    told = "  ".join(f"{name} {sum(seen)}/{len(seen)}" for name, seen in sorted(counts.items()))
    return f"{'sparse' if sparse else 'dense'}: {told}"


def main(
    output: Output = Path("tiny-planned.safetensors"),
    start: Annotated[str, typer.Option(help="Name, folder or file of the model to start from.")] = "tiny-trimode",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 6000,
    tokens: Annotated[int, typer.Option(help="Tokens of a batch, copies apart.")] = 1500,
    attention: Annotated[str, typer.Option(help="Chunks of a batch see each other: dense, sparse, or both.")] = "both",
    tags_removed: Annotated[bool, typer.Option("--tags-removed", help="Train the autoregressive baseline.")] = False,
    ablate: Annotated[str, typer.Option(help="What plans lack: none, topic or sync.")] = "none",
    past: Annotated[str, typer.Option(help="What later rounds see of earlier ones: noisy, or a clean copy.")] = "noisy",
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 50,
    minutes: Annotated[float, typer.Option(help="End after this time, if it comes first; 0 is no limit.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights, masks and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    look_every: Annotated[int, typer.Option(help="Steps between looks at held-out orders.")] = 500,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train tiny-planned and save it, rounded to bf16."""
    settings = {"start": start, "steps": steps, "tokens": tokens, "attention": attention, "past": past, "lr": lr}
    settings |= {"tags_removed": tags_removed, "ablate": ablate, "minutes": minutes, "seed": seed}
    run = Run(output, resume, settings, threads)
    torch.manual_seed(seed)
    model = with_plan_tokens(start_model(start, masks=True)).requires_grad_(True)
    kind = {"tags_removed": tags_removed, "ablate": ablate, "attention": attention, "past": past}
    last = 0.0

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
        nonlocal last
        last = progress(number)
        return step_loss(model, batch_of(number, last, tokens, seed, **kind))

    def glance() -> str:
        return "; ".join(look(model, 1, 16, sparse=sparse, **hardness(last)) for sparse in (False, True))

    with run.stoppable():
        weights = list(model.parameters())
        run.optimise("training", model, weights, steps, rate, step, look=glance, look_every=look_every)
        model.to(torch.bfloat16).float().requires_grad_(False)
        facts: dict[str, str] = {}
        save(run, model, "byte-level, planned diffusion, orders", **facts)


if __name__ == "__main__":
    typer.run(main)
