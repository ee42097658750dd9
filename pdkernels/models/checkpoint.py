"""A checkpoint whose weights are not yet read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from pdkernels.models.config import RecurrentDepthConfig, TransformerConfig
from pdkernels.models.layout import Layout
from pdkernels.models.plan_tokens import PlanTokens
from pdkernels.models.tokenizers import Tokenizer

Config: TypeAlias = TransformerConfig | RecurrentDepthConfig


class Checkpoint(NamedTuple):
    """What is known of a checkpoint before its weights are read."""

    config: Config
    layout: Layout
    dtype: torch.dtype
    state: Callable[[], dict[str, torch.Tensor]]
    """Reads our parameters."""
    tokenizer: Tokenizer | None
    end_tokens: tuple[int, ...]
    mask_token: int | None = None
    plan_tokens: PlanTokens | None = None
