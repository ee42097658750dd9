"""Picture of a draft that is verified against filtered distributions."""

from __future__ import annotations

from typing import Any

import torch

import pdkernels as pd
from pdkernels.generation.filtered_model import FilteredModel
from pdkernels.generation.filters import Filters
from pdkernels.generation.noise import OWN
from pdkernels.generation.sampler import Sampler
from scripts.pictures.parts import ACCEPTED, COMMITTED, FREE, MODEL, REJECTED, canvas, save

_PROMPT, _DRAFT = "def area(width, height):\n    return w", "width * height"
_SHOWN = 6


def filtered_draft() -> None:
    """A column per token of a draft: the model's most probable next tokens, what penalties and filters leave of them, and the draw."""
    model = pd.models.load("tiny-code")
    filters = Filters(repetition_penalty=1.15, frequency_penalty=0.4)
    sampler = Sampler(0.8, top_k=4, top_p=0.95)
    known = model.tokenizer.encode(_PROMPT)
    draft = model.tokenizer.encode(_PROMPT[:-1] + _DRAFT)[len(known) - 1 :][:8]
    rows = _rows(model, known, draft, filters)
    positions = len(known) + torch.arange(len(draft))[None]
    drawn = sampler.sample(rows["filtered"], positions, torch.tensor([3]), OWN)[0].tolist()
    accepted = next((n for n, token in enumerate(drawn[:-1]) if token != draft[n + 1]), len(draft) - 1) + 1
    figure, axis = canvas(13.5, 5.4, (-3.2, 3.0 * len(draft)), (-1.7, _SHOWN + 2.3))
    plain = rows["plain"][0].softmax(-1)
    left = sampler.filtered(rows["filtered"])[0].double().div(sampler.temperature).softmax(-1)
    for n, token in enumerate(draft):
        x, verified = 3.0 * n, n <= accepted - 1
        _box(
            axis, x, _SHOWN + 0.9, _word(model, token), COMMITTED if n == 0 else ACCEPTED if n < accepted else REJECTED
        )
        for place, shown in enumerate(plain[n].topk(_SHOWN).indices.tolist()):
            y, kept = _SHOWN - 0.6 - place, float(left[n, shown])
            axis.barh(
                y + 0.16, 1.6 * float(plain[n, shown]), 0.3, left=x + 0.75, color=FREE, edgecolor="#999999", lw=0.6
            )
            colour = MODEL if shown == drawn[n] and verified else COMMITTED
            if kept > 0:
                axis.barh(y - 0.16, 1.6 * kept, 0.3, left=x + 0.75, color=colour, edgecolor="#444444", lw=0.6)
            weight = "bold" if shown == drawn[n] and verified else "normal"
            grey = "#222222" if kept > 0 else "#aaaaaa"
            axis.text(x + 0.68, y, _word(model, shown), ha="right", va="center", fontsize=9, color=grey, weight=weight)
        if verified:
            _box(axis, x, -1.3, _word(model, drawn[n]), ACCEPTED if n < accepted - 1 else MODEL)
        else:
            axis.text(x + 0.9, -0.9, "not read", ha="center", va="center", fontsize=9, color="#888888")
    for y, words in (
        (_SHOWN + 1.3, "draft"),
        (_SHOWN / 2 - 0.1, "next token:\nmodel (pale),\nafter penalties\nand filters"),
        (-0.9, "drawn"),
    ):
        axis.text(-0.2, y, words, ha="right", va="center", fontsize=10)
    save(figure, "filtered_draft.png")


def _rows(model: Any, known: list[int], draft: list[int], filters: Filters) -> dict[str, torch.Tensor]:
    """Logits of the rows of a draft after the text before it, plain and filtered."""
    found = {}
    for name, used in (("plain", model), ("filtered", FilteredModel(model, filters))):
        cache = used.new_cache(1, len(known) + len(draft))
        with torch.inference_mode():
            used(torch.tensor([known[:-1]]), cache=cache, rows=torch.tensor([[0]]))
            cache.commit_(torch.tensor([len(known) - 1]))
            found[name] = used(torch.tensor([draft]), cache=cache).float()
    return found


def _box(axis: Any, x: float, y: float, text: str, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x + 0.1, y), 1.6, 0.8, facecolor=colour, edgecolor="#444444", linewidth=0.8))
    white = colour in (COMMITTED, ACCEPTED)
    axis.text(x + 0.9, y + 0.4, text, ha="center", va="center", fontsize=10, color="white" if white else "#222222")


def _word(model: Any, token: int) -> str:
    text = str(model.tokenizer.decode([token]))
    return text.replace(" ", "␣").replace("\n", "⏎") or "·"


PICTURES = ("filtered_draft",)
