"""EAGLE-3 heads: a small autoregressive drafter that reads the hidden states of its target.

Source: "EAGLE-3" (arXiv 2503.01840). Row i is about token i + 1: it reads that token's embedding and the target's
features of row i, which have seen all tokens up to i, and predicts token i + 2. Where the target has not been yet, the
head's own output takes the place of features. In "P-EAGLE" (arXiv 2602.01469) a mask token and a learned row take the
places of both, so all guesses take one forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from pdkernels._validation import check, check_flag, check_type
from pdkernels.cache import Cache
from pdkernels.masks import TilePlan
from pdkernels.models.architectures.attention import NewRows
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.fused import linear, rms_norm
from pdkernels.models.architectures.layer import Layer, Matrix
from pdkernels.models.architectures.taps import checked_taps
from pdkernels.models.architectures.whole_step import LAYERS, NAMES, PairedArguments, Parts, run_layers
from pdkernels.models.drafters.head import DrafterConfig, DrafterHead
from pdkernels.models.drafters.rows import new_rows, tables_of

_OP = "models.EagleConfig"


@dataclass(frozen=True)
class EagleConfig(DrafterConfig):
    """Sizes and variants of an `EagleHead`."""

    body: TransformerConfig
    """Of its layers. `vocab_size` is that of the target."""
    taps: tuple[int, ...]
    """Layers of the target whose inputs it reads (`Transformer.tapped`)."""
    draft_vocab_size: int
    """Tokens that it can draft."""
    target_hidden_size: int
    norm_before_residual: bool = False
    """Whether the residual starts from the normed features."""
    norm_before_fc: bool = False
    """Whether all features are normed as one before they are fused."""
    fc_norm: bool = False
    """Whether the features of each tap are normed before they are fused."""
    norm_output: bool = False
    """Whether what is fed back is the output of the last norm (EAGLE 3.1)."""
    own_embedding: bool = True
    """False: tokens have the target's embedding."""
    mask_token: int | None = None
    """Of P-EAGLE, whose guesses are made in one forward: the token that stands for those before. None: one after the
    other."""

    def __post_init__(self) -> None:
        check_type(
            isinstance(self.body, TransformerConfig), _OP, "body", "be a TransformerConfig", type(self.body).__name__
        )
        checked_taps(_OP, self.taps, 2**20)
        for name in ("draft_vocab_size", "target_hidden_size"):
            value = getattr(self, name)
            check_type(type(value) is int, _OP, name, "be an int", type(value).__name__)
            check(value >= 1, _OP, name, "be at least 1", value)
        vocabulary = self.body.vocab_size
        check(
            self.draft_vocab_size <= vocabulary,
            _OP,
            "draft_vocab_size",
            f"be at most {vocabulary}",
            self.draft_vocab_size,
        )
        if self.mask_token is not None:
            check_type(type(self.mask_token) is int, _OP, "mask_token", "be an int", type(self.mask_token).__name__)
            check(0 <= self.mask_token < vocabulary, _OP, "mask_token", f"be in 0 .. {vocabulary - 1}", self.mask_token)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "own_embedding"):
            check_flag(_OP, name, getattr(self, name))
        twice = self.norm_before_fc and self.fc_norm
        check(not twice, _OP, "fc_norm", "be False with norm_before_fc", self.fc_norm)
        shared = not self.own_embedding and self.target_hidden_size != self.body.hidden_size
        check(not shared, _OP, "own_embedding", "be True where the target has another hidden size", False)


class EagleLayer(Layer):
    """The first layer: attention reads the embedding and the features side by side, each after its own norm."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config.body)
        self.norm_before_residual = config.norm_before_residual
        self.qkv: Matrix = nn.Parameter(torch.empty(len(cast(Tensor, self.qkv)), 2 * config.body.hidden_size))
        self.hidden_norm = nn.Parameter(torch.empty(config.body.hidden_size))

    def start(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual, and the input of attention's projections."""
        normed = rms_norm(hidden, self.hidden_norm, self.config.norm_eps)
        joined = torch.cat([self.normed(embedded), normed], -1)
        return normed if self.norm_before_residual else hidden, joined

    def finish(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The residual after attention, and the MLP's output, which is still to be added."""
        x, normed = self._sum(self.project_out(mixed), residual, self.mlp_norm)
        return x, self._mlp(normed)


LAYERS[EagleLayer] = NAMES


class EagleHead(DrafterHead):
    """A drafter for the method "eagle". Like its target it runs on a cache of its own, in which row i belongs to token
    i + 1.

    Attributes:
        vocabulary: ``(draft_vocab_size,)`` int64, the target's id of each token that it can draft, ascending.

    >>> body = TransformerConfig(vocab_size=11, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=24)
    >>> head = EagleHead(EagleConfig(body, taps=(0, 1, 2), draft_vocab_size=5, target_hidden_size=16)).requires_grad_(False)
    >>> cache = head.new_cache(batch=1, capacity=8)
    >>> features = head.fused(torch.randn(1, 3, 3, 16))
    >>> hidden = head(head.embed(torch.tensor([[1, 2, 3]])), features, cache=cache)
    >>> head.logits(hidden).shape, head.vocabulary[head.logits(hidden).argmax(-1)].shape
    (torch.Size([1, 3, 5]), torch.Size([1, 3]))
    """

    method = "eagle"
    """The decoding method that it is for."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        body = config.body
        taps, width = len(config.taps), config.target_hidden_size
        embedding = nn.Parameter(torch.empty(body.vocab_size, body.hidden_size)) if config.own_embedding else None
        self.register_parameter("embedding", embedding)
        self.fc: Matrix = nn.Parameter(torch.empty(body.hidden_size, taps * width))
        before = nn.Parameter(torch.empty(taps * width)) if config.norm_before_fc or config.fc_norm else None
        self.register_parameter("fc_norm", before)
        masked = None if config.mask_token is None else nn.Parameter(torch.empty(1, 1, taps * width))
        self.register_parameter("mask_hidden", masked)
        layers = [EagleLayer(config), *(Layer(body) for _ in range(body.layers - 1))]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.Parameter(torch.empty(body.hidden_size))
        self.head: Matrix = nn.Parameter(torch.empty(config.draft_vocab_size, body.hidden_size))
        self.register_buffer("vocabulary", torch.arange(config.draft_vocab_size))
        self.tables = tables_of(body)
        if not self.norm.is_meta:
            self.initialize_()
            if masked is not None:
                nn.init.normal_(masked)

    def fused(self, features: Tensor) -> Tensor:
        """What it reads of the target's `features` ``(batch, T, taps, target_hidden_size)``: ``(batch, T,
        hidden_size)``."""
        eps, flat = self.config.body.norm_eps, features.flatten(-2)
        weight = cast("Tensor | None", self.fc_norm)
        if self.config.norm_before_fc:
            assert weight is not None
            flat = rms_norm(flat, weight, eps)
        elif weight is not None:
            norms = weight.view(features.shape[-2:])
            flat = torch.cat([rms_norm(features[..., i, :], norm, eps) for i, norm in enumerate(norms)], -1)
        return linear(flat, self.fc)

    def masks(self) -> Tensor:
        """Of P-EAGLE: what it reads in place of features that are not there yet, ``(1, 1, hidden_size)``."""
        features = cast(Tensor, self.mask_hidden)
        return self.fused(features.unflatten(-1, (len(self.config.taps), -1)))

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        *,
        cache: Cache,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
        mask: TilePlan | Tensor | None = None,
    ) -> Tensor:
        """Its rows ``(batch, T, hidden_size)``, for `logits` and for the next forward's `hidden`.

        Args:
            embedded: ``(batch, T, hidden_size)``, the embeddings of the tokens after those of `hidden`.
            hidden: ``(batch, T, hidden_size)``, the `fused` features, or its own earlier rows where there are none yet.
            cache: of `new_cache`; like the other arguments as in a forward of `Transformer`.
        """
        with torch.no_grad():
            rows = new_rows(self.config.body, self.tables, embedded, embedded.shape[1], cache, counts, positions, mask)
            results = run_layers(self, hidden, rows, 0, len(self.layers), beside=embedded)
            return self.run(embedded, hidden, rows) if results is None else results[0]

    def parts(self) -> Parts:
        config, first = self.config, cast(EagleLayer, self.layers[0])
        pairs = PairedArguments(normed_residual=config.norm_before_residual, normed_out=config.norm_output)
        return super().parts()._replace(paired=(first.attention_norm, first.hidden_norm, None), pairs=pairs)

    def run(self, embedded: Tensor, hidden: Tensor, rows: NewRows) -> Tensor:
        """A forward over prepared rows."""
        first = cast(EagleLayer, self.layers[0])
        residual, normed = first.start(embedded, hidden)
        x, added = first.finish(residual, rows.attend_(first.project(normed), 0))
        for index in range(1, len(self.layers)):
            x, added = self.layers[index](x, added, partial(rows.attend_, layer=index), None)
        return self.finished(x + added)

    def finished(self, x: Tensor) -> Tensor:
        """The rows of a forward from the residual after the last layer."""
        return rms_norm(x, self.norm, self.config.body.norm_eps) if self.config.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        """``(..., draft_vocab_size)`` of rows of a forward."""
        normed = hidden if self.config.norm_output else rms_norm(hidden, self.norm, self.config.body.norm_eps)
        return linear(normed, self.head)
