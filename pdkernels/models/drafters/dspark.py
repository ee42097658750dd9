"""DSpark heads: a DFlash head whose guesses are made one after the other, each with a bias for the token before it.

Source: speculators 0.9 (models/dspark). The bias is of low rank: a row of W1 for the token before, times W2. In the
variant "gated" the row is scaled by a gate that reads the hidden state, in "rnn" a state goes along the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdkernels._validation import check, check_choice, check_flag, check_int, check_type
from pdkernels.models.architectures.fused import linear
from pdkernels.models.architectures.layer import Matrix
from pdkernels.models.drafters.dflash import DFlashConfig, DFlashHead, Walk

_OP = "models.DSparkConfig"
MarkovKind: TypeAlias = Literal["vanilla", "gated", "rnn"]
MIXES: dict[MarkovKind, tuple[int, int]] = {"vanilla": (0, 0), "gated": (1, 1), "rnn": (2, 3)}
"""How many vectors of `markov_rank` the mixing matrix reads beside the row, and how many it gives."""


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """Sizes and variants of a `DSparkHead`."""

    sample_from_anchor: bool = True
    markov_rank: int = 256
    """Rank of the bias; 0: there is none, and guesses are those of a `DFlashHead`."""
    markov_kind: MarkovKind = "vanilla"
    """What the bias depends on beside the token before: "vanilla" on nothing, "gated" on the row's hidden state, "rnn"
    on all rows and tokens before it."""
    confidence: bool = True
    """Whether it has a head that predicts acceptance (`DSparkHead.confidence`)."""
    confidence_reads_token: bool = True
    """Whether that head also reads the token before, as a row of W1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type(type(self.markov_rank) is int, _OP, "markov_rank", "be an int", type(self.markov_rank).__name__)
        check_int(_OP, "markov_rank", self.markov_rank, 0)
        check_choice(_OP, "markov_kind", self.markov_kind, get_args(MarkovKind))
        for name in ("confidence", "confidence_reads_token"):
            check_flag(_OP, name, getattr(self, name))
        reads = self.confidence and self.confidence_reads_token
        check(not reads or self.markov_rank > 0, _OP, "confidence_reads_token", "be False with markov_rank 0", True)


class DSparkHead(DFlashHead):
    """A drafter for the method "dflash", which draws the guesses of a block one after the other.

    >>> from pdkernels.models import TransformerConfig
    >>> body = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=24)
    >>> config = DSparkConfig(body, taps=(1, 2), block_size=4, mask_token=10, draft_vocab_size=5, markov_rank=8)
    >>> head = DSparkHead(config).requires_grad_(False)
    >>> walk = head.walk(torch.randn(1, 4, 16), torch.tensor([[3]]))
    >>> first = walk(0, torch.tensor([[3]]))
    >>> walk(1, head.vocabulary[first.argmax(-1)]).shape
    torch.Size([1, 1, 5])
    """

    markov_in: nn.Parameter | None
    markov_out: Matrix | None
    markov_mix: nn.Parameter | None
    markov_mix_bias: nn.Parameter | None
    confidence_out: nn.Parameter | None
    confidence_bias: nn.Parameter | None

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        rank, width = config.markov_rank, config.body.hidden_size
        mixed, mixes = MIXES[config.markov_kind]
        sizes: dict[str, tuple[int, ...] | None] = {
            "markov_in": (config.body.vocab_size, rank),
            "markov_out": (config.draft_vocab_size, rank),
            "markov_mix": (mixes * rank, width + mixed * rank) if mixes else None,
            "markov_mix_bias": (mixes * rank,) if mixes else None,
        }
        if not rank:
            sizes = dict.fromkeys(sizes)
        reads = width + rank * config.confidence_reads_token
        sizes |= {"confidence_out": (1, reads), "confidence_bias": (1,)} if config.confidence else {}
        for name in ("markov_in", "markov_out", "markov_mix", "markov_mix_bias", "confidence_out", "confidence_bias"):
            size = sizes.get(name)
            self.register_parameter(name, None if size is None else nn.Parameter(torch.empty(size)))
        if not self.norm.is_meta:
            self.initialize_()

    @property
    def in_order(self) -> bool:  # type: ignore[override]
        return bool(self.config.markov_rank)

    def walk(self, hidden: Tensor, known: Tensor, head: Any = None, before: Tensor | None = None) -> Walk:
        """As of `DFlashHead`: adds the bias of the token before to the logits of each guess."""
        return _Biased(self, hidden, known, head)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits ``(batch, rows)`` of the probability that a row's guess is accepted.

        Args:
            hidden: ``(batch, rows, hidden_size)`` of a forward.
            previous: ``(batch, rows)`` int64, the token before each row's guess.
        """
        assert self.confidence_out is not None
        features = self.normed(hidden)
        if self.config.confidence_reads_token:
            assert self.markov_in is not None
            features = torch.cat([features, F.embedding(previous, self.markov_in).to(features.dtype)], -1)
        return linear(features, self.confidence_out, self.confidence_bias)[..., 0]


class _Biased:
    """The walk of a `DSparkHead`."""

    def __init__(self, head: DSparkHead, hidden: Tensor, known_token: Tensor, shared: Any) -> None:
        self._head, self._kind, self._first = head, head.config.markov_kind, head.config.first
        self._normed = head.normed(hidden)
        self._logits = head.scores(self._normed[:, self._first :], shared)
        if self._kind == "rnn":
            self._state = self._normed.new_zeros(len(hidden), 1, head.config.markov_rank)
            if self._first:  # the row of the known token moves the state, and guesses nothing
                self._moved(0, F.embedding(known_token, cast(Tensor, head.markov_in)))

    def __call__(self, number: int, previous: Tensor) -> Tensor:
        head, row = self._head, self._first + number
        embedded = F.embedding(previous, cast(Tensor, head.markov_in))
        if self._kind == "gated":
            mixed = torch.cat([self._normed[:, row : row + 1], embedded], -1)
            embedded = linear(mixed, cast(Tensor, head.markov_mix), head.markov_mix_bias).sigmoid() * embedded
        elif self._kind == "rnn":
            embedded = self._moved(row, embedded)
        assert head.markov_out is not None
        return self._logits[:, number : number + 1] + linear(embedded, head.markov_out)

    def _moved(self, row: int, embedded: Tensor) -> Tensor:
        """Moves the state over a row; what the row reads of it."""
        mixed = torch.cat([self._state, embedded, self._normed[:, row : row + 1]], -1)
        product = linear(mixed, cast(Tensor, self._head.markov_mix), self._head.markov_mix_bias)
        gate, candidate, read = product.chunk(3, -1)
        gate = gate.sigmoid()
        self._state = gate * self._state + (1.0 - gate) * candidate.tanh()
        return read.tanh()
