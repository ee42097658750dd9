"""Train a sampler for block diffusion with `tiny-trimode`: a network that decides which guesses of a block are final.

    python examples/train_tiny_sampler.py --output sampler

takes some minutes on one CPU core and writes a folder that `pdkernels.models.load_sampler` reads. It runs sums by both policies of the
paper, keeps every forward, trains the network and the paper's ablation, a pointwise network, and prints how well each, and the
confidence, predicts which guesses are final.

Source: Nemotron-Labs-Diffusion, section 3.2 and appendix A.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from training_run import console, fail

from pdkernels.models import SamplerConfig, SamplerHead, save_sampler, semantic_table
from pdkernels.models.checkpoints import zoo
from pdkernels.training import Problem, SamplerSteps, arithmetic, auc, collect_sampler_steps, train_sampler

BATCH = 32
SEMANTICS = 16


def steps_of(model: Any, problems: list[Problem], block_size: int, table: torch.Tensor, first: int = 0) -> SamplerSteps:
    """Both policies on all problems; prompts are numbered from `first` on."""
    parts = []
    for start in range(0, len(problems), BATCH):
        batch = problems[start : start + BATCH]
        prompts = [problem.prompt for problem in batch]
        texts = [[*problem.steps.encode(), model.end_tokens[0]] for problem in batch]
        options: dict[str, Any] = {"table": table, "max_new_tokens": max(map(len, texts))}
        for found in (
            collect_sampler_steps(model, prompts, block_size, **options),
            collect_sampler_steps(model, prompts, block_size, "hybrid", texts=texts, **options),
        ):
            parts.append(found._replace(prompts=found.prompts + first + start))
        console.print(f"{start + len(batch)} of {len(problems)} problems, {sum(len(p.final) for p in parts)} forwards")
    return SamplerSteps(*(torch.cat(columns) for columns in zip(*parts)))


def main(
    output: Annotated[Path, typer.Option(help="Folder of the trained sampler.")] = Path("tiny-sampler"),
    start: Annotated[str, typer.Option(help="Name of the model whose guesses are judged.")] = "tiny-trimode",
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 8,
    problems: Annotated[int, typer.Option(help="Sums that forwards are kept of.")] = 480,
    epochs: Annotated[int, typer.Option(help="At most.")] = 20,
    seed: Annotated[int, typer.Option(help="Of sums, weights and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
) -> None:
    """Collect, train, compare and save."""
    if threads:
        torch.set_num_threads(threads)
    model = zoo.load(start)
    if getattr(model, "mask_token", None) is None:
        fail(f"--start must name a model with a mask token, got {start}.")
    table = semantic_table(model.embedding, SEMANTICS)
    asked = list(islice(arithmetic(seed + 100), problems))
    prompts = list({problem.prompt: problem for problem in asked}.values())
    kept = len(prompts) - max(1, len(prompts) // 5)
    steps = steps_of(model, prompts[:kept], block_size, table)
    held_out = steps_of(model, prompts[kept:], block_size, table, kept)
    heads = {}
    for kind, sizes in (("attention", {"layers": 2}), ("pointwise", {"layers": 4})):
        torch.manual_seed(seed)
        config = SamplerConfig(SEMANTICS, width=64, feed_forward=128, heads=4, kind=kind, **sizes)
        head = SamplerHead(config, table)

        def report(epoch: int, loss: float, area: float, kind: str = kind) -> None:
            console.print(f"{kind}, epoch {epoch}: loss {loss:.4f}, AUC {area:.4f}")

        heads[kind] = head, max(train_sampler(head, steps, held_out, epochs=epochs, progress=report))
    for kind, (head, area) in heads.items():
        parameters = sum(parameter.numel() for parameter in head.parameters())
        console.print(f"{kind}, {parameters:,} parameters: AUC {area:.4f}")
    console.print(f"confidence: AUC {auc(*held_out.confidence()):.4f}")
    save_sampler(heads["attention"][0], output)
    save_sampler(heads["pointwise"][0], output / "pointwise")
    console.print(f"saved {output}")


if __name__ == "__main__":
    typer.run(main)
