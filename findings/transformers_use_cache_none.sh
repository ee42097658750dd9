#!/usr/bin/env bash
# Expected: `generate(use_cache=None)` leaves the choice to the model's config, so greedy decoding writes the tokens of use_cache=True, which are those of
# use_cache=False.
# Seen: transformers 5.24.0 writes other tokens for None, without a warning or an error.
# Output seen: "True and False: equal" and "True and None: different".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/decode.py" <<'PYTHON'
import sys

import torch
import transformers

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
config = transformers.LlamaConfig(**sizes, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0)
model = transformers.LlamaForCausalLM(config).eval()
prompt = torch.randint(1, 50, (1, 12))
texts = {
    use: model.generate(prompt, max_new_tokens=16, do_sample=False, use_cache=use).tolist() for use in (True, False, None)
}
print("transformers", transformers.__version__)
seen = ["equal" if texts[True] == texts[use] else "different" for use in (False, None)]
print(f"True and False: {seen[0]}", f"True and None: {seen[1]}", sep="\n")
sys.exit(seen != ["equal", "different"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0
"$folder/venv/bin/python" "$folder/decode.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
