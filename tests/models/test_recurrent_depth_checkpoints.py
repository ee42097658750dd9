from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pdkernels import models
from pdkernels.models import (
    RecurrentDepth,
    RecurrentDepthConfig,
    Transformer,
    from_huginn_config,
    from_huginn_state_dict,
    to_huginn_config,
    to_huginn_state_dict,
)
from pdkernels.models.checkpoints import gemma2, gemma3, gemma4, hybrid_hf, zoo
from pdkernels.models.checkpoints.hf import ARCHITECTURES
from pdkernels.reference.recurrent_depth import RecurrentDepthReference, random_weights
from pdkernels.reference.recurrent_sampling import forward, position_states

# config.json of the published model, without what only its training needed.
HUGINN = {
    "architectures": ["RavenForCausalLM"],
    "model_type": "huginn_raven",
    "architecture_class_name": "RecurrentGPT",
    "n_embd": 5280,
    "n_heads": 55,
    "num_key_value_heads": 55,
    "head_dim": 96,
    "intermediate_size": 17920,
    "vocab_size": 65536,
    "padded_vocab_size": 65536,
    "padding_multiple": 4096,
    "block_size": 4096,
    "n_layers": 8,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4,
    "n_layers_in_coda": 2,
    "mean_recurrence": 32,
    "mean_backprop_depth": 8,
    "effective_expected_depth": 132,
    "injection_type": "linear",
    "state_init": "like-init",
    "block_class_name": "SandwichBlock",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "norm_class_name": "RMSNorm_llama",
    "norm_eps": 1e-6,
    "qk_bias": True,
    "bias": False,
    "tie_embeddings": True,
    "tie_word_embeddings": True,
    "rope_base": 50000,
    "test_time_noise": 0,
    "test_time_noise_type": "none",
    "torch_dtype": "bfloat16",
    "bos_token_id": 65504,
    "eos_token_id": 65505,
    "pad_token_id": 65509,
    "init_values": {"std": 0.008703882797784892, "embed_scale": 72.6636084983398},
}
# The same, small: an odd number of heads of 96 components.
SMALL = {
    **HUGINN,
    "n_embd": 288,
    "n_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 29,
    "padded_vocab_size": 32,
    "n_layers": 5,
    "n_layers_in_prelude": 1,
    "n_layers_in_coda": 2,
    "n_layers_in_recurrent_block": 2,
    "mean_recurrence": 3,
    "rope_base": 700.0,
    "norm_eps": 1e-5,
    "block_size": 64,
    "init_values": {"embed_scale": 288**0.5},
    "eos_token_id": 5,
}


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    state = random_weights(vocab_size=32, hidden_size=288, heads=3, intermediate_size=40, layers=(1, 2, 2), seed=seed)
    return {name: tensor.to(dtype) for name, tensor in state.items()}


def write(folder: Path, fields: dict[str, Any], state: dict[str, Tensor], shards: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    names = sorted(state)
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: state[name] for name in names[shard::shards]}, folder / file)
        weight_map.update(dict.fromkeys(names[shard::shards], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def plain_logits(state: dict[str, Tensor], tokens: list[int], recurrences: int) -> Tensor:
    plain = RecurrentDepthReference(
        {name: tensor.double() for name, tensor in state.items()}, rope_theta=700.0, norm_eps=1e-5
    )
    return forward(plain, tokens, plain.new_past(), recurrences, position_states(288))


# ---- folders


@pytest.mark.parametrize("shards", [1, 3])
def test_folders_equal_the_plain_model(shards: int, tmp_path: Path) -> None:
    state = tensors()
    write(tmp_path, SMALL, state, shards)
    model = models.load(tmp_path, dtype=torch.float64)
    assert isinstance(model, RecurrentDepth) and model.tokenizer is None and model.mask_token is None
    assert not model.training and not any(p.requires_grad or p.is_meta for p in model.parameters())
    tokens = torch.randint(32, (1, 9), generator=torch.Generator().manual_seed(0))
    expected = plain_logits(state, tokens[0].tolist(), 3)
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-10, atol=1e-10)
    saved = to_huginn_state_dict(models.load(str(tmp_path), dtype=torch.float32).state_dict(), model.config)
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)


@pytest.mark.parametrize("head", ["none", "beside the embedding", "in its place"])
def test_the_tied_head_and_tables_may_be_stored(head: str, tmp_path: Path) -> None:
    state, expected = tensors(), tensors()
    if head == "beside the embedding":
        state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    elif head == "in its place":
        state["lm_head.weight"] = state.pop("transformer.wte.weight")
    state["freqs_cis"] = torch.ones(1, 64, 1, 48, 2)
    write(tmp_path, SMALL, state)
    saved = to_huginn_state_dict(models.load(tmp_path, dtype=torch.float32).state_dict(), from_huginn_config(SMALL))
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in expected)


def test_dtype_and_end_tokens_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, SMALL, tensors(torch.bfloat16))
    model = models.load(tmp_path)
    assert model.dtype == torch.bfloat16 and model.end_tokens == (5,)
    assert models.load(tmp_path, dtype=torch.float32).dtype == torch.float32
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 8]}))
    assert models.load(tmp_path).end_tokens == (5, 8)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 99}))
    with pytest.raises(
        ValueError, match=r"generation_config\.json: eos_token_id must be ids below vocab_size \(32\), got 99\."
    ):
        models.load(tmp_path)


def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write(tmp_path, SMALL, tensors())
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    model = models.load(tmp_path)
    assert model.tokenizer.encode("b a c") == [1, 0, 2] and model.tokenizer.end_tokens == (5,)


# ---- configurations


def test_the_published_configuration() -> None:
    assert from_huginn_config(HUGINN) == RecurrentDepthConfig(
        vocab_size=65536,
        hidden_size=5280,
        heads=55,
        head_dim=96,
        intermediate_size=17920,
        prelude_layers=2,
        core_layers=4,
        coda_layers=2,
        mean_recurrence=32,
        rope_theta=50000.0,
        norm_eps=1e-6,
        max_positions=4096,
    )


def test_published_defaults_and_names_of_transformers() -> None:
    sizes = (
        "vocab_size",
        "n_embd",
        "n_heads",
        "intermediate_size",
        "n_layers_in_prelude",
        "n_layers_in_recurrent_block",
        "n_layers_in_coda",
    )
    few = {name: HUGINN[name] for name in sizes}
    assert from_huginn_config(few) == from_huginn_config(HUGINN)
    renamed = dict(hidden_size=few.pop("n_embd"), num_attention_heads=few.pop("n_heads"), num_hidden_layers=8, **few)
    assert from_huginn_config(renamed) == from_huginn_config(HUGINN)


def test_configurations_go_round() -> None:
    small = from_huginn_config(SMALL)
    assert (small.vocab_size, small.layers, small.rope_theta, small.max_positions) == (32, 5, 700.0, 64)
    assert from_huginn_config(to_huginn_config(small)) == small
    assert json.loads(json.dumps(to_huginn_config(small))) == to_huginn_config(small)


def test_state_dicts_go_round() -> None:
    state, config = tensors(), from_huginn_config(SMALL)
    ours = from_huginn_state_dict(state, config)
    assert ours.keys() == RecurrentDepth(config).state_dict().keys()
    back = to_huginn_state_dict(ours, config)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"injection_type": "add"}, "injection_type must be 'linear', got 'add'."),
        (
            {"block_class_name": "TransformerPreNormBlock"},
            "block_class_name must be 'SandwichBlock', got 'TransformerPreNormBlock'.",
        ),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name must be 'RMSNorm_llama', got 'LayerNorm'."),
        ({"mlp_class_name": "BaseMLP"}, "mlp_class_name must be 'GatedMLP', got 'BaseMLP'."),
        ({"nonlin_name": "ReLU2"}, "nonlin_name must be 'SiLU', got 'ReLU2'."),
        ({"state_init": "zero"}, "state_init must be 'like-init', got 'zero'."),
        ({"bias": True}, "bias must be False, got True."),
        ({"qk_bias": False}, "qk_bias must be True, got False."),
        ({"tie_embeddings": False}, "tie_embeddings must be True, got False."),
        ({"test_time_noise": 0.1}, "test_time_noise must be 0, got 0.1."),
        ({"num_key_value_heads": 11}, "num_key_value_heads must be 55, got 11."),
        ({"head_dim": 64}, "head_dim must be 96, got 64."),
        ({"init_values": {"embed_scale": 1.0}}, "init_values: embed_scale must be the root of n_embd, got 1.0."),
    ],
)
def test_what_is_not_computed_is_not_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        from_huginn_config({**HUGINN, **changes})
    assert str(caught.value) == f"pdkernels.models.load: config.json: {message}"


def test_sizes_that_do_not_fit_each_other() -> None:
    with pytest.raises(ValueError, match="config.json must hold 'n_layers_in_coda', got only"):
        from_huginn_config({name: value for name, value in HUGINN.items() if name != "n_layers_in_coda"})
    with pytest.raises(ValueError, match=r"n_layers must be the sum of its three parts \(8\), got 9\."):
        from_huginn_config({**HUGINN, "n_layers": 9})
    with pytest.raises(ValueError, match=r"n_heads must divide n_embd \(5280\), got 56\."):
        from_huginn_config({**HUGINN, "n_heads": 56})
    config = RecurrentDepthConfig(vocab_size=9, hidden_size=24, heads=2, head_dim=8, intermediate_size=8)
    with pytest.raises(ValueError, match=r"head_dim must be hidden_size / heads \(24 / 2\), got 8\."):
        to_huginn_config(config)


def test_an_unknown_architecture_names_all_that_are_known(tmp_path: Path) -> None:
    write(tmp_path, {**SMALL, "model_type": "gpt2", "architectures": None}, tensors())
    known = ", ".join(
        (
            *ARCHITECTURES,
            *hybrid_hf.ARCHITECTURES,
            gemma2.MODEL_TYPE,
            gemma3.MODEL_TYPE,
            *gemma4.MODEL_TYPES,
            "llada",
            "llada2_moe",
            "huginn_raven",
        )
    )
    assert "qwen2, qwen3, llama" in known
    with pytest.raises(NotImplementedError, match=f"model_type must be one of {known}, got 'gpt2'"):
        models.load(tmp_path)


def test_the_architecture_may_replace_the_model_type(tmp_path: Path) -> None:
    write(tmp_path, {name: value for name, value in SMALL.items() if name != "model_type"}, tensors())
    assert isinstance(models.load(tmp_path), RecurrentDepth)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    state, config = tensors(), from_huginn_config(SMALL)
    short = {name: tensor for name, tensor in state.items() if "coda.1" not in name}
    with pytest.raises(ValueError, match=r"got none called transformer\.coda\.1\.attn\.Wqkv\.weight.* and 5 more\."):
        from_huginn_state_dict(short, config)
    with pytest.raises(
        ValueError, match=r"hold only tensors of its config\.json, got also transformer\.coda\.2\.norm_1"
    ):
        from_huginn_state_dict({**state, "transformer.coda.2.norm_1.weight": torch.ones(288)}, config)
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal the embedding of a tied model"):
        from_huginn_state_dict({**state, "lm_head.weight": torch.ones(32, 288)}, config)
    name = "transformer.core_block.1.attn.qk_bias"
    with pytest.raises(
        ValueError, match=r"core_block\.1\.attn\.qk_bias must have shape \(2, 1, 3, 96\), got \(2, 3, 96\)\."
    ):
        from_huginn_state_dict({**state, name: state[name][:, 0]}, config)
    write(tmp_path, SMALL, {**state, "transformer.ln_f.weight": torch.ones(289)})
    with pytest.raises(
        ValueError, match=r"model\.safetensors: transformer\.ln_f\.weight must have shape \(288,\), got \(289,\)\."
    ):
        models.load(tmp_path)


# ---- tiny models


def test_tiny_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = RecurrentDepthConfig(
        vocab_size=257,
        hidden_size=16,
        heads=2,
        head_dim=8,
        intermediate_size=24,
        prelude_layers=1,
        core_layers=2,
        coda_layers=1,
        mean_recurrence=5,
        rope_theta=99.0,
        norm_eps=1e-5,
    )
    model = RecurrentDepth(config)
    zoo.save_tiny(model, tmp_path / "tiny-test.safetensors", bits=1.5)
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path)
    for dtype in (None, torch.float64):
        loaded = zoo.load("tiny-test", dtype=dtype)
        assert isinstance(loaded, RecurrentDepth) and loaded.config == config
        assert loaded.dtype == (dtype or torch.float32) and loaded.end_tokens == (256,)
        assert loaded.tokenizer.encode("a") == [97] and loaded.mask_token is None
        expected = {name: tensor.to(torch.bfloat16).to(loaded.dtype) for name, tensor in model.state_dict().items()}
        state = loaded.state_dict()
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
        assert not loaded.training and not any(p.requires_grad or p.is_meta for p in loaded.parameters())


def test_tiny_files_say_what_they_are(tmp_path: Path) -> None:
    zoo.save_tiny(models.load("tiny-code"), tmp_path / "new.safetensors")
    with safe_open(tmp_path / "new.safetensors", framework="pt") as file:
        assert file.metadata()["architecture"] == "Transformer"
    assert isinstance(zoo._load_tiny(tmp_path / "new.safetensors", None, "cpu"), Transformer)
    # Files that were written before there were two do not say it.
    with safe_open(tmp_path / "new.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        facts = {name: fact for name, fact in file.metadata().items() if name != "architecture"}
    save_file(tensors, tmp_path / "old.safetensors", metadata=facts)
    assert isinstance(zoo._load_tiny(tmp_path / "old.safetensors", None, "cpu"), Transformer)
