"""XPress heads: a DFlash head whose guesses are refined a few times, all at once, each by the guesses before it.

Source: speculators 0.9 (models/xpress). A row's bias is a readout of the token before, the row's hidden state and the mean of
the block's, mixed over the rows before it, and an MLP, all of `rank` numbers. The first pass reads what the rows guess alone,
each later one the guesses of the pass before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdkernels._validation import check_int, check_type
from pdkernels.models.architectures.fused import linear
from pdkernels.models.architectures.layer import Matrix
from pdkernels.models.drafters.dflash import DFlashConfig, DFlashHead, Walk

_OP = "models.XPressConfig"


@dataclass(frozen=True)
class XPressConfig(DFlashConfig):
    """Sizes of an `XPressHead`."""

    refiner_rank: int = 256
    refiner_ratio: int = 2
    """Rows of its MLP, in multiples of the rank."""
    passes: int = 6
    """How often guesses are refined."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("refiner_rank", 1), ("refiner_ratio", 1), ("passes", 0)):
            value = getattr(self, name)
            check_type(type(value) is int, _OP, name, "be an int", type(value).__name__)
            check_int(_OP, name, value, least)


class XPressHead(DFlashHead):
    """A drafter for the method "dflash", which refines the guesses of a block together.

    >>> from pdkernels.models import TransformerConfig
    >>> body = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=24)
    >>> config = XPressConfig(body, taps=(1, 2), block_size=4, mask_token=10, draft_vocab_size=5, refiner_rank=8)
    >>> head = XPressHead(config).requires_grad_(False)
    >>> walk = head.walk(torch.randn(1, 4, 16), torch.tensor([[3]]), before=torch.tensor([[7]]))
    >>> walk(2, torch.tensor([[3]])).shape
    torch.Size([1, 1, 5])
    """

    in_order = True
    whole_rows = True
    refiner_tokens: nn.Parameter
    refiner_row: nn.Parameter
    refiner_block: nn.Parameter
    refiner_in: nn.Parameter
    refiner_mix: nn.Parameter
    refiner_gate_up: nn.Parameter
    refiner_down: nn.Parameter
    refiner_out: Matrix

    def __init__(self, config: XPressConfig) -> None:
        super().__init__(config)
        rank, width, size = config.refiner_rank, config.body.hidden_size, config.block_size
        inner = rank * config.refiner_ratio
        shapes = {
            "refiner_tokens": (config.body.vocab_size, rank),
            "refiner_row": (rank, width),
            "refiner_block": (rank, width),
            "refiner_in": (rank, 3 * rank),
            "refiner_mix": (rank * size, size),
            "refiner_gate_up": (2 * inner, rank),
            "refiner_down": (rank, inner),
            "refiner_out": (config.draft_vocab_size, rank),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        if not self.norm.is_meta:
            self.initialize_()

    @torch.no_grad()
    def initialize_(self) -> None:
        """As of `DrafterHead`, with rows that are not mixed."""
        super().initialize_()
        if hasattr(self, "refiner_mix"):
            self.refiner_mix.zero_()

    def walk(self, hidden: Tensor, known: Tensor, head: Any = None, before: Tensor | None = None) -> Walk:
        """As of `DFlashHead`, of all rows of a block: the refined logits, whatever was chosen from them."""
        first, normed = self.config.first, self.normed(hidden)
        logits = self.scores(normed, head)
        mean = normed.mean(1, keepdim=True).expand_as(normed)
        features = torch.cat([linear(normed, self.refiner_row), linear(mean, self.refiner_block)], -1)
        start = known if not first else torch.cat([known if before is None else before, known], 1)
        refined = logits
        for _ in range(self.config.passes):
            guesses = self.vocabulary[refined.argmax(-1)]
            refined = logits + self._bias(torch.cat([start, guesses[:, first:-1]], 1), features)
        return lambda number, previous: refined[:, first + number : first + number + 1]

    def _bias(self, previous: Tensor, features: Tensor) -> Tensor:
        """What is added to the logits of each row after the token `previous` ``(batch, block_size)``."""
        embedded = F.embedding(previous, self.refiner_tokens).to(features.dtype)
        x = linear(torch.cat([features, embedded], -1), self.refiner_in)
        mixed, size, rows = torch.zeros_like(x), self.config.block_size, x.shape[1]
        for row, shares in enumerate(self.refiner_mix.view(-1, size, size).unbind(-1)[:rows]):
            mixed[:, row:] += shares[:, row:rows].T * x[:, row : row + 1]  # of itself and of those after it
        x = x + mixed
        gate, up = linear(x, self.refiner_gate_up).chunk(2, -1)
        return linear(x + linear(F.silu(gate) * up, self.refiner_down), self.refiner_out)
