"""Rules that stretch RoPE, against the published formulas written down pair by pair."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels.models import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    Transformer,
    TransformerConfig,
    YarnScaling,
    from_hf_config,
)
from pdkernels.models.architectures.rope import rope_tables
from pdkernels.models.checkpoints import zoo
from tests.support.checkpoints import LINEAR, LLAMA31, MINISTRAL3, QWEN3, frequency

# Sizes and figures of Llama 3.1 8B and Llama 3.2 1B.
LLAMA31_8B: dict[str, Any] = {
    "head_dim": 128,
    "rope_theta": 500000.0,
    "rope_scaling": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
}
LLAMA32_1B = {**LLAMA31_8B, "head_dim": 64, "rope_scaling": {**LLAMA31_8B["rope_scaling"], "factor": 32.0}}


@pytest.mark.parametrize(
    ("scaling", "fields"),
    [
        (LinearScaling(2.5), LINEAR),
        (Llama3Scaling(8.0, 32), LLAMA31),
        (Llama3Scaling(8.0, 8192, 1.0, 4.0), LLAMA31_8B),
        (Llama3Scaling(32.0, 8192, 1.0, 4.0), LLAMA32_1B),
        (YarnScaling(4.0, 8, 1.0, 0.1, 1.0, 0.1), MINISTRAL3),
    ],
)
def test_frequencies_are_the_published_ones(scaling: RopeScaling, fields: dict[str, Any]) -> None:
    head_dim = fields["head_dim"]
    theta = (fields.get("rope_parameters") or fields)["rope_theta"]
    expected = torch.tensor([frequency(pair, head_dim, fields) for pair in range(head_dim // 2)], dtype=torch.float64)
    plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    torch.testing.assert_close(scaling.scaled(plain, theta), expected, rtol=1e-13, atol=0)
    table = rope_tables(50, head_dim, theta=theta, style="half", scaling=scaling, dtype=torch.float64)
    angles = torch.arange(50, dtype=torch.float64)[:, None] * expected
    torch.testing.assert_close(table.cos, angles.cos().repeat(1, 2), rtol=0, atol=1e-12)
    torch.testing.assert_close(table.sin[:, head_dim // 2 :], angles.sin(), rtol=0, atol=1e-12)


def test_llama3_keeps_fast_pairs_and_slows_slow_ones() -> None:
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ratio = Llama3Scaling(8.0, 8192).scaled(plain, 500000.0) / plain
    turns = 8192 * plain / (2 * math.pi)
    fast, slow = turns >= 4, turns <= 1
    assert fast.any() and slow.any() and not (fast | slow).all()
    assert (ratio[fast] == 1).all() and (ratio[slow] == 1 / 8).all()
    between = ratio[~fast & ~slow]
    assert ((between > 1 / 8) & (between < 1) & (between.diff(prepend=torch.ones(1, dtype=torch.float64)) < 0)).all()


def test_a_factor_for_each_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = FactorScaling([1.0, 2.0, 8.0, 4.0])  # type: ignore[arg-type]
    plain = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert rule.scaled(plain, 100.0).tolist() == [plain[0], plain[1] / 2, plain[2] / 8, plain[3] / 4]
    sizes = dict(vocab_size=257, hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=8)
    config = TransformerConfig(**sizes, head_dim=8, rope_scaling=rule)
    zoo.save_tiny(Transformer(config), tmp_path / "tiny-test.safetensors")
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path)
    assert zoo.load("tiny-test").config == config and hash(config)
    with pytest.raises(ValueError, match=r"TransformerConfig: rope_scaling must have 8 factors, got 4\."):
        TransformerConfig(**sizes, head_dim=16, rope_scaling=rule)


@pytest.mark.parametrize("scaling", [LinearScaling(1.0), Llama3Scaling(1.0, 32), YarnScaling(1.0, 32)])
def test_a_factor_of_one_changes_nothing(scaling: RopeScaling) -> None:
    plain, scaled = (rope_tables(40, 16, theta=100.0, style="interleaved", scaling=s) for s in (None, scaling))
    torch.testing.assert_close(scaled.cos, plain.cos)
    torch.testing.assert_close(scaled.sin, plain.sin)
    assert scaled.query_scale is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FactorScaling((1.0, 0.0)), "FactorScaling: factors must be positive numbers, got 0.0."),
        (lambda: LinearScaling(0.5), "LinearScaling: factor must be at least 1, got 0.5."),
        (lambda: Llama3Scaling(0.5, 8), "Llama3Scaling: factor must be at least 1, got 0.5."),
        (lambda: Llama3Scaling(2.0, 0), "Llama3Scaling: original_positions must be at least 1, got 0."),
        (
            lambda: Llama3Scaling(2.0, 8, 4.0, 4.0),
            "Llama3Scaling: high_freq_factor must be more than low_freq_factor (4.0) > 0, got 4.0.",
        ),
        (
            lambda: Llama3Scaling(2.0, 8, 0.0, 4.0),
            "Llama3Scaling: high_freq_factor must be more than low_freq_factor (0.0) > 0, got 4.0.",
        ),
        (lambda: YarnScaling(0.0, 8), "YarnScaling: factor must be positive, got 0.0."),
        (
            lambda: YarnScaling(2.0, 8, 1.0, 2.0),
            "YarnScaling: beta_fast must be at least beta_slow (2.0) > 0, got 1.0.",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == f"pdkernels.{message}"


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("head_dim", "theta", "factor", "original"), [(64, 150000.0, 32.0, 4096), (16, 100.0, 4.0, 8)])
def test_yarn_with_and_without_whole_pairs(
    truncate: bool, head_dim: int, theta: float, factor: float, original: int
) -> None:
    """Against transformers; the first sizes are those of gpt-oss, which does not truncate."""
    rules = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip(
        "transformers", reason="compares with the configs of transformers 5", minversion="5.15"
    )
    rope = dict(rope_type="yarn", rope_theta=theta, factor=factor, truncate=truncate)
    rope |= dict(original_max_position_embeddings=original, beta_fast=32.0 if head_dim == 64 else 1.0, beta_slow=0.1)
    fields = QWEN3 | dict(head_dim=head_dim, rope_parameters=rope, rope_scaling=None)
    config = transformers.Qwen3Config(**fields)
    expected, magnitude = rules.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    scaling = from_hf_config(fields).rope_scaling
    assert isinstance(scaling, YarnScaling) and scaling.truncate is truncate
    plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    torch.testing.assert_close(scaling.scaled(plain, theta).float(), expected, rtol=1e-5, atol=0)
    assert scaling.attention_factor == pytest.approx(magnitude, rel=1e-6)
    other = YarnScaling(factor, original, rope["beta_fast"], 0.1, truncate=not truncate)
    assert not torch.allclose(other.scaled(plain, theta).float(), expected, rtol=1e-3)
