#!/usr/bin/env bash
# Expected: greedy decoding with a draft model writes the tokens of greedy decoding, or is refused, as for caches that cannot be trimmed: "Speculative decoding requires a
# trimmable prompt cache".
# Seen: mlx-lm 0.32.2 asks that once, when the cache is empty. The cache of a layer with a window can be trimmed only until the window is full: from then on what was
# rejected of a draft stays in it, while trim_prompt_cache says nothing, and other tokens are written. Short texts, and a draft model that is always right, show nothing.
# Output seen (Llamas with random weights, a window of 16 in one of two layers, 12 prompts of 8 tokens; texts that are those of greedy decoding, 4 new tokens and 40): "full attention: 12 of 12, 12 of 12", "window: 12 of 12, 0 of 12", "window, the model drafts for itself: 12 of 12, 12 of 12".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import random
import sys
from importlib.metadata import version

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama

print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"))
mx.set_default_device(mx.cpu)
TOKENS = 32
sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=TOKENS)


def made(seed: int, **kind: object) -> llama.Model:
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, tie_word_embeddings=False, **sizes, **kind))
    model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.35 if p.ndim > 1 else mx.ones(p.shape), model.parameters()))
    return model


full, draft = made(1), made(2)
window = made(3, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
numbers = random.Random(0)
prompts = [mx.array([numbers.randrange(TOKENS) for _ in range(8)]) for _ in range(12)]
seen = {}
for name, model, drafter in (("full attention", full, draft), ("window", window, draft), ("window, the model drafts for itself", window, window)):
    same = [0, 0]
    for prompt in prompts:
        for case, count in enumerate((4, 40)):
            plain = [int(token) for token, _ in generate_step(prompt, model, max_tokens=count)]
            drafted = [int(token) for token, *_ in speculative_generate_step(prompt, model, drafter, num_draft_tokens=3, max_tokens=count)]
            same[case] += plain == drafted
    seen[name] = same
    print(f"{name}: {same[0]} of 12, {same[1]} of 12")
sys.exit(not (seen["full attention"] == [12, 12] == seen["window, the model drafts for itself"] and seen["window"][0] == 12 and seen["window"][1] < 6))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile mlx-lm==0.32.2 "mlx[cpu]==0.32.4" numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
