"""Files and tensors beside those of a checkpoint: what transformers ignores we ignore, what contradicts is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdkernels import models
from tests.models.test_llada_checkpoints import LLADA
from tests.models.test_recurrent_depth_checkpoints import HUGINN

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])
SIZES: dict[str, Any] = dict(
    vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=20
)  # fmt: skip


def saved(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "max_position_embeddings": 64, **more})
    model = transformers.LlamaForCausalLM(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same_as_transformers(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(models.load(folder, dtype=torch.float32)(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "consolidated.00.safetensors", "adapter_model.safetensors", "model.fp16.safetensors"]
)  # fmt: skip
def test_other_files_beside_the_weights(name: str, tmp_path: Path) -> None:
    state = saved(tmp_path)
    other = (
        {"layers.0.attention.wq.weight": torch.ones(16, 16)}
        if "model" not in name
        else {k: v * 0 for k, v in state.items()}
    )
    save_file(other, tmp_path / name)
    same_as_transformers(tmp_path)


def test_only_other_files(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    sentence = r"must hold \*\.safetensors files, got none in .*, only consolidated\.safetensors\."
    with pytest.raises(ValueError, match=sentence):
        models.load(tmp_path)


def test_an_index_beside_a_whole_file(tmp_path: Path) -> None:
    """Transformers reads the whole file and no index."""
    state = saved(tmp_path)
    save_file({name: tensor * 2 for name, tensor in state.items()}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"index\.json must name model\.safetensors, which is there too, got only other"
    ):
        models.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    same_as_transformers(tmp_path)


@pytest.mark.parametrize("head", [torch.float32, torch.float16, torch.float64])
def test_a_tied_head_in_another_dtype(head: torch.dtype, tmp_path: Path) -> None:
    state = saved(tmp_path, torch.bfloat16, tie_word_embeddings=True)
    embedding = (state["model.embed_tokens.weight"] * 0 + 0.5).bfloat16() + torch.arange(16).bfloat16() / 8
    state |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.to(head)}
    save_file(state, tmp_path / "model.safetensors")
    same_as_transformers(tmp_path)
    save_file({**state, "lm_head.weight": embedding.to(head) + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal the embedding of a tied model"):
        models.load(tmp_path)


def test_a_tied_head_with_more_digits(tmp_path: Path) -> None:
    state = saved(tmp_path, torch.bfloat16, tie_word_embeddings=True)
    exact = state["model.embed_tokens.weight"].float() * (1 + 2.0**-12)
    assert torch.equal(exact.bfloat16(), state["model.embed_tokens.weight"])
    save_file({**state, "lm_head.weight": exact}, tmp_path / "model.safetensors")
    assert models.load(tmp_path).embedding.dtype == torch.bfloat16


def test_norms_in_fp32(tmp_path: Path) -> None:
    state = saved(tmp_path, torch.bfloat16)
    mixed = {name: tensor.float() if "norm" in name else tensor for name, tensor in state.items()}
    save_file(mixed, tmp_path / "model.safetensors")
    same_as_transformers(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "score.weight"]
)
def test_tensors_that_the_configuration_does_not_know(name: str, tmp_path: Path) -> None:
    state = saved(tmp_path)
    save_file({**state, name: torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"checkpoint must hold only tensors of its config\.json, got also {name}"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "changes", "name"),
    [
        (LLADA, {"hidden_size": 8}, "hidden_size"),
        (LLADA, {"num_attention_heads": 1}, "num_attention_heads"),
        (HUGINN, {"n_embd": 5280, "hidden_size": 96}, "hidden_size"),
        (HUGINN, {"num_attention_heads": 5, "n_heads": 55}, "num_attention_heads"),
    ],
)
def test_two_names_of_one_field(fields: dict[str, Any], changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**fields, **changes}))
    with pytest.raises(ValueError, match=rf"config\.json: {name} must equal \w+, which means the same, got"):
        models.load(tmp_path)
