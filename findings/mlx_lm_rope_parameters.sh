#!/usr/bin/env bash
# Expected: a folder that transformers writes is read as it is meant, or refused. Since version 5 the base and the scaling of a rotation are one dictionary in config.json,
# rope_parameters; mlx-lm 0.32.2 asks for transformers 5 and follows the dictionary for Qwen3.
# Seen: for Llama, Mistral, Qwen2 and OLMo 2 it looks for rope_theta and rope_scaling alone, as transformers 4 wrote them. It takes its own bases in their place, 10000 or a
# million, and no scaling, without a word. transformers takes both spellings for the same.
# Output seen (how far the logits of the folder that transformers 5.24.0 wrote are from those of the old spelling, over their length): "llama: 0.6", "mistral: 0.6",
# "qwen2: 0.9", "olmo2: 0.2", "qwen3: 0.0".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import pathlib
import sys
from importlib.metadata import version

import mlx.core as mx
import transformers
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes, load_model
from transformers import AutoConfig

print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"), "transformers", transformers.__version__)
mx.set_default_device(mx.cpu)
rotation = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
sizes = dict(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
tokens = mx.arange(24)[None]


def logits(folder: pathlib.Path, config: dict) -> mx.array:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kind, arguments = _get_classes(config)
    mx.random.seed(0)
    model = kind(arguments.from_dict(config))
    weights = tree_map(lambda p: mx.random.normal(p.shape) * 0.35 if p.ndim > 1 else mx.ones(p.shape), model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(weights)))
    return load_model(folder)[0](tokens)


seen = {}
for name in ("llama", "mistral", "qwen2", "olmo2", "qwen3"):
    folder = pathlib.Path(sys.argv[1], name)
    AutoConfig.for_model(name, **sizes, rope_parameters=rotation, max_position_embeddings=512, rms_norm_eps=1e-6, eos_token_id=2, tie_word_embeddings=False).save_pretrained(folder)
    new = json.loads((folder / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "rope_parameters"} | {"rope_theta": 500.0}
    old["rope_scaling"] = {key: value for key, value in rotation.items() if key != "rope_theta"}
    assert new["rope_parameters"] == rotation and "rope_theta" not in new
    right, read = logits(folder, old), logits(folder, new)
    assert AutoConfig.for_model(**old).rope_parameters == rotation  # transformers reads the old spelling
    seen[name] = float(mx.linalg.norm(read - right) / mx.linalg.norm(right))
    print(f"{name}: {seen[name]:.1f}")
sys.exit({name for name, distance in seen.items() if distance > 0.1} != {*seen} - {"qwen3"} or seen["qwen3"] > 1e-5)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile mlx-lm==0.32.2 "mlx[cpu]==0.32.4" transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
