#!/usr/bin/env bash
# Expected: `batch_select_indices` of a cache keeps the chosen sequences in every layer, as `reorder_cache` does, so that decoding goes on with their texts.
# Seen: in transformers 5.24.0 a layer with attention and a state (Falcon-H1) keeps the chosen keys and values and all states in their old order: the next
# logits are not those of the chosen texts. After `reorder_cache` with the same indices they are.
# Output seen: "reorder_cache: equal" and "batch_select_indices: different".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/sequences.py" <<'PYTHON'
import copy
import sys

import torch
import transformers

torch.manual_seed(0)
config = transformers.FalconH1Config(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=32,
    mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8, initializer_range=0.3,
)
model = transformers.FalconH1ForCausalLM(config).eval()
texts, chosen = torch.randint(1, 50, (3, 9)), torch.tensor([2, 0, 0])
with torch.no_grad():
    expected = model(texts[chosen]).logits[:, -1]
    filled = transformers.DynamicCache(config=config)
    model(texts[:, :-1], cache=filled, use_cache=True)
    seen = []
    for name in ("reorder_cache", "batch_select_indices"):
        cache = copy.deepcopy(filled)
        getattr(cache, name)(chosen)
        logits = model(texts[chosen][:, -1:], cache=cache, use_cache=True).logits[:, -1]
        seen.append("equal" if torch.allclose(logits, expected, atol=1e-3) else "different")
        print(f"{name}: {seen[-1]}, off by {float((logits - expected).abs().max()):.1e}")
print("transformers", transformers.__version__)
sys.exit(seen != ["equal", "different"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0
"$folder/venv/bin/python" "$folder/sequences.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
