"""`from_transformers` on models whose configuration differs in one field from the usual: the same logits, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import from_transformers  # noqa: E402
from tests.support.transformers_names import VERSION  # noqa: E402

TOKENS = 40
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES = ["Llama", "Mistral", "Ministral3", "Qwen2", "Qwen3"]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, "attention_factor": 1.7},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, "mscale": 1.3, "mscale_all_dim": 0.4},
    {"rope_type": "llama3", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, "short_factor": [1.1] * 8, "long_factor": [3.0] * 8},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3},
]  # fmt: skip
OTHERS: dict[str, list[Any]] = {
    "rope_parameters": ROPES,
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh", "swish"],
    "layer_types": [["sliding_attention", "full_attention"], ["sliding_attention"] * 2, ["full_attention"] * 2],
    "sliding_window": [8, 64, None],
    "head_dim": [32, 16],
    "num_key_value_heads": [1, 4],
}


def values(name: str, value: Any) -> list[Any]:
    """Others that a field could have."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, max(1, value // 2)]
    if isinstance(value, float):
        return [value * 3 + 0.1, 0.0]
    return [0.5, 8, True] if value is None else []


def cases(family: str) -> list[dict[str, Any]]:
    kind = getattr(transformers, f"{family}Config", None)
    fields = {} if kind is None else vars(kind(**SIZES))
    one = [{name: other} for name, value in fields.items() for other in values(name, value)]
    extra = ["attention_bias", "mlp_bias", "use_sliding_window", "logit_scale", "partial_rotary_factor", "qk_norm"]
    slides = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return [*one, *({name: True} for name in extra), slides, {**slides, "max_window_layers": 0}]


def in_version_4(more: dict[str, Any]) -> dict[str, Any]:
    """The same rotation in the fields of transformers 4."""
    if "rope_parameters" not in more:
        return more
    rules = dict(more["rope_parameters"])
    fields = {name: rules.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rules}
    return {**fields, "rope_scaling": rules}


def model_of(family: str, more: dict[str, Any]) -> Any:
    """None for settings that transformers itself refuses."""
    torch.manual_seed(0)
    try:
        config = getattr(transformers, f"{family}Config")(
            **{**SIZES, **(more if VERSION >= (5, 0) else in_version_4(more))}
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2) if parameter.dim() >= 2 else parameter.add_(
                    torch.randn_like(parameter) * 0.1
                )
            model(torch.arange(TOKENS)[None])
    except Exception:
        return None
    return model


def differs(model: Any) -> str | None:
    """The refusal, or None; fails for other logits and inner errors."""
    with torch.no_grad():
        theirs = model(torch.arange(TOKENS)[None], use_cache=False).logits
        try:
            ours = from_transformers(model)(torch.arange(TOKENS)[None])
        except (ValueError, NotImplementedError) as error:
            assert str(error).startswith("pdkernels."), error
            return str(error)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)
    return None


FEW = [{"rope_parameters": rope} for rope in ROPES] + [
    {"attention_bias": True},
    {"mlp_bias": True},
    {"hidden_act": "gelu"},
    {},
]


def test_fields_of_rotation_and_biases() -> None:
    models = {str(more): model_of("Llama", more) for more in FEW}
    results = {more: differs(model) for more, model in models.items() if model is not None}
    assert sum(words is None for words in results.values()) == 10, results


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field(family: str) -> None:
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip("a newer architecture")
    tried, refused, wrong = 0, [], []
    for more in cases(family):
        if (model := model_of(family, more)) is None:
            continue
        tried += 1
        try:
            if differs(model):
                refused.append(more)
        except Exception as error:
            wrong.append((more, str(error)[:200]))
    assert not wrong
    assert tried > 30 and 3 < len(refused) < tried / 2


def test_what_no_field_says() -> None:
    """Modules that someone exchanged are seen in the logits."""
    model = model_of("Llama", {})
    assert differs(model) is None
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(NotImplementedError, match="model must compute what its configuration says.*Use wrap"):
        from_transformers(model)
