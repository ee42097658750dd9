"""Drafters with random weights for any causal model of the tests."""

from __future__ import annotations

from typing import Any

import torch

from pdkernels.models import DFlashHead, EagleConfig, EagleHead, MtpConfig, MtpHead, Transformer, TransformerConfig
from pdkernels.models.checkpoints.drafters import dflash_kinds


def eagle_head(model: Any, seed: int = 0, taps: tuple[int, ...] = (), **changes: Any) -> EagleHead:
    """A head for a model, of fewer tokens than the model has, which shares its embedding."""
    config = model.config
    body = TransformerConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=16,
        intermediate_size=24,
        tied_head=False,
    )
    known: dict[str, Any] = {"draft_vocab_size": max(1, config.vocab_size - 2), "own_embedding": False}
    known["target_hidden_size"] = config.hidden_size
    made = EagleConfig(body, taps or (0, config.layers), **{**known, **changes})
    torch.manual_seed(seed)
    return EagleHead(made).to(model.device, model.dtype).requires_grad_(False).eval()


def dflash_head(model: Any, seed: int = 0, taps: tuple[int, ...] = (), **changes: Any) -> DFlashHead:
    """A block drafter for a model, of two layers, which shares its embedding. `kind`: "dflash", "dspark", "dflash2" or "xpress"."""
    config, kind = model.config, changes.pop("kind", "dflash")
    body = TransformerConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        intermediate_size=24,
        tied_head=False,
        qk_norm=True,
        windows=changes.pop("windows", ()),
    )
    known: dict[str, Any] = {"draft_vocab_size": max(1, config.vocab_size - 2), "block_size": 5, "mask_token": 0}
    if kind == "dspark":
        known |= {"markov_rank": 8, "sample_from_anchor": False}
    if kind == "dflash2":
        known |= {"draft_vocab_size": config.vocab_size, "selector_rank": 8, "candidates": min(4, config.vocab_size)}
        known |= {"conv_group": 2, "whole_blocks": False}
    if kind == "xpress":
        known |= {"refiner_rank": 8, "passes": 2}
    config_class: Any = dflash_kinds.config_class(kind)
    torch.manual_seed(seed)
    head = dflash_kinds.new_head(config_class(body, taps or (0, config.layers), **{**known, **changes}))
    for name, parameter in head.named_parameters():
        if "taps" in name or name.startswith(("markov", "predecessors", "successors", "selector", "refiner")):
            parameter.data = torch.randn_like(parameter) * 0.5
    for layer in head.layers:  # so that guesses differ from row to row
        layer.down.data *= 4
        layer.output.data *= 4
    return head.to(model.device, model.dtype).requires_grad_(False).eval()


def mtp_head(model: Any, seed: int = 0, **changes: Any) -> MtpHead:
    """A next-token layer for a model, with weights that make its guesses differ from row to row."""
    torch.manual_seed(seed)
    head = MtpHead(MtpConfig(model.config, **changes))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        head.target_norm.copy_(model.norm)
    return head.to(model.device, model.dtype).requires_grad_(False).eval()


def small_drafter(model: Any, seed: int = 0) -> Transformer:
    """A transformer of one layer with the vocabulary of a model."""
    config = TransformerConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=16,
        intermediate_size=24,
    )
    torch.manual_seed(seed)
    made = Transformer(config)
    for parameter in made.parameters():
        if parameter.dim() == 2:
            parameter.data *= 20  # so that its choices differ from row to row
    return made.to(model.device, model.dtype).requires_grad_(False).eval()


def with_drafters(model: Any) -> Any:
    """The model, with a drafter for every method that needs one."""
    made = {"draft_model": small_drafter, "eagle": eagle_head, "dflash": dflash_head, "mtp": mtp_head}
    model.drafters = {method: make(model) for method, make in made.items()}
    return model
