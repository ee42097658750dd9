"""What drafters that read hidden states have in common: weights beside those of their layers, a cache, an embedding,
packed matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from pdkernels._validation import message
from pdkernels.cache import Cache
from pdkernels.models.architectures.caches import new_cache
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.layer import Matrix
from pdkernels.models.architectures.packing import adopt_, quantized_state
from pdkernels.models.architectures.whole_step import Parts
from pdkernels.models.architectures.windows import Window
from pdkernels.models.drafters.chain import DrafterBinding
from pdkernels.models.drafters.rows import DRAFTER_MATRICES

if TYPE_CHECKING:
    from typing_extensions import Self


# What an instance may have replaced.
_METHODS = {"forward", "run", "embed", "logits", "finished", "fused", "_compiled_call_impl"}


class DrafterConfig:
    """What caches read."""

    body: TransformerConfig

    @property
    def layers(self) -> int:
        return self.body.layers

    @property
    def kv_heads(self) -> int:
        return self.body.kv_heads

    @property
    def head_dim(self) -> int:
        return self.body.head_dim


class DrafterHead(nn.Module):
    """A drafter with a `config`, which alone says its parameters."""

    config: Any
    norm: Tensor
    vocabulary: Tensor
    """``(draft_vocab_size,)`` int64, the target's id of each token that it can draft."""
    embedding: Matrix | None
    head: Matrix | None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.binding = DrafterBinding()

    @torch.no_grad()
    def initialize_(self) -> None:
        """Normal weights, and norms and biases that change nothing."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[1]))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.device

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        kind: Literal["contiguous", "paged"] = "contiguous",
        page_size: int = 16,
        drafts: int | None = None,
    ) -> Cache:
        """As `Transformer.new_cache`. Rows that are drafted need room past the text."""
        return new_cache(self, batch, capacity, kind, page_size, windows=self.cached_windows, drafts=drafts)

    @property
    def cached_windows(self) -> Sequence[Window | None]:
        """Of each layer, what rows to come see of the cached ones; empty: all of them."""
        return ()

    @property
    def is_plain(self) -> bool:
        """Whether a call is a forward of one of our classes, and nothing else."""
        hooked = self._forward_hooks or self._forward_pre_hooks
        is_ours = type(self).__module__.startswith(__name__.rpartition(".")[0])
        return is_ours and not hooked and vars(self).keys().isdisjoint(_METHODS)

    def parts(self) -> Parts:
        """What a forward as one op is bound to beside the layers."""
        return Parts(self.config.body, self.embedding, self.head)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.binding.drop()  # or what moves would stay where it was too
        return cast("Self", super()._apply(fn, recurse))  # type: ignore[no-untyped-call]

    def embed(self, tokens: Tensor) -> Tensor:
        """The rows of its own embedding."""
        if self.embedding is None:
            op = f"{type(self).__name__}.embed"
            raise ValueError(message(op, "own_embedding", "be True", False, "Use the target's `embed`."))
        return nn.functional.embedding(tokens, cast(Tensor, self.embedding))

    def quantized(self, format: str = "int8", *, group: int | None = None, skip: Any = ()) -> Self:
        """The same head with quantised matrices, see `pdkernels.quantize`. Its own embedding stays as numbers."""
        state = quantized_state(self, format, group, skip, False, matrices=DRAFTER_MATRICES)
        state["vocabulary"] = self.vocabulary
        with torch.device("meta"):
            head = type(self)(self.config)
        adopt_(head, state)
        return head.requires_grad_(False).eval()
