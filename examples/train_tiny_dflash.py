"""Train a DFlash head for `tiny-code`: one layer that guesses a whole block of bytes in one forward.

    python examples/train_tiny_dflash.py

takes about a minute of a CPU core and writes the folder tiny-dflash, in the format of the speculators library, into the current one.
The model itself is not changed, and `--start` takes other transformers with bytes as tokens.

The texts are sums with the model's own answers. A step packs some of them into one sequence, draws anchors from the answers, and puts a block
of masks at each. All blocks run in one forward under `pdkernels.masks.anchored`, and learn what the model says about the same positions.

Source: DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from train_smollm2_drafter import turn
from train_tiny_trimode import cosine
from training_run import Resume, Run, Score, console, start_model

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.models import DFlashHead, Transformer
from pdkernels.training import arithmetic, dflash_loss, draw_anchors, new_dflash_head

MASK_TOKEN = 0
"""A byte that no text contains."""


class Read(NamedTuple):
    """A text that the model has read; `Transformer.tapped` gives features and the targets' hidden states."""

    tokens: Tensor
    features: Tensor
    """``(T, taps, hidden_size)``."""
    targets: Tensor
    """``(T, vocab_size)`` logits."""
    scored: Tensor
    """``(T,)``, which rows are about bytes of the answer."""


@torch.no_grad()
def read(model: Transformer, taps: tuple[int, ...], prompt: list[int], answer: Tensor) -> Read:
    tokens = torch.cat([torch.tensor(prompt), answer])
    hidden, features = model.tapped(tokens[None], taps)
    scored = torch.arange(len(tokens)) >= len(prompt) - 1
    scored[-1] = False  # what follows the end of an answer does not matter
    return Read(tokens, features[0], model.logits(hidden)[0], scored)


def questions(model: Any, count: int, held_out: bool = False) -> list[list[int]]:
    return [model.tokenizer.encode(problem.prompt) for problem in islice(arithmetic(0, held_out=held_out), count)]


def decoded(model: Any, head: DFlashHead, prompts: list[list[int]], longest: int) -> str:
    """Bytes per forward of the target on held-out sums."""
    tokens, forwards, same = 0, 0.0, 0
    for prompt in prompts:
        found = generate(model, prompt, "dflash", drafter=head, max_new_tokens=longest)
        same += torch.equal(found.tokens, generate(model, prompt, max_new_tokens=longest).tokens)
        tokens, forwards = tokens + found.stats.tokens, forwards + found.stats.forwards
    return f"{tokens / forwards:.2f} bytes per forward, {same} of {len(prompts)} answers are those of greedy decoding"


def main(
    output: Annotated[Path, typer.Option(help="The folder that the head goes into.")] = Path("tiny-dflash"),
    start: Annotated[str, typer.Option(help="Name or file of the model.")] = "tiny-code",
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 150,
    sums: Annotated[int, typer.Option(help="Sums that the model answers.")] = 128,
    held_out: Annotated[int, typer.Option(help="Held-out sums.")] = 8,
    longest: Annotated[int, typer.Option(help="Bytes of an answer.")] = 96,
    count: Annotated[int, typer.Option(help="Texts per step.")] = 4,
    anchors: Annotated[int, typer.Option(help="Blocks per step.")] = 64,
    block_size: Annotated[int, typer.Option(help="Bytes of a block, the known one included.")] = 8,
    layers: Annotated[int, typer.Option(help="Layers of the head.")] = 1,
    gamma: Annotated[float, typer.Option(help="Guesses after which a weight has fallen to 1 / e.")] = 4.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Seed of order and anchors.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    look_every: Annotated[int, typer.Option(help="Steps between looks at held-out sums.")] = 50,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train a DFlash head and save it, rounded to bf16."""
    settings = {"start": start, "steps": steps, "sums": sums, "longest": longest, "count": count, "anchors": anchors}
    settings |= {"block_size": block_size, "layers": layers, "gamma": gamma, "lr": lr, "seed": seed}
    run = Run(output, resume, settings, threads)
    model = start_model(start).requires_grad_(False)
    torch.manual_seed(seed)
    head = new_dflash_head(model, block_size, MASK_TOKEN, layers=layers)
    asked, unseen = questions(model, sums), questions(model, held_out, held_out=True)
    texts: list[Read] = []
    with run.stoppable(), run.scoring(sums, "answers") as advance:
        for first in range(0, sums, 16):
            batch = asked[first : first + 16]
            answers = generate(model, batch, max_new_tokens=longest).tokens
            texts += [read(model, head.config.taps, *pair) for pair in zip(batch, answers, strict=True)]
            advance(len(batch))
    embedding: Any = model.embedding
    shared: Any = embedding if model.head is None else model.head

    def drafting(number: int) -> tuple[Tensor, dict[str, float]]:
        chosen = [texts[index] for index in turn(number, count, len(texts), seed)]
        tokens, features, targets, scored = (torch.cat(parts)[None] for parts in zip(*chosen, strict=True))
        places = draw_anchors(scored, anchors, torch.Generator().manual_seed(seed * steps + number))
        lengths = [len(text.tokens) for text in chosen]
        options = {"documents": lengths, "embedding": embedding, "shared": shared, "gamma": gamma}
        loss = dflash_loss(head, tokens, features, targets, scored, places, **options)
        return loss.total, {"loss": loss.total.item(), "bytes per forward": 1 + loss.agreed.sum().item()}

    def look() -> str:
        return f"held out: {decoded(model, head, unseen, longest)}" if score else ""

    with run.stoppable():
        if score and not resume:
            console.print(f"untrained: {decoded(model, head, unseen, longest)}", soft_wrap=True)
        parameters = list(head.parameters())
        run.optimise("head", head, parameters, steps, cosine(steps, lr), drafting, look=look, look_every=look_every)
        pd.models.save_drafter(head.bfloat16(), output, target=start)
        run.kept.unlink(missing_ok=True)
        size = sum(file.stat().st_size for file in output.iterdir()) / 1e6
        console.print(f"saved {output} ({size:.2f} MB) after {run.seconds():.0f} s", soft_wrap=True)
        if score:
            saved = pd.models.load_drafter(output, model)
            assert isinstance(saved, DFlashHead)
            console.print(f"held out, from the file: {decoded(model, saved, unseen, longest)}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
