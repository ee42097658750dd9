"""LLaDA, Dream and Fast-dLLM v2 from folders with the published names, against the plain model on the same tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models import (
    from_hf_config,
    from_llada_config,
    from_llada_state_dict,
    to_hf_state_dict,
    to_llada_state_dict,
)
from reference.masked_model import MaskedTransformerReference, random_weights
from tests.models.test_zoo import write

LLADA = {
    "model_type": "llada",
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "mlp_hidden_size": 24,
    "mlp_ratio": 4,
    "vocab_size": 13,
    "embedding_size": 16,
    "weight_tying": False,
    "rope": True,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "include_bias": False,
    "include_qkv_bias": False,
    "max_sequence_length": 64,
    "mask_token_id": 11,
    "eos_token_id": 9,
    "pad_token_id": 9,
    "alibi": False,
    "clip_qkv": None,
    "multi_query_attention": None,
    "rope_full_precision": True,
    "scale_logits": False,
}
DREAM = {
    "model_type": "Dream",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 16,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "mask_token_id": 11,
    "eos_token_id": 9,
    "pad_token_id": 9,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "use_mrope": False,
    "torch_dtype": "float32",
}
SIZES = {"vocab_size": 16, "hidden_size": 16, "heads": 4, "kv_heads": 2, "intermediate_size": 24}


def weights(names: str, **changes: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in random_weights(names, **SIZES | changes).items()}


def without_head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in state.items()
        if name not in ("model.transformer.ff_out.weight", "lm_head.weight")
    }


FOLDERS = {
    "llada": ("llada", LLADA, weights("llada")),
    "llada, tied, with biases": (
        "llada",
        {**LLADA, "weight_tying": True, "include_qkv_bias": True},
        without_head(weights("llada", bias=True)),
    ),
    "llada, as many kv heads": ("llada", {**LLADA, "n_kv_heads": None}, weights("llada", kv_heads=4)),
    "llada, one kv head": (
        "llada",
        {**LLADA, "n_kv_heads": None, "multi_query_attention": True},
        weights("llada", kv_heads=1),
    ),
    "llada, width by ratio": ("llada", {**LLADA, "mlp_hidden_size": None}, weights("llada", intermediate_size=64)),
    "dream": ("qwen2", DREAM, weights("qwen2")),
    "dream, tied": ("qwen2", {**DREAM, "tie_word_embeddings": True}, without_head(weights("qwen2"))),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_equal_the_plain_model(name: str, tmp_path: Path) -> None:
    kind, fields, state = FOLDERS[name]
    write(tmp_path, fields, state, shards=2)
    model = models.load(tmp_path, dtype=torch.float64)
    eps = fields["rms_norm_eps"]
    plain = MaskedTransformerReference(
        {key: tensor.double() for key, tensor in state.items()}, heads=4, names=kind, rope_theta=500.0, norm_eps=eps
    )
    tokens = torch.randint(16, (1, 12), generator=torch.Generator().manual_seed(0))
    expected = plain(tokens, torch.arange(12)[None], torch.ones(12, 12, dtype=torch.bool))
    torch.testing.assert_close(model(tokens), expected, rtol=1e-11, atol=1e-11)
    # The rows after the tokenizer's last id are ordinary ids.
    assert model.config.vocab_size == 16 and model.mask_token == 11 and model.end_tokens == (9,)
    assert model.config.attention == "bidirectional" and model.config.predicts == plain.predicts
    assert model.config.max_positions == 64 and model.config.tied_head == ("tied" in name)

    saved = models.load(tmp_path, dtype=torch.float32).state_dict()
    export = to_llada_state_dict if kind == "llada" else to_hf_state_dict
    back = export(saved, model.config)
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)


def test_norms_of_heads_have_no_llada_names() -> None:
    config = replace(from_llada_config(LLADA), qk_norm=True)
    with pytest.raises(ValueError) as caught:
        to_llada_state_dict(models.Transformer(config).state_dict(), config)
    assert str(caught.value) == (
        "pdkernels.models.to_llada_state_dict: config must have no qk_norm (LLaDA has no such tensors), got qk_norm=True."
    )


def test_fast_dllm_v2_is_qwen2_with_a_mask_token(tmp_path: Path) -> None:
    fields, state = {**DREAM, "model_type": "Fast_dLLM_Qwen", "bd_size": 32}, weights("qwen2")
    write(tmp_path, fields, state)
    model = models.load(tmp_path)
    assert model.config == from_hf_config({**DREAM, "model_type": "qwen2"}) and model.mask_token == 11
    assert (
        len(
            generate(
                model, [1, 2, 3], "fast_dllm_v2", max_new_tokens=9, block_size=4, small_block_size=2, end_tokens=()
            ).tokens
        )
        == 9
    )
    write(tmp_path, {name: value for name, value in fields.items() if name != "mask_token_id"}, state)
    with pytest.raises(ValueError, match="config.json: mask_token_id must be an id below vocab_size .16., got 151665."):
        models.load(tmp_path)


def test_the_published_sizes() -> None:
    """Parameters of the 8B and the 7B model, from their configurations alone."""
    llada = from_llada_config(
        {
            **LLADA,
            "d_model": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "n_kv_heads": 32,
            "mlp_hidden_size": 12288,
            "vocab_size": 126464,
            "embedding_size": 126464,
        }
    )
    dream = from_hf_config(
        {
            **DREAM,
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
        }
    )
    sizes = {}
    for name, config in (("llada", llada), ("dream", dream)):
        with torch.device("meta"):
            sizes[name] = sum(parameter.numel() for parameter in models.Transformer(config).parameters())
    assert sizes == {"llada": 8_015_581_184, "dream": 7_615_616_512}


def test_defaults_of_absent_fields() -> None:
    few = {
        name: LLADA[name]
        for name in (
            "model_type",
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "block_type",
            "layer_norm_type",
            "activation_type",
            "rope",
        )
    }
    config = from_llada_config(few)
    assert (config.vocab_size, config.kv_heads, config.intermediate_size, config.tied_head) == (13, 4, 64, True)
    assert (config.rope_theta, config.norm_eps, config.qkv_bias) == (10000.0, 1e-5, False)


def test_a_mask_token_outside_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, {**LLADA, "mask_token_id": 16}, weights("llada"))
    with pytest.raises(ValueError) as caught:
        models.load(tmp_path)
    sentence = "config.json: mask_token_id must be an id below vocab_size (16), got 16."
    assert str(caught.value) == f"pdkernels.models.load: {sentence}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_type": "sequential"}, "block_type must be 'llama', got 'sequential'."),
        ({"layer_norm_type": "default"}, "layer_norm_type must be 'rms', got 'default'."),
        ({"activation_type": "gelu"}, "activation_type must be 'silu', got 'gelu'."),
        ({"rope": False}, "rope must be True, got False."),
        ({"rope": None}, "rope must be True, got None."),
        ({"include_bias": True}, "include_bias must be False, got True."),
        ({"bias_for_layer_norm": True}, "bias_for_layer_norm must be False, got True."),
        ({"attention_layer_norm": True}, "attention_layer_norm must be False, got True."),
        ({"input_emb_norm": True}, "input_emb_norm must be False, got True."),
        ({"scale_logits": True}, "scale_logits must be False, got True."),
        ({"alibi": True}, "alibi must be False, got True."),
        ({"clip_qkv": 8.0}, "clip_qkv must be None, got 8.0."),
        ({"rope_parameters": {"rope_theta": 9.0}}, "rope_parameters: 'rope_theta' must be 500.0, as outside, got 9.0."),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling: 'factor' must be absent, got 2.0."),
    ],
)
def test_what_is_not_computed_is_not_loaded(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLADA, **changes}))
    with pytest.raises(NotImplementedError) as caught:
        models.load(tmp_path)
    assert str(caught.value) == f"pdkernels.models.load: config.json: {message}"


def test_a_rule_beside_the_base() -> None:
    """transformers 5 writes the same base in both places."""
    rule = {"rope_theta": 500.0, "rope_type": "default"}
    assert from_llada_config({**LLADA, "rope_parameters": rule}) == from_llada_config(LLADA)


def test_what_dream_does_not_compute() -> None:
    with pytest.raises(NotImplementedError) as caught:
        from_hf_config({**DREAM, "use_mrope": True})
    assert str(caught.value) == "pdkernels.models.load: config.json: use_mrope must be false, got True."


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError) as caught:
        from_llada_config({**LLADA, "n_heads": 3})
    assert str(caught.value) == "pdkernels.models.load: config.json: n_heads must divide d_model (16), got 3."
    with pytest.raises(ValueError, match=r"config\.json must hold 'd_model', got only"):
        from_llada_config({name: value for name, value in LLADA.items() if name != "d_model"})


def test_tensors_that_do_not_fit() -> None:
    state, config = weights("llada"), from_llada_config(LLADA)
    with pytest.raises(ValueError, match=r"got none called model\.transformer\.blocks\.1\.attn_out\.weight\."):
        from_llada_state_dict({name: x for name, x in state.items() if "blocks.1.attn_out" not in name}, config)
    with pytest.raises(ValueError, match=r"got also model\.transformer\.blocks\.0\.q_proj\.bias\."):
        from_llada_state_dict({**state, "model.transformer.blocks.0.q_proj.bias": torch.ones(16)}, config)
    with pytest.raises(
        ValueError, match=r"model\.transformer\.ff_out\.weight must equal the embedding of a tied model"
    ):
        from_llada_state_dict(state, replace(config, tied_head=True))
