#!/usr/bin/env bash
# Expected: with longrope, texts up to original_max_position_embeddings are rotated by short_factor and longer ones by long_factor, as the paper and transformers have it,
# and as the docstring of mlx-lm's SuScaledRoPE says of the two.
# Seen: mlx-lm 0.32.2 takes short_factor and never reads it: texts of any length are rotated by long_factor, without a word. For Phi 3 with 128k every prompt up to 4,096
# tokens so gets other logits.
# Output seen (the change of the logits of 8 tokens, where the model was trained on 64): "another short_factor: 0.0, another long_factor: 0.5".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys
from importlib.metadata import version

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import phi3
from mlx_lm.models.rope_utils import SuScaledRoPE

print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"))
mx.set_default_device(mx.cpu)
assert "sequences of length lesser than" in SuScaledRoPE.__init__.__doc__
sizes = dict(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-5)


def logits(short: float, long: float) -> mx.array:
    scaling = {"type": "longrope", "short_factor": [short] * 16, "long_factor": [long] * 16, "original_max_position_embeddings": 64}
    lengths = dict(max_position_embeddings=512, original_max_position_embeddings=64)
    model = phi3.Model(phi3.ModelArgs(model_type="phi3", rope_scaling=scaling, **sizes, **lengths))
    mx.random.seed(0)
    model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.35 if p.ndim > 1 else mx.ones(p.shape), model.parameters()))
    return model(mx.arange(8)[None])


right = logits(1.0, 4.0)
short, long = (float(mx.linalg.norm(other - right) / mx.linalg.norm(right)) for other in (logits(2.0, 4.0), logits(1.0, 8.0)))
print(f"another short_factor: {short:.1f}, another long_factor: {long:.1f}")
sys.exit(not (short == 0 and long > 0.05))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile mlx-lm==0.32.2 "mlx[cpu]==0.32.4" numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
