"""Checkpoints of which each rank reads its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pdkernels as pd
import pdkernels.distributed
from pdkernels.models.checkpoints import llada2
from pdkernels.models.files.folder import Weights
from tests.models.test_zoo import write
from tests.support.checkpoints import LLAMA, random_checkpoint

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 90,
}
BIASED = {**LLAMA, **SIZES, "attention_bias": True, "mlp_bias": True}
TIED = {**LLAMA, **SIZES, "tie_word_embeddings": True}

LLADA2 = {
    "model_type": "llada2_moe",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "first_k_dense_replace": 2,
    "partial_rotary_factor": 0.5,
    "use_bias": False,
    "use_qk_norm": True,
    "mask_token_id": 89,
}

RECURRENT = {
    "vocab_size": 90,
    "hidden_size": 32,
    "heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "mean_recurrence": 3,
}


def folder_of(path: Path, kind: str) -> torch.Tensor:
    """Writes a checkpoint; returns tokens for it."""
    if kind == "huginn":
        config = pd.models.RecurrentDepthConfig(**RECURRENT)
        fields = pd.models.to_huginn_config(config)
        state = pd.models.to_huginn_state_dict(pd.models.RecurrentDepth(config).state_dict(), config)
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    else:
        fields = BIASED if kind == "biased" else TIED
        state = random_checkpoint(fields, dtype=torch.float32)
    write(path, fields, state)
    return torch.arange(10)[None] * 3 % fields["vocab_size"]


def read(group: Any, path: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    largest = 0

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    def refuse(self: Weights) -> Any:
        raise AssertionError("all weights at once")

    whole, part, saved = Weights.whole, Weights.part, Weights.tensors
    Weights.tensors = refuse  # type: ignore[method-assign]
    Weights.whole = lambda self, name: seen(whole(self, name))  # type: ignore[method-assign]
    Weights.part = lambda self, *where: seen(part(self, *where))  # type: ignore[method-assign]
    try:
        model = pd.distributed.load(path, group)
    finally:
        Weights.whole, Weights.part, Weights.tensors = whole, part, saved  # type: ignore[method-assign]
    logits: Any = model(tokens)
    return logits.full_tensor(), sum(p.numel() for p in model.parameters()), largest


@pytest.mark.parametrize("kind", ["biased", "tied", "huginn"])
def test_every_rank_reads_its_part(ranks, tmp_path: Path, kind: str) -> None:
    tokens = folder_of(tmp_path, kind)
    model = pd.models.load(tmp_path)
    logits, numbers = model(tokens), sum(p.numel() for p in model.parameters())
    replicated = sum(p.numel() for name, p in model.named_parameters() if "norm" in name or name == "adapter")
    matrix = max(p.numel() for name, p in model.named_parameters() if name != "adapter")
    for found, mine, largest in ranks.run(2, read, tmp_path, tokens):
        scale = logits.abs().max()
        assert (found - logits).abs().max() <= 3e-5 * max(scale, 1)
        # A half of everything but norms and biases that are added once; the vocabulary's halves differ by less than 8 rows.
        assert mine <= (numbers - replicated) / 2 + replicated + 8 * 2 * model.config.hidden_size
        assert largest <= max(matrix // 2 + 8 * model.config.hidden_size, replicated)


def test_models_of_the_package_are_cut_after_reading(ranks) -> None:
    assert ranks.run(2, sizes_of, "tiny-recurrent")[0] == (2, 2 * 32)


def sizes_of(group: Any, name: str) -> tuple[int, int]:
    model: Any = pd.distributed.load(name, group)
    return model.config.heads, model.core_layers[0].output.shape[1]


def test_a_tied_head_that_differs_is_refused(ranks, tmp_path: Path) -> None:
    state = random_checkpoint(TIED, dtype=torch.float32)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1] += 1
    write(tmp_path, TIED, state)
    found = ranks.run(2, refusal, tmp_path)
    assert found[0] == "" and "lm_head.weight must equal the embedding of a tied model" in found[1]


def refusal(group: Any, path: Path) -> str:
    try:
        pd.distributed.load(path, group)
    except ValueError as error:
        return str(error)
    return ""


def test_rows_in_another_order(ranks, tmp_path: Path) -> None:
    """Of LLaDA2, whose rotations turn a part of each head, here without experts."""
    fields = {**LLADA2, **{name: SIZES[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}}
    config = llada2.from_llada2_config(fields)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(shape, generator=generator) * 0.3
        for _, parts in llada2.layout(config).parts()
        for name, shape in parts.items()
    }
    write(tmp_path, fields, state)
    tokens = torch.arange(10)[None] * 3 % 90
    expected: Any = pd.models.load(tmp_path)(tokens)
    for found in ranks.run(2, logits_of, tmp_path, tokens):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def logits_of(group: Any, path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model: Any = pd.distributed.load(path, group)
    logits: torch.Tensor = model(tokens).full_tensor()
    return logits
