"""Small random diffusion models as folders, and as GGUF files of the keys and names that converters give them.

LLaDA, Dream and LLaDA-MoE as `conversion/llada.py` and `dream.py` of llama.cpp write them (the copy in llama-cpp-python
0.3.36), LLaDA2 as the converter of nurl-lang/nurl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdkernels.models.checkpoints import hf, hf_experts, llada, llada2
from pdkernels.models.checkpoints.hf import from_hf_config
from tests.models.test_llada_checkpoints import DREAM as DREAM_FIELDS
from tests.models.test_llada_checkpoints import LLADA as LLADA_FIELDS
from tests.models.test_zoo import write
from tests.support.checkpoints import State
from tests.support.gguf_files import add, permuted, stacked

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")

SIZES = {"vocab_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
MARKS = {"mask_token_id": 44, "eos_token_id": 45}
MIXED = {"hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96, "rms_norm_eps": 1e-5}
FIELDS: dict[str, dict[str, Any]] = {
    "llada": {**LLADA_FIELDS, **MARKS, "d_model": 64, "mlp_hidden_size": 96, "vocab_size": 48, "embedding_size": 48},
    "dream": {**DREAM_FIELDS, **MARKS, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 48},
    "llada-moe": {
        **SIZES,
        **MARKS,
        **MIXED,
        "model_type": "llada",
        "num_key_value_heads": 4,
        "expert_intermediate_size": 32,
        "dense_intermediate_size": 96,
        "rope_theta": 50000.0,
        "max_position_embeddings": 64,
    },
    "llada2": {
        **SIZES,
        **MARKS,
        **MIXED,
        "model_type": "llada2_moe",
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "rope_theta": 600000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 64,
        "use_bias": False,
        "use_qk_norm": True,
    },
}


def keys_of(kind: str) -> dict[str, Any]:
    """What a converter writes without the architecture's name."""
    fields = FIELDS[kind]
    names = {
        "block_count": ("num_hidden_layers", "n_layers"),
        "context_length": ("max_position_embeddings", "max_sequence_length"),
        "embedding_length": ("hidden_size", "d_model"),
        "feed_forward_length": ("intermediate_size", "mlp_hidden_size"),
        "attention.head_count": ("num_attention_heads", "n_heads"),
        "attention.head_count_kv": ("num_key_value_heads", "n_kv_heads"),
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
        "rope.freq_base": ("rope_theta",),
    }
    found = {key: next(fields[name] for name in theirs if name in fields) for key, theirs in names.items()}
    if kind in ("llada", "llada2"):
        found["rope.dimension_count"] = 16
        found["vocab_size"] = 48
    if "num_experts" in fields:
        inner = fields.get("moe_intermediate_size", fields.get("expert_intermediate_size"))
        found |= {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": inner}
    if kind != "llada2":
        return {**found, "attention.causal": False}
    groups = {"expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2}
    shared = {"expert_shared_count": 1, "expert_shared_feed_forward_length": 32, "leading_dense_block_count": 1}
    weights = {"expert_weights_scale": 2.5, "expert_weights_norm": True}
    return {**found, **groups, **shared, **weights, "attention.key_length": 32, "attention.value_length": 32}


def random_state(kind: str) -> State:
    """Random tensors with the published names of a folder."""
    fields, generator = FIELDS[kind], torch.Generator().manual_seed(3)
    if kind == "llada":
        layout = llada.layout(llada.from_llada_config(fields))
    elif kind == "llada2":
        layout = llada2.layout(llada2.from_llada2_config(fields))
    else:
        named = {**fields, "model_type": hf_experts.LLADA_MOE} if kind == "llada-moe" else fields
        layout = hf.layout(from_hf_config(named), named["model_type"])
    state = {}
    for _, sources in layout.parts():
        for name, shape in sources.items():
            values = torch.randn(shape, generator=generator) * 0.2
            state[name] = values + 1 if "norm" in name or "ln_f" in name else values
    return state


def write_both(folder: Path, kind: str, format: str = "F32", **changes: Any) -> Path:
    """A folder and the file of the same model; `changes` are keys of the file, None leaves one out."""
    state, fields = random_state(kind), FIELDS[kind]
    write(folder, fields, state)
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(path, kind)
    tokens = {f"tokenizer.ggml.{name.removesuffix('_token_id')}_token_id": value for name, value in MARKS.items()}
    shift = {} if kind == "dream" else {"diffusion.shift_logits": False}
    known = {f"{kind}.{name}": value for name, value in keys_of(kind).items()} | tokens | shift
    for name, value in {**known, **changes}.items():
        if value is not None:
            add(writer, name, value)
    arch = {"llada-moe": "LLADA_MOE", "llada2": "BAILINGMOE2"}.get(kind, kind.upper())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 3)
    for name, tensor in stacked(state).items():
        array = tensor.numpy()
        if kind == "llada":
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            array = array if heads is None else permuted(array, heads)
        plain = array.ndim < 2 or name.endswith("mlp.gate.weight")
        as_kind = gguf.GGMLQuantizationType["F32" if plain else format]
        data = gguf.quants.quantize(np.ascontiguousarray(array), as_kind)
        own = name.replace(".expert_bias", ".expert_bias.bias")
        writer.add_tensor(names.get_name(own, try_suffixes=(".weight", ".bias")), data, raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
