"""Layers for multi-token prediction that come with a model: one more layer of it, which reads its last hidden state.

Sources: "DeepSeek-V3" (arXiv 2412.19437), section 2.2; the released code of MiMo (``MiMoMTPLayers``) and Qwen3.5
(``mtp.*``). Row i is about token i + 1: it reads that token's embedding and the target's row i after the last norm,
each normed again, side by side, and predicts token i + 2 by the target's head. Where the target has not been yet, the
layer's own output takes the place of the target's row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pdkernels._validation import check, check_flag, check_type
from pdkernels.cache import Cache
from pdkernels.models.architectures import hybrid
from pdkernels.models.architectures.attention import cached_visibility
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.fused import linear, rms_norm
from pdkernels.models.architectures.hybrid import HybridConfig, HybridLayer
from pdkernels.models.architectures.layer import Layer, Matrix
from pdkernels.models.architectures.whole_step import PairedArguments, Parts, run_layers
from pdkernels.models.drafters.head import DrafterConfig, DrafterHead
from pdkernels.models.drafters.rows import new_rows, tables_of

_OP = "models.MtpConfig"


@dataclass(frozen=True)
class MtpConfig(DrafterConfig):
    """Sizes and variants of an `MtpHead`."""

    body: TransformerConfig
    """Of the target. The layer is one of it, of a `Hybrid` one with attention."""
    hidden_first: bool = False
    """Whether `fc` reads the hidden state before the embedding."""

    def __post_init__(self) -> None:
        body = self.body
        check_type(isinstance(body, TransformerConfig), _OP, "body", "be a TransformerConfig", type(body).__name__)
        check_flag(_OP, "hidden_first", self.hidden_first)
        check(body.experts is None, _OP, "body", "have no experts", body.experts)
        check(body.attention == "causal", _OP, "body", "be causal", body.attention)

    @property
    def layers(self) -> int:
        return 1

    @property
    def taps(self) -> tuple[int]:
        """What the target's last layer returns (`Transformer.tapped`)."""
        return (self.body.layers,)

    @property
    def target_hidden_size(self) -> int:
        return self.body.hidden_size


class MtpHead(DrafterHead):
    """A drafter for the method "mtp". It has the target's embedding and head, which it does not hold.

    Attributes:
        target_norm: ``(hidden_size,)``, the target's last norm.

    >>> body = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=24)
    >>> head = MtpHead(MtpConfig(body)).requires_grad_(False)
    >>> cache = head.new_cache(batch=1, capacity=8)
    >>> hidden = head(torch.randn(1, 3, 16), head.fused(torch.randn(1, 3, 1, 16)), cache=cache)
    >>> head.logits(hidden, torch.randn(11, 16)).shape
    torch.Size([1, 3, 11])
    """

    method = "mtp"
    """The decoding method that it is for."""

    embedding_norm: nn.Parameter
    hidden_norm: nn.Parameter
    target_norm: nn.Parameter
    head: None

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        body = config.body
        width = body.hidden_size
        for name in ("embedding", "head"):
            self.register_parameter(name, None)
        for name in ("embedding_norm", "hidden_norm", "norm", "target_norm"):
            self.register_parameter(name, nn.Parameter(torch.empty(width)))
        self.fc: Matrix = nn.Parameter(torch.empty(width, 2 * width))
        self._hybrid = isinstance(body, HybridConfig)
        layer = HybridLayer(body, body.mixers.index("attention")) if isinstance(body, HybridConfig) else Layer(body)
        self.layers = nn.ModuleList([layer])
        self.register_buffer("vocabulary", torch.arange(body.vocab_size))
        self.tables = tables_of(body)
        if not self.norm.is_meta:
            self.initialize_()

    @torch.no_grad()
    def initialize_(self) -> None:
        super().initialize_()
        if getattr(self.config.body, "centred_norms", False):
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.zero_()

    def fused(self, features: Tensor) -> Tensor:
        """What it reads of the target's `features` ``(batch, T, 1, hidden_size)``: ``(batch, T, hidden_size)``."""
        return self._normed(features[..., 0, :], "target_norm")

    def forward(self, embedded: Tensor, hidden: Tensor, *, cache: Cache, counts: Tensor | None = None) -> Tensor:
        """Its rows ``(batch, T, hidden_size)``, for `logits` and for the next forward's `hidden`.

        Args:
            embedded: ``(batch, T, hidden_size)``, the embeddings of the tokens after those of `hidden`.
            hidden: ``(batch, T, hidden_size)``, the `fused` features, or its own earlier rows where there are none yet.
            cache: of `new_cache`; `counts` as in a forward of `Transformer`.
        """
        with torch.no_grad():
            output = None if self._hybrid else self._whole(embedded, hidden, cache, counts)
            if output is not None:
                return output
            halves = self._normed(embedded, "embedding_norm"), self._normed(hidden, "hidden_norm")
            x = linear(torch.cat(halves[::-1] if self.config.hidden_first else halves, -1), self.fc)
            return self._normed(self._layer(x, cache, counts), "norm")

    def _whole(self, embedded: Tensor, hidden: Tensor, cache: Cache, counts: Tensor | None) -> Tensor | None:
        """A forward as one op; None: it must run part by part."""
        rows = new_rows(self.config.body, self.tables, hidden, hidden.shape[1], cache, counts)
        results = run_layers(self, hidden, rows, 0, 1, beside=embedded)
        return None if results is None else results[0]

    def parts(self) -> Parts:
        pairs = PairedArguments(x_first=self.config.hidden_first, normed_out=True)
        return super().parts()._replace(paired=(self.embedding_norm, self.hidden_norm, self.fc), pairs=pairs)

    def logits(self, hidden: Tensor, head: Any) -> Tensor:
        """``(..., vocab_size)`` of rows of a forward. `head`: the target's matrix."""
        return linear(hidden, head)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight, body = cast(Tensor, getattr(self, name)), self.config.body
        if isinstance(body, HybridConfig):
            return hybrid.norm(x, weight, body)
        return rms_norm(x, weight, body.norm_eps)

    def _layer(self, x: Tensor, cache: Cache, counts: Tensor | None) -> Tensor:
        body, layer, count = self.config.body, self.layers[0], x.shape[1]
        if not self._hybrid:
            rows = new_rows(body, self.tables, x, count, cache, counts)
            x, added = layer(x, None, partial(rows.attend_, layer=0), None)
            return cast(Tensor, x + added)
        lengths = cache.lengths.tolist() if cache.lengths.device.type == "cpu" else None
        visibility = cached_visibility(cache, lengths, counts, count, None)
        positions = cache.lengths[:, None] + torch.arange(count, device=x.device)
        rotation = self.tables.covering(cache.capacity + count, x.device, x.dtype).at(positions)
        output: Tensor = layer(x, hybrid.Rows(rotation, visibility, cast(Any, cache), counts, None, None))
        return output
