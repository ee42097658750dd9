"""The released loss of planned diffusion, as plainly as it can be written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pdkernels.reference.planned_training import Logits, Text, plan_labels, visible


def released_loss(
    logits_of: Logits, text: Text, masked: Sequence[bool], t: float, mask_token: int, *, sparse: bool
) -> Tensor:
    """The released code: labels are shifted but the selection is not, and everything is divided by t.

    A row in a chunk keeps its label, the token after it unless that is a tag, if the row itself is masked.
    """
    noisy = torch.tensor([mask_token if hidden else token for token, hidden in zip(text.tokens, masked)])
    logits = logits_of(noisy, visible(text, sparse))
    last = len(text.tokens) - 1
    labels = plan_labels(text) | {last: last}
    for row, chunk in enumerate(text.chunk):
        if chunk > 0 and masked[row] and row < last and text.chunk[row + 1] == chunk and not text.tag[row + 1]:
            labels[row] = row + 1
    losses = (F.cross_entropy(logits[row], torch.tensor(text.tokens[target])) for row, target in labels.items())
    total = sum(losses, logits.new_zeros(()))
    return total / t / (len(text.tokens) - (text.prompt - 1))
