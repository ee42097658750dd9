#!/usr/bin/env bash
# Expected: what mlx-lm exports to GGUF (mlx_lm.fuse --export-gguf) computes what the model does, or is refused: a scaling of the rotation, biases and the width of heads
# are in the file. Exports of quantised models are refused.
# Seen: mlx-lm 0.32.2 writes a scaling only if it is linear and named "type". Named "rope_type", as transformers has written it for years, it is left out, and so are llama3
# and yarn: a Llama 3.1 has neither rope.scaling keys nor rope_freqs.weight. The rows of q and k are put in the order of GGUF, their biases are not. head_dim is left out,
# and rope.dimension_count is hidden_size / num_attention_heads whatever it is. Nothing is said.
# Output seen: "linear, type: factor 4.0", "linear, rope_type: no key of a scaling", the same for "llama3" and "yarn"; "attention_bias: rows of q moved, its bias not";
# "head_dim 32 of 64 / 4: rope.dimension_count 16, no key_length".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import pathlib
import sys
from importlib.metadata import version

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.gguf import convert_to_gguf
from mlx_lm.models import llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"))
mx.set_default_device(mx.cpu)
folder = pathlib.Path(sys.argv[1], "model")
vocabulary = {f"t{number}": number for number in range(32)}
PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), bos_token="t1", eos_token="t2").save_pretrained(folder)
sizes = dict(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)


def exported(**fields: object) -> tuple[dict, dict, dict]:
    """The model's weights, and the tensors and the metadata of its file."""
    config = sizes | dict(model_type="llama", rms_norm_eps=1e-5, rope_theta=500000.0, max_position_embeddings=4096) | fields
    weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters()))
    for name, weight in weights.items():
        weights[name] = mx.random.normal(weight.shape)
    file = str(pathlib.Path(sys.argv[1], "model.gguf"))
    convert_to_gguf(folder, dict(weights), config, file)
    return weights, *mx.load(file, return_metadata=True)


low_high = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024)
rules = {
    "linear, type": {"type": "linear", "factor": 4.0},
    "linear, rope_type": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **low_high},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}
scaled = {}
for name, rule in rules.items():
    _, tensors, metadata = exported(rope_scaling=rule)
    keys = [key for key in metadata if "scaling" in key] + [key for key in tensors if "rope_freqs" in key]
    scaled[name] = bool(keys)
    print(f"{name}:", f"factor {metadata['llama.rope.scaling.factor'].item()}" if keys else "no key of a scaling")
weights, tensors, _ = exported(attention_bias=True)
moved = {}
for kind in ("weight", "bias"):
    before = weights[f"model.layers.0.self_attn.q_proj.{kind}"].reshape(64, -1)
    after = tensors[f"blk.0.attn_q.{kind}"].reshape(64, -1)
    moved[kind] = not bool(mx.array_equal(before, after))
print("attention_bias: rows of q", "moved," if moved["weight"] else "not moved,", "its bias", "moved" if moved["bias"] else "not")
_, _, metadata = exported(head_dim=32)
width, length = metadata["llama.rope.dimension_count"].item(), "llama.attention.key_length" in metadata
print(f"head_dim 32 of 64 / 4: rope.dimension_count {width}, {'a' if length else 'no'} key_length")
expected = dict.fromkeys(rules, False) | {"linear, type": True}
sys.exit(scaled != expected or moved != {"weight": True, "bias": False} or width != 16 or length)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile mlx-lm==0.32.2 "mlx[cpu]==0.32.4" transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
