#!/usr/bin/env bash
# Expected: with a sliding_window of 4 in its config, a layer sees four tokens: what the first of twelve tokens is changes nothing in the logits of the last one, if no
# other layer adds anything. mlx-lm has caches for windows, and OLMo 3 and Gemma 3 work like that.
# Seen: mlx-lm 0.32.2 passes over the field for Mistral, Mixtral, Gemma 2, Phi 3, Starcoder 2 and Qwen2 (with use_sliding_window): every layer sees all tokens, without
# a word. Beyond a window, which is 4,096 tokens in the first Mistral and in Gemma 2, their logits are others.
# Output seen (the largest change of the last token's logits): 0 for olmo3 and gemma3_text, 0.87 for mistral, 0.54 for mixtral, 0.61 for gemma2, 3.6 for phi3, 1.4 for
# starcoder2 and 0.93 for qwen2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys
from importlib.metadata import version

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes

print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"))
mx.set_default_device(mx.cpu)
sizes = dict(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, sliding_window=4)
shared = dict(rms_norm_eps=1e-6, norm_epsilon=1e-5, rope_theta=10000.0, max_position_embeddings=512, tie_word_embeddings=False)
shared |= dict(layer_types=["sliding_attention", "full_attention"], num_local_experts=4, num_experts_per_tok=2, sliding_window_pattern=2)
kinds = {"olmo3": {}, "gemma3_text": {}, "mistral": dict(layer_types=None), "mixtral": {}, "gemma2": {}, "phi3": {}, "starcoder2": {}}
kinds["qwen2"] = dict(use_sliding_window=True, max_window_layers=0)
texts = [mx.array([[first, *range(11)]]) for first in (20, 25)]


def change(name: str, fields: dict) -> float:
    config = sizes | shared | fields | {"model_type": name}
    config = {key: value for key, value in config.items() if value is not None}
    kind, arguments = _get_classes(config)
    model = kind(arguments.from_dict(config))
    mx.random.seed(0)
    model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.2 if p.ndim > 1 else mx.ones(p.shape), model.parameters()))
    model.layers[1].update(tree_map(mx.zeros_like, model.layers[1].parameters()))  # it adds nothing
    one, other = (model(text, cache=model.make_cache() if hasattr(model, "make_cache") else None)[0, -1] for text in texts)
    return float(mx.abs(one - other).max())


seen = {name: change(name, fields) for name, fields in kinds.items()}
for name, value in seen.items():
    print(f"{name}: {value:.2g}")
sys.exit({name for name, value in seen.items() if value == 0} != {"olmo3", "gemma3_text"} or sorted(seen.values())[2] < 0.01)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile mlx-lm==0.32.2 "mlx[cpu]==0.32.4" numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
