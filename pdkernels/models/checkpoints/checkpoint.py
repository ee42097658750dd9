"""A checkpoint before its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch

from pdkernels.models.architectures.config import RecurrentDepthConfig, TransformerConfig
from pdkernels.models.architectures.packing import Stated
from pdkernels.models.files.folder import Weights
from pdkernels.models.files.layout import Layout
from pdkernels.models.plan_tokens import PlanTokens
from pdkernels.models.text.tokenizers import Tokenizer

Config: TypeAlias = TransformerConfig | RecurrentDepthConfig


class Checkpoint(NamedTuple):
    """Configuration, tokenizer and readers of a checkpoint, before its weights are read."""

    config: Config
    layout: Layout
    dtype: torch.dtype
    state: Callable[[torch.dtype | None, torch.device], Mapping[str, Stated]]
    """Reads our parameters to a device, in this dtype; None: in that of the file, or for GGUF the checkpoint's."""
    tokenizer: Tokenizer | None
    end_tokens: tuple[int, ...]
    mask_token: int | None = None
    plan_tokens: PlanTokens | None = None
    weights: Weights | None = None
    """Its files, if parts of tensors can be read from them."""
    generation_config: Mapping[str, Any] = MappingProxyType({})
    """The fields of its generation_config.json."""

    def with_mask_token(self) -> Checkpoint:
        """The checkpoint with one more id, for the mask token."""
        size = self.config.vocab_size
        return self._replace(config=replace(self.config, vocab_size=size + 1), mask_token=size)
