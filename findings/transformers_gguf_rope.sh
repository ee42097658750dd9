#!/usr/bin/env bash
# Expected: a model that transformers reads from a GGUF file rotates as the file says: by the keys rope.scaling.*, which GGUF's specification has, and by the tensor
# rope_freqs.weight, which divides the frequencies and is how the files of Llama 3.1 and 3.2 say it. Or the file is refused.
# Seen: transformers 5.24.0 leaves the tensor and the keys out, and rotates without scaling, in Llama, in Qwen2 (yarn, as Qwen2.5's long contexts have it) and in Gemma 3
# (linear in its global layers, as in 4B, 12B and 27B). No error or warning says so.
# Output seen (how far the logits are from those of the model that was written, over their size): "llama, none: 0.00", "llama, rope_freqs: 1.21, and 0.00 from those without
# it", "qwen2, none: 0.00", "qwen2, yarn: 1.17, and 0.00 from those without it", "gemma3, none: 0.00", "gemma3, linear: 0.02, and 0.00 from those without it".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import pathlib
import sys

import gguf
import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config

print("transformers", transformers.__version__)
HEADS, HEAD, POSITIONS = 4, 32, 1024
shape = {
    "vocab_size": 64, "hidden_size": HEADS * HEAD, "intermediate_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS, "tie_word_embeddings": True, "initializer_range": 0.2,
}
llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
linear = {"rope_type": "linear", "factor": 8.0}
text = torch.randint(64, (1, 256), generator=torch.Generator().manual_seed(0))


def made(arch: str, scaling: dict | None) -> torch.nn.Module:
    """A model of the same weights, with or without scaling."""
    rope = {"rope_type": "default", "rope_theta": 10000.0} | (scaling or {})
    if arch == "llama":
        config = LlamaConfig(num_hidden_layers=2, rope_parameters=rope, **shape)
    elif arch == "qwen2":
        config = Qwen2Config(num_hidden_layers=2, rope_parameters=rope, **shape)
    else:
        ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
        config = Gemma3TextConfig(num_hidden_layers=6, rope_parameters=ropes, head_dim=HEAD, sliding_window=512, **shape)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def write(model: torch.nn.Module, arch: str, scaling: dict | None, file: pathlib.Path) -> None:
    """The model as the converter of llama.cpp writes it."""
    config, writer = model.config, gguf.GGUFWriter(file, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if scaling is llama3:
        rotation = model.model.rotary_emb
        plain = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        writer.add_tensor("rope_freqs.weight", (plain / rotation.inv_freq).numpy())
    elif scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if scaling is yarn:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight":  # the embeddings
            continue
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):  # pairs side by side
            weights = weights.reshape(-1, 2, HEAD // 2, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)
        elif arch == "gemma3" and name.endswith("norm.weight"):
            weights = weights + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weights.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(text).logits


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


folder, good = pathlib.Path(sys.argv[1]), True
for arch, scaling in (("llama", llama3), ("qwen2", yarn), ("gemma3", linear)):
    plain = logits(made(arch, None))
    for rule in (None, scaling):
        model = made(arch, rule)
        file = folder / "model.gguf"
        write(model, arch, rule, file)
        read = logits(AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"))
        off, same = distance(read, logits(model)), distance(read, plain)
        if rule is None:
            print(f"{arch}, none: {off:.2f}")
            good &= off < 1e-3
        else:
            label = "rope_freqs" if rule is llama3 else rule["rope_type"]
            print(f"{arch}, {label}: {off:.2f}, and {same:.2f} from those without it")
            good &= off > 0.01 and same < 1e-3
sys.exit(not good)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
