"""What the drafters of SmolLM2 read: hidden states of the model on texts that it wrote itself."""

from __future__ import annotations

import copy
from collections import Counter
from typing import NamedTuple

import torch
from smollm2_mixture import chats, mixture
from smollm2_texts import Text, answered, prompts
from torch import Tensor
from training_run import Run, console

import pdkernels as pd
from pdkernels.models import Transformer
from pdkernels.models.architectures.fused import rms_norm

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

    @torch.no_grad()
    def targets(self, text: Read) -> Tensor:
        """``(1, T, vocabulary)`` logits."""
        return rms_norm(text.hidden.float(), self._norm, self._eps) @ self._rows.T


def written(
    run: Run, model: Transformer, start: str, texts: int, held_out: int, longest: int, answer: int, seed: int
) -> tuple[list[Text], list[Text]]:
    """The texts to learn from and the held-out ones, in files next to the output."""
    asked = chats(model, texts, longest, seed)
    unseen = prompts(model, held_out, longest, seed, held_out=True)
    with run.stoppable():
        with run.scoring(len(asked), "answers") as advance:
            file = run.output.with_name(f"{run.output.name}.texts.pt")
            known = mixture(model, start, asked, answer, file, advance)
        with run.scoring(len(unseen), "held-out answers") as advance:
            file = run.output.with_name(f"{run.output.name}.held-out.texts.pt")
            others = answered(model, start, unseen, answer, file, advance)
    return known, others


def frequent(texts: list[Text], count: int) -> Tensor:
    """The most frequent tokens of answers, ascending."""
    seen = Counter(token for text in texts for token in text.ids[text.prompt_len :].tolist())
    order = sorted(seen, key=lambda token: (-seen[token], token))
    unseen = (token for token in range(count) if token not in seen)
    return torch.tensor(sorted([*order[:count], *unseen][:count]))


def estimated(agreed: list[Tensor]) -> str:
    """Estimates the tokens per forward over all positions of held-out answers."""
    mean = torch.stack(agreed).mean(0)
    shares = ", ".join(f"{share:.3f}" for share in mean)
    return f"held out: {1 + mean.sum():.3f} tokens per forward with {len(mean)} guesses, accepted {shares}"


def save(run: Run, head: torch.nn.Module, packed: str = "") -> None:
    saved = copy.deepcopy(pd.quantize(head, packed) if packed else head)  # `head` stays in float32, to be scored
    pd.models.save_drafter(saved.bfloat16(), run.output)
    run.kept.unlink(missing_ok=True)
    size = sum(file.stat().st_size for file in run.output.iterdir()) / 1e6
    console.print(f"saved {run.output} ({size:.2f} MB) after {run.seconds():.0f} s", soft_wrap=True)
