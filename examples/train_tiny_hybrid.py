"""Train `tiny-hybrid`: one layer with attention and three with the gated delta rule, for next tokens and for filling in masks.

    python examples/train_tiny_hybrid.py

takes about ten minutes of a CPU core and writes tiny-hybrid.safetensors into the current folder. The sums, the noise and the losses are
those of the joint stage of `tiny-trimode`, from random weights: the clean copy of a text is one chain of rows, and each noisy block
goes on from the state before it. So one set of weights decodes token by token and by speculating on itself, with a memory that does
not grow but in one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from train_tiny_code import score as score_of
from train_tiny_trimode import MASK_TOKEN, cosine, joint_batches, joint_step
from training_run import HAS_BF16, Output, Resume, Run, Score, save

from pdkernels.models import ByteTokenizer, Hybrid, HybridConfig
from pdkernels.training import arithmetic

CONFIG = HybridConfig(
    vocab_size=MASK_TOKEN + 1,
    hidden_size=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    mixers=("delta", "delta", "attention", "delta"),
    key_heads=2,
    value_heads=4,
    key_dim=32,
    value_dim=32,
    qk_norm=True,
    max_positions=512,
)


def report(model: Hybrid, problems: int, width: int = 8, advance: Callable[[int], None] = lambda count: None) -> str:
    held_out = list(islice(arithmetic(0, held_out=True), problems))
    right, _ = score_of(model, "autoregressive", held_out, advance)
    _, linear = score_of(model, "linear_self_speculation", held_out, advance, block_size=width)
    _, quadratic = score_of(model, "quadratic_self_speculation", held_out, advance, block_size=width)
    return (
        f"held-out sums: {right:.0%} right; tokens per forward at width {width}: linear {linear:.2f} "
        f"({2 * linear:.2f} per cycle), quadratic {quadratic:.2f}"
    )


def main(
    output: Output = Path("tiny-hybrid.safetensors"),
    steps: Annotated[int, typer.Option(help="Steps.")] = 1100,
    sums: Annotated[int, typer.Option(help="Problems per step.")] = 4,
    alpha: Annotated[
        float, typer.Option(help="Weight of the masked loss; the tri-mode paper's. The shipped weights had 1.0.")
    ] = 0.3,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights, masks, texts and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    fast: Annotated[bool, typer.Option(help="bfloat16 products, where the CPU multiplies it itself.")] = HAS_BF16,
    look_every: Annotated[int, typer.Option(help="Steps between looks at held-out sums.")] = 500,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train tiny-hybrid and save it, rounded to bf16."""
    settings = {"steps": steps, "sums": sums, "alpha": alpha, "lr": lr}
    run = Run(output, resume, {**settings, "seed": seed, "fast": fast}, threads)
    torch.manual_seed(seed)
    model = Hybrid(CONFIG, tokenizer=ByteTokenizer(), end_tokens=ByteTokenizer().end_tokens, mask_token=MASK_TOKEN)
    batches = joint_batches(sums, 0, seed)

    def joint(number: int) -> tuple[Tensor, dict[str, float]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            return joint_step(model, next(batches), alpha)

    def look() -> str:
        model.requires_grad_(False)
        try:
            return report(model, 50) if score else ""
        finally:
            model.requires_grad_(True)

    with run.stoppable():
        run.optimise(
            "joint",
            model,
            list(model.parameters()),
            steps,
            cosine(steps, lr),
            joint,
            skip=lambda number: next(batches),
            look=look,
            look_every=look_every,
            muon=True,
        )
        model.to(torch.bfloat16).float().requires_grad_(False)
        facts: dict[str, str] = {}
        if score:
            with run.scoring(3 * 200) as advance:
                facts = {"held_out": report(model, 200, advance=advance)}
        save(run, model, "byte-level, hybrid, tri-mode, arithmetic", **facts)


if __name__ == "__main__":
    typer.run(main)
