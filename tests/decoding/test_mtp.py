"""Multi-token prediction: the drafts and steps of the plain form on transformers' layers, hybrid targets, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.models import Hybrid, HybridConfig
from pdkernels.reference.eagle import eagle as plain
from tests.support.drafters import dflash_head, eagle_head, mtp_head
from tests.support.tri_mode import small_transformer

PROMPTS = [[3, 1, 4, 1, 5], [4], [2, 0]]


@pytest.mark.parametrize("kind", ["mimo", "qwen3_5_text"])
def test_the_steps_of_the_plain_form(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="compares with its layers", minversion="5.15")
    from tests.models.test_mtp_folders import Published

    published = Published(kind, 1, vocab_size=7)  # so few tokens that random drafts are often right
    folder = published.save(tmp_path / "model")
    # Recurrent states have no kernel in fp64.
    model: Any = pd.models.load(folder, dtype=torch.float64 if kind == "mimo" else torch.float32, drafter=folder)
    several = 0

    def best(row: torch.Tensor, position: int) -> int:
        return int(row.argmax())

    for size in (2, 5):
        for prompt in PROMPTS:
            with torch.inference_mode():
                expected = plain(
                    lambda text: published.model(text[None]).logits[0],
                    published.features,
                    published.rows,
                    lambda row, position: best(published.head(row), position),
                    best,
                    prompt,
                    14,
                    size,
                )
            options: dict[str, Any] = {"block_size": size, "max_new_tokens": 14, "end_tokens": (), "trace": True}
            found = generate(model, prompt, "mtp", **options)
            assert found.tokens.tolist() == expected.tokens and found.stats.accepted[0] == expected.accepted
            assert [list(step.draft) for step in found.stats.trace[0]] == expected.drafts
            several += sum(count > 1 for count in expected.accepted)
    assert several > 2


def a_hybrid(seed: int, dtype: torch.dtype) -> Hybrid:
    """As Qwen3.5 is built."""
    config = HybridConfig(
        vocab_size=7, hidden_size=32, layers=3, heads=2, kv_heads=1, head_dim=16, intermediate_size=48, qk_norm=True,
        mixers=("delta", "attention", "delta"), key_heads=2, value_heads=4, key_dim=16, value_dim=16, rotary_dim=8,
        gated_attention=True, centred_norms=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Hybrid(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 12
    return model.to(dtype).requires_grad_(False).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hybrid_targets(dtype: torch.dtype) -> None:
    """All drafters that read hidden states, in chains and trees."""
    accepted = 0
    model: Any = a_hybrid(0, dtype)
    model.drafters = {"mtp": mtp_head(model), "eagle": eagle_head(model), "dflash": dflash_head(model)}
    for drawn in ({}, {"temperature": 0.9, "seed": 3}):
        options: dict[str, Any] = {"max_new_tokens": 16, "end_tokens": (), **drawn}
        expected = generate(model, PROMPTS, **options).tokens
        for method, more in (
            ("mtp", {}),
            ("mtp", {"block_size": 5, "page_size": 3}),
            ("eagle", {"block_size": 5}),
            ("eagle", {"block_size": 4, "branches": 2}),
            ("dflash", {}),
        ):
            found = generate(model, PROMPTS, method, **{**options, **more})
            assert all(map(torch.equal, found.tokens, expected)), (method, more)
            accepted += sum(count > 1 for row in found.stats.accepted for count in row)
    assert accepted > 10


def test_what_a_model_holds_is_tapped() -> None:
    model = a_hybrid(0, torch.float32)
    tokens = torch.tensor([[1, 2, 3]])
    hidden, features = model.tapped(tokens, (0, 2, 3))
    assert torch.equal(features[:, :, 0], model.embed(tokens)) and torch.equal(features[:, :, 2], hidden)
    assert torch.equal(hidden, model.hidden(tokens))
    cache = model.new_cache(1, 4)
    torch.testing.assert_close(model.tapped(tokens, (2,), cache=cache).features[:, :, 0], features[:, :, 1])
    with pytest.raises(ValueError, match=r"taps must be in 0 .. 3, for a model of 3 layers, got 4"):
        model.tapped(tokens, (4,))


def test_packed_layers() -> None:
    """The layer's matrices and the shared head may be packed; the text stays that of greedy decoding."""
    model = small_transformer(1, 40, head_dim=16, hidden_size=64, intermediate_size=96).float()
    packed = pd.quantize(model, "q8_0")
    head = mtp_head(model).quantized("q8_0")
    expected = generate(packed, PROMPTS, max_new_tokens=16, end_tokens=()).tokens
    found = generate(packed, PROMPTS, "mtp", drafter=head, block_size=3, max_new_tokens=16, end_tokens=()).tokens
    assert all(map(torch.equal, found, expected))


def test_drafters_of_another_kind_are_refused() -> None:
    model = small_transformer(1, head_dim=16)
    model.drafters = {"mtp": eagle_head(model)}
    with pytest.raises(TypeError, match="pdkernels.decoding.mtp: drafter must be an MtpHead, got EagleHead"):
        generate(model, [1], "mtp", max_new_tokens=4)
    other = small_transformer(1, 40, head_dim=16)
    with pytest.raises(ValueError, match="drafter must be for 40 tokens"):
        generate(other, [1], "mtp", drafter=mtp_head(model), max_new_tokens=4)
