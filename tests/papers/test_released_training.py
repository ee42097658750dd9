"""The released objective of planned diffusion."""

from __future__ import annotations

import pytest
import torch

from bench.papers.released.plain_planned_training import released_loss
from bench.papers.released.planned_training import pack_released
from pdkernels.training import NoisyPlan, draw_chunk_masks, lay_out
from tests.training.test_planned import END, EXAMPLE, MASK, OWN, PAD, TOKENS, generator, loss_of, small_model, text_of


def test_labels_of_thirty_tokens() -> None:
    """Rows that are masked predict the next token; whether that is masked does not matter."""
    layout = lay_out(EXAMPLE, OWN, END)
    masked = torch.zeros(30, dtype=torch.bool)
    masked[[12, 14, 16, 17, 27, 28]] = True
    noisy = NoisyPlan(layout, masked, torch.full((30,), 0.25))
    batch = pack_released([noisy], TOKENS["next"], MASK)
    assert list(zip(batch.masked_rows.tolist(), batch.masked_labels.tolist())) == [(12, 25), (16, 28), (17, PAD)]
    assert batch.ar_rows.tolist()[-1] == 29 and batch.ar_labels.tolist()[-1] == END
    assert torch.allclose(batch.ar_weights, torch.full((15,), 4 / 27)) and batch.normaliser == 1


@pytest.mark.parametrize("sparse", [False, True])
def test_the_loss(sparse: bool) -> None:
    model = small_model()
    noisy = [draw_chunk_masks(lay_out(EXAMPLE, OWN, END), generator(seed), tags=True) for seed in range(3)]
    ours = loss_of(model, pack_released(noisy, TOKENS["next"], MASK, sparse=sparse))
    logits_of = lambda ids, see: model(ids[None], mask=see)[0]  # noqa: E731
    theirs = [
        released_loss(logits_of, text_of(layout), masked.tolist(), float(p_mask[0].double()), MASK, sparse=sparse)
        for layout, masked, p_mask in noisy
    ]
    torch.testing.assert_close(ours.total, sum(theirs) / 3, rtol=1e-6, atol=0)
