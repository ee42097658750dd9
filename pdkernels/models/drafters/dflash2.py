"""DFlash 2 heads: a DFlash head with short convolutions around attention and MLP, which chooses its guesses one after the
other among the likeliest tokens of each row.

Source: speculators 0.9 (models/dflash2), which follows Z Lab's code. A convolution has taps of its own for each channel,
and adds taps that the row's input decides, one for each group of channels. It sees the rows of its block alone. A
candidate's score is its logit and a bilinear form of the token before, the row's hidden state and the candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdkernels._validation import check, check_type
from pdkernels.models.architectures.fused import linear
from pdkernels.models.architectures.layer import Layer
from pdkernels.models.architectures.lora import Added
from pdkernels.models.drafters.dflash import DFlashConfig, DFlashHead, Walk

_OP = "models.DFlash2Config"


@dataclass(frozen=True)
class DFlash2Config(DFlashConfig):
    """Sizes and variants of a `DFlash2Head`."""

    whole_blocks: bool = True
    conv_taps: int = 2
    """Rows that a convolution reads: a row and those before it in its block."""
    conv_group: int = 16
    """Channels that share the taps which a row decides."""
    selector_rank: int = 256
    candidates: int = 16
    """Tokens of a row among which a guess is chosen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("conv_taps", "conv_group", "selector_rank", "candidates"):
            value = getattr(self, name)
            check_type(type(value) is int, _OP, name, "be an int", type(value).__name__)
            check(value >= 1, _OP, name, "be at least 1", value)
        size, width = self.body.vocab_size, self.body.hidden_size
        check(self.draft_vocab_size == size, _OP, "draft_vocab_size", f"be {size}, all tokens", self.draft_vocab_size)
        check(self.conv_taps <= self.block_size, _OP, "conv_taps", f"be at most {self.block_size}", self.conv_taps)
        check(width % self.conv_group == 0, _OP, "conv_group", f"divide the {width} channels", self.conv_group)
        check(self.candidates <= size, _OP, "candidates", f"be at most {size}, all tokens", self.candidates)


class DFlash2Layer(Layer):
    """A layer with a convolution before and after attention, and before and after the MLP.

    The taps of both convolutions of a sublayer are parameters ``(2 * taps, hidden_size)``; what a row adds to them is a
    product of its normed input.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config.body)
        self.taps, self.group = config.conv_taps, config.conv_group
        width = config.body.hidden_size
        for sublayer in ("attention", "mlp"):
            self.register_parameter(f"{sublayer}_taps", nn.Parameter(torch.empty(2 * self.taps, width)))
            rows = 2 * self.taps * (width // self.group)
            self.register_parameter(f"{sublayer}_row_taps", nn.Parameter(torch.empty(rows, width)))

    def forward(
        self,
        x: Tensor,
        added: Tensor | None,
        attend: Callable[..., Tensor],
        adapted: Tensor | None,
        lora: Added | None = None,
        **routing: Any,
    ) -> tuple[Tensor, Tensor]:
        """As of `Layer`, over the rows of one block."""
        x, normed = (x, self.normed(x)) if added is None else self._sum(added, x, self.attention_norm)
        normed, after = self._convolved("attention", normed)
        x, normed = self._sum(after(self.project_out(attend(self.project(normed)))), x, self.mlp_norm)
        normed, after = self._convolved("mlp", normed)
        return x, after(self._mlp(normed))

    def _convolved(self, sublayer: str, normed: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The input of a sublayer, and what is done to its output."""
        before, after = getattr(self, f"{sublayer}_taps").view(2, self.taps, -1)
        row_taps = linear(normed, getattr(self, f"{sublayer}_row_taps")).unflatten(-1, (2, self.taps, -1))
        first, second = row_taps.unbind(-3)
        return self._convolve(normed, before, first), lambda out: self._convolve(out, after, second)

    def _convolve(self, rows: Tensor, taps: Tensor, row_taps: Tensor) -> Tensor:
        """The sum over taps of earlier rows of the block, each channel times its tap and its group's."""
        groups = rows.unflatten(-1, (-1, self.group))
        total = torch.zeros_like(groups)
        for tap, channel_taps in enumerate(taps.unflatten(-1, (-1, self.group))):
            shifted = F.pad(groups, (0, 0, 0, 0, tap, 0))[:, : rows.shape[1]]
            total = total + shifted * (channel_taps + row_taps[..., tap, :, None])
        return total.flatten(-2)


class DFlash2Head(DFlashHead):
    """A drafter for the method "dflash", which chooses the guesses of a block one after the other.

    >>> from pdkernels.models import TransformerConfig
    >>> body = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=24)
    >>> sizes = dict(block_size=4, mask_token=10, draft_vocab_size=11, selector_rank=8, candidates=3)
    >>> head = DFlash2Head(DFlash2Config(body, taps=(1, 2), **sizes)).requires_grad_(False)
    >>> logits = head.walk(torch.randn(1, 4, 16), torch.tensor([[3]]))(0, torch.tensor([[3]]))
    >>> int(logits.isfinite().sum())  # the candidates
    3
    """

    in_order = True
    predecessors: nn.Parameter
    successors: nn.Parameter
    selector_in: nn.Parameter

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        size, rank = config.body.vocab_size, config.selector_rank
        self.predecessors = nn.Parameter(torch.empty(size, rank))
        self.successors = nn.Parameter(torch.empty(size, rank))
        self.selector_in = nn.Parameter(torch.empty(rank, config.body.hidden_size))
        if not self.norm.is_meta:
            self.initialize_()

    def new_layer(self) -> Layer:
        return DFlash2Layer(self.config)

    @torch.no_grad()
    def initialize_(self) -> None:
        """As of `DrafterHead`, with convolutions that change nothing."""
        super().initialize_()
        taps = self.config.conv_taps
        for layer in self.layers:
            for sublayer in ("attention", "mlp"):
                cast(Tensor, getattr(layer, f"{sublayer}_row_taps")).zero_()
                cast(Tensor, getattr(layer, f"{sublayer}_taps")).zero_()[::taps] = 1.0

    def walk(self, hidden: Tensor, known: Tensor, head: Any = None, before: Tensor | None = None) -> Walk:
        """As of `DFlashHead`: the scores of a row's candidates, after the token before; other tokens have -inf."""
        normed = self.normed(hidden)[:, self.config.first :]
        logits = self.scores(normed, head)
        unary, candidates = logits.topk(self.config.candidates, -1)
        projected = linear(normed, self.selector_in)

        def scores(number: int, previous: Tensor) -> Tensor:
            context = F.embedding(previous[:, 0], self.predecessors) * projected[:, number]
            chosen = candidates[:, number]
            total = unary[:, number] + (context[:, None] * F.embedding(chosen, self.successors)).sum(-1)
            return torch.full_like(logits[:, number], -torch.inf).scatter(1, chosen, total)[:, None]

        return scores
