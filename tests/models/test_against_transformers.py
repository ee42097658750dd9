"""Checkpoints and adapters as transformers and PEFT write them: the same logits and greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels import models
from pdkernels.decoding import generate

transformers = pytest.importorskip("transformers", reason="compares with transformers where it is installed")

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
YARN |= {"beta_fast": 1.0, "beta_slow": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with attention biases": ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 with biases": ("Qwen3", {"attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "nemotron": ("Ministral3", {"rope_parameters": YARN}),
    "nemotron base": (
        "Ministral3",
        {"rope_parameters": {**YARN, "factor": 0.25, "original_max_position_embeddings": 32}},
    ),
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def made(kind: str) -> Any:
    """A random model of transformers, its biases and norms too."""
    family, changes = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.3
    return model


def same(ours: Any, theirs: Any) -> None:
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        expected = theirs.generate(tokens, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, len(TOKENS) :]
    # transformers has no mask token, and may generate its id.
    tokens = generate(ours, TOKENS, max_new_tokens=16, end_tokens=(), allow_mask_token=True).tokens
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_folders(kind: str, tmp_path: Path) -> None:
    if not hasattr(transformers, f"{KINDS[kind][0]}Config"):
        pytest.skip("a newer architecture")
    theirs = made(kind)
    theirs.save_pretrained(tmp_path)
    if kind.startswith("nemotron"):
        as_nemotron(tmp_path)
    same(models.load(tmp_path), theirs)


def as_nemotron(folder: Path) -> None:
    """Nemotron-Labs-Diffusion is this model with other names."""
    import json

    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = {name: name.replace("model.", "encoder.").replace("lm_head", "diffusion_head") for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"model_type": "nemotron_labs_diffusion", "mask_token_id": 47}
    (folder / "config.json").write_text(json.dumps(fields))


LORAS = {
    "all linear": {"target_modules": "all-linear"},
    "one rank and alpha each": {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "rank-stabilised, a regular expression": {"target_modules": r".*\.(o_proj|up_proj)", "use_rslora": True},
    "head and biases": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"], "bias": "all"},
    "embedding": {"target_modules": ["embed_tokens", "gate_proj"]},
}


@pytest.mark.parametrize("kind", LORAS)
def test_adapters(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="compares with peft where it is installed")
    theirs = made("llama with biases")
    theirs.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **LORAS[kind])
    adapted = peft.get_peft_model(theirs, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name or (kind == "head and biases" and name.endswith("bias")):
            parameter.data += torch.randn_like(parameter) * 0.2
    adapted.save_pretrained(tmp_path / "lora")
    same(models.load(tmp_path / "base", adapter=tmp_path / "lora"), adapted)


def test_a_bare_model_and_its_drafter(tmp_path: Path) -> None:
    """An adapter of the class without a head names modules without the first part; drafts with it are verified without."""
    peft = pytest.importorskip("peft", reason="compares with peft where it is installed")
    theirs = made("qwen2")
    theirs.save_pretrained(tmp_path / "base")
    body = peft.get_peft_model(theirs.model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["o_proj"])).eval()
    for name, parameter in body.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
    body.save_pretrained(tmp_path / "lora")
    ours, tokens = models.load(tmp_path / "base", drafter=tmp_path / "lora"), torch.tensor([TOKENS])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, adapted=True), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        with body.disable_adapter():
            torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
