"""Texts whose chunks are written token by token: batches against the text read row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference import planned_training as plain
from pdkernels.training import PlannedSample, lay_out, pack_pasta, planned_loss
from tests.support.errors import kind_of
from tests.training.test_planned import CLOSE, END, EXAMPLE, OWN, PAD, VOCAB, generator, samples, small_model, text_of


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(samples(), min_size=1, max_size=3), pads=st.integers(0, 4), spare=st.integers(0, 5))
def test_the_loss_is_that_of_each_text_alone(texts: list[PlannedSample], pads: int, spare: int) -> None:
    """In fp64, as are its gradients; and no row of padding matters."""
    layouts = [lay_out(text, OWN, END, max_pads=pads, generator=generator(1)) for text in texts]
    model = small_model()
    length = sum(len(layout.tokens) for layout in layouts) + spare
    batch = pack_pasta(layouts, OWN, length, pad_token=7)
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.dense())[0]
    none = hidden.new_empty(0, VOCAB)
    ours = planned_loss(model.logits(hidden[batch.ar_rows]), none, batch)

    def logits_of(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(tokens[None], mask=mask)[0]

    sums = [plain.loss_in_turn(logits_of, text_of(layout), [PAD, CLOSE]) for layout in layouts]
    expected = sum(total for total, _ in sums) / sum(count for _, count in sums)
    # Weights of rows are float32.
    torch.testing.assert_close(ours.total, expected, rtol=1e-6, atol=1e-9)
    assert ours.masked == 0
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (ours.total, expected)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-9)


def test_rows_of_the_example() -> None:
    """Two chunks, a sync, a chunk; the one with filler is trained up to it."""
    layout = lay_out(EXAMPLE, OWN, END)
    batch = pack_pasta([layout], OWN)
    pairs = dict(zip(batch.ar_rows.tolist(), batch.ar_labels.tolist(), strict=True))
    ids = layout.tokens.tolist()
    inside = {12: 25, 13: 26, 14: CLOSE, 16: 28, 17: PAD, 25: 18, 26: 19, 27: CLOSE}
    assert {row: label for row, label in pairs.items() if layout.rounds[row] >= 0} == inside
    outside = [row for row in range(len(ids)) if layout.rounds[row] < 0][layout.prompt_len - 1 :]
    assert [pairs[row] for row in outside[:-1]] == [ids[row] for row in outside[1:]]
    assert batch.masked_rows.numel() == 0 and int(batch.normaliser) == len(ids) - layout.prompt_len


def test_content_with_filler_inside_ends_there() -> None:
    from pdkernels.training import PlanItem

    layout = lay_out(PlannedSample([20], [[PlanItem([21], [22, PAD, 23, 24], 2)]]), OWN, END)
    batch = pack_pasta([layout], OWN)
    assert batch.ar_labels.tolist()[-2:] == [22, PAD]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layouts": [EXAMPLE]}, "TypeError: layouts must hold PlannedLayouts, got PlannedSample."),
        ({"plan_tokens": None}, "TypeError: plan_tokens must be those of a model, got NoneType."),
        ({"length": 3}, "length must be at least the 30 tokens of the texts, got 3."),
        ({"pad_token": -1}, "pad_token must be 0 or more, got -1."),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    error, words = kind_of(message)
    given = {"layouts": [lay_out(EXAMPLE, OWN, END)], "plan_tokens": OWN, **arguments}
    with pytest.raises(error) as raised:
        pack_pasta(given.pop("layouts"), given.pop("plan_tokens"), **given)
    assert str(raised.value) == f"pdkernels.training.pack_pasta: {words}"
