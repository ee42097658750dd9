"""Train `tiny-jacobi`: `tiny-code` taught to guess right from noisy drafts, so that Jacobi decoding accepts more of them.

    python examples/train_tiny_jacobi.py

takes less than half an hour on two CPU cores and writes tiny-jacobi.safetensors into the current folder.

The model decodes prompts with Jacobi iterations; every state of every block is kept. Then it learns, from such states with more
and more noise from block to block, to predict what it predicts from the finished text, and to keep those predictions. Between
rounds the states are collected again, from the better model.

Source: Jacobi Forcing (arXiv 2512.14681), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from train_tiny_code import score as score_of
from train_tiny_trimode import TILE, WINDOW, cosine
from training_run import HAS_BF16, Output, Resume, Run, Score, console, save, start_model

from pdkernels.models import ByteTokenizer, Transformer
from pdkernels.training import (
    NoiseAwareBatch,
    NoiseAwareSample,
    Trajectory,
    arithmetic,
    as_ids,
    collect_trajectories,
    noise_aware_loss,
    noise_aware_sample,
    noiseless_sample,
    pack_noise_aware,
    standard_library,
)

NOISE_WINDOW = 4
"""Blocks over which the noise grows before it restarts."""


def collect(model: Transformer, sums: int, windows: int, block_size: int, seed: int) -> list[Trajectory]:
    """Every state of every block that Jacobi decoding goes through, on sums that it gets right and on source."""
    problems = list(islice(arithmetic(seed), sums))
    source, generator = as_ids(standard_library()[0]), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - WINDOW, (windows,), generator=generator).tolist()
    model.requires_grad_(False)
    options = {"block_size": block_size, "seed": seed, "batch_size": 64}
    answers = collect_trajectories(model, [problem.prompt for problem in problems], max_new_tokens=400, **options)
    pieces = [source[start : start + WINDOW // 2].long() for start in starts]
    texts = collect_trajectories(model, pieces, max_new_tokens=WINDOW // 2, **options)
    model.requires_grad_(True)
    return [
        answer for problem, answer in zip(problems, answers, strict=True) if problem.is_solved_by(written(answer))
    ] + texts


def written(trajectory: Trajectory) -> str:
    """The text that the blocks converged to."""
    ids = [*trajectory.fixed_points.flatten().tolist(), ByteTokenizer.end_token]
    return ByteTokenizer().decode(ids[: ids.index(ByteTokenizer.end_token)])


def replay(block_size: int, seed: int) -> Iterator[NoiseAwareSample]:
    """Endless sums without noise: they keep the model from forgetting how to add while it learns to guess."""
    for problem in arithmetic(seed):
        prompt, answer = as_ids([problem.prompt.encode()])[:-1], as_ids([problem.steps.encode()])
        yield noiseless_sample(prompt.long(), answer.long(), block_size)


def batches(
    trajectories: list[Trajectory], count: int, replayed: int, block_size: int, seed: int
) -> Iterator[NoiseAwareBatch]:
    """Endless batches of `count` trajectories, every one of them once per pass, and `replayed` fresh sums.

    In every other batch noisy blocks follow noisy ones, as when several blocks are decoded at once, and clean ones in the rest.
    """
    generator, sums, conditionings = (
        torch.Generator().manual_seed(seed),
        replay(block_size, seed),
        cycle(("noisy", "clean")),
    )
    while True:
        order = torch.randperm(len(trajectories), generator=generator).tolist()
        for first in range(0, len(order) - count + 1, count):
            samples = [noise_aware_sample(trajectories[index], NOISE_WINDOW) for index in order[first : first + count]]
            yield pack_noise_aware(
                [*samples, *islice(sums, replayed)], end_token=ByteTokenizer.end_token, conditioning=next(conditionings)
            )


def step(model: Transformer, batch: NoiseAwareBatch, ar_weight: float) -> tuple[Tensor, dict[str, float]]:
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan(TILE, TILE))[0]
    loss = noise_aware_loss(
        model.logits(hidden[batch.ar_rows]),
        model.logits(hidden[batch.student_rows]),
        model.logits(hidden[batch.teacher_rows]),
        batch,
        ar_weight=ar_weight,
    )
    return loss.total, {"autoregressive": loss.autoregressive.item(), "consistency": loss.consistency.item()}


def report(
    model: Transformer, problems: int, block_size: int, advance: Callable[[int], None] = lambda count: None
) -> str:
    held_out = list(islice(arithmetic(0, held_out=True), problems))
    right, per_forward = score_of(model, "jacobi", held_out, advance, block_size=block_size)
    return f"held-out sums: {right:.0%} right, {per_forward:.2f} tokens per forward in blocks of {block_size}"


def main(
    output: Output = Path("tiny-jacobi.safetensors"),
    start: Annotated[
        str, typer.Option(help="Name, folder or file of the autoregressive model to start from.")
    ] = "tiny-code",
    rounds: Annotated[int, typer.Option(help="How often trajectories are collected.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps of a round.")] = 800,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    sums: Annotated[int, typer.Option(help="Problems decoded for a round.")] = 1600,
    windows: Annotated[int, typer.Option(help="Pieces of source decoded for a round.")] = 200,
    count: Annotated[int, typer.Option(help="Trajectories per step.")] = 6,
    replayed: Annotated[int, typer.Option(help="Sums without noise per step.")] = 4,
    ar_weight: Annotated[float, typer.Option(help="Weight of the autoregressive loss.")] = 2.0,
    lr: Annotated[
        float, typer.Option(help="Peak learning rate of the first round; a third less in each later one.")
    ] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of drafts, problems and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    fast: Annotated[bool, typer.Option(help="bfloat16, where the CPU multiplies it itself.")] = HAS_BF16,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train tiny-jacobi and save it, rounded to bf16."""
    settings = {"start": start, "rounds": rounds, "steps": steps, "block_size": block_size, "sums": sums}
    settings |= {
        "windows": windows,
        "count": count,
        "replayed": replayed,
        "ar_weight": ar_weight,
        "lr": lr,
        "seed": seed,
        "fast": fast,
    }
    run = Run(output, resume, settings, threads)
    torch.manual_seed(seed)
    model = start_model(start)

    def look() -> str:
        return report(model, 50, block_size)

    with run.stoppable():
        if score and not resume:
            console.print(f"before: {report(model, 100, block_size)}")
        for number in range(rounds):
            name = f"round {number + 1}"
            if run.is_past(name, model):
                continue
            with console.status("collecting trajectories"):
                trajectories = collect(model, sums, windows, block_size, seed + 1 + number)
            console.print(f"{name}: {len(trajectories)} trajectories after {run.seconds():.0f} s")
            stream = batches(trajectories, count, replayed, block_size, seed + 1 + rounds + number)

            def forced(_: int, stream: Iterator[NoiseAwareBatch] = stream) -> tuple[Tensor, dict[str, float]]:
                with torch.autocast("cpu", torch.bfloat16, enabled=fast):
                    return step(model, next(stream), ar_weight)

            rates, weights = cosine(steps, lr * (2 / 3) ** number), list(model.parameters())
            streams = {"skip": lambda _, stream=stream: next(stream)}
            run.optimise(name, model, weights, steps, rates, forced, **streams, look=look, look_every=300, muon=True)
        model.to(torch.bfloat16).float().requires_grad_(False)
        facts: dict[str, str] = {}
        if score:
            with run.scoring(200) as advance:
                facts = {"held_out": report(model, 200, block_size, advance)}
        save(run, model, "byte-level, Jacobi-forced, Python's standard library and arithmetic", **facts)


if __name__ == "__main__":
    typer.run(main)
