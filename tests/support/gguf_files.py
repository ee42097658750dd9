"""GGUF files as llama.cpp's converter writes them, from checkpoints with Hugging Face names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import State, random_checkpoint

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "eos_token_id": 5,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
QWEN3MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def permuted(matrix: np.ndarray, heads: int) -> np.ndarray:
    """The converter's permutation of q and k of Llama."""
    return (
        matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)
    )


def write_gguf(
    path: Path,
    fields: dict[str, Any],
    state: State | None = None,
    *,
    kind: str = "F32",
    more: dict[str, Any] | None = None,
    factors: np.ndarray | None = None,
    tokens: dict[str, Any] | None = None,
) -> State:
    """Write a checkpoint, its matrices as `kind`; `more` are fields without the architecture's name, None leaves one out.

    Returns what the file holds, dequantised, with the names of Hugging Face.
    """
    state = random_checkpoint(fields, dtype=torch.float32) if state is None else state
    arch = fields["model_type"].replace("_", "")
    writer = gguf.GGUFWriter(path, arch)
    known = {
        "block_count": fields["num_hidden_layers"],
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.key_length": fields["head_dim"],
        "attention.value_length": fields["head_dim"],
        "attention.layer_norm_rms_epsilon": fields["rms_norm_eps"],
        "rope.freq_base": fields["rope_theta"],
        "rope.dimension_count": fields["head_dim"],
        "vocab_size": fields["vocab_size"],
        **(more or {}),
    }
    if "num_experts" in fields:
        ours = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
        ours["expert_feed_forward_length"] = "moe_intermediate_size"
        known = {name: fields[theirs] for name, theirs in ours.items()} | known
    for name, value in known.items():
        if value is not None:
            add(writer, f"{arch}.{name}", value)
    for name, value in (tokens or {"eos_token_id": fields["eos_token_id"]}).items():
        add(writer, f"tokenizer.{name}" if name.startswith("chat_template") else f"tokenizer.ggml.{name}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], fields["num_hidden_layers"])
    held, quantised = {}, gguf.GGMLQuantizationType[kind]
    for name, tensor in stacked(state).items():
        array = tensor.float().numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        turned = arch == "llama" and heads is not None
        stored = permuted(array, fields[heads]) if turned else array
        router = name.endswith("mlp.gate.weight")
        as_kind = quantised if array.ndim >= 2 and not router else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(stored), as_kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=as_kind)
        back = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(array), as_kind), as_kind)
        values = torch.from_numpy(np.array(back, np.float32))
        if array.ndim == 3:
            held |= {name.replace("experts.", f"experts.{i}."): own for i, own in enumerate(values)}
        else:
            held[name] = values
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def stacked(state: State) -> State:
    """The matrices of a layer's experts as one tensor, as the converter stacks them."""
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        before, _, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        if after:
            found.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
        else:
            found[name] = tensor
    return {
        name: torch.stack([one[i] for i in range(len(one))]) if isinstance(one, dict) else one
        for name, one in found.items()
    }


def add(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
