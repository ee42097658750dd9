#!/usr/bin/env bash
# Expected: `return_dict=False` in a model's config makes its forward return a tuple, as the argument of the same name does.
# Seen: transformers 5.24.0 returns a tuple for the argument, and raises AttributeError for the config in LlamaForCausalLM and GPT2LMHeadModel: the inner
# model follows its config and returns a tuple, of which the outer one asks `last_hidden_state`. BertForMaskedLM takes both.
# Output seen: "LlamaForCausalLM: argument tuple, config AttributeError", the same for GPT2LMHeadModel, "BertForMaskedLM: argument tuple, config tuple".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/forward.py" <<'PYTHON'
import sys

import torch
import transformers

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
MODELS = {
    "LlamaForCausalLM": transformers.LlamaConfig(**SIZES),
    "GPT2LMHeadModel": transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2),
    "BertForMaskedLM": transformers.BertConfig(**SIZES),
}


def kind(model, **arguments) -> str:
    try:
        return type(model(torch.tensor([[1, 2, 3]]), **arguments)).__name__
    except AttributeError as error:
        return type(error).__name__


seen = []
for name, config in MODELS.items():
    model = getattr(transformers, name)(config).eval()
    by_argument = kind(model, return_dict=False)
    config.return_dict = False
    seen.append(f"{name}: argument {by_argument}, config {kind(getattr(transformers, name)(config).eval())}")
print(f"transformers {transformers.__version__}", *seen, sep="\n")
expected = {"LlamaForCausalLM": "AttributeError", "GPT2LMHeadModel": "AttributeError", "BertForMaskedLM": "tuple"}
sys.exit(seen != [f"{name}: argument tuple, config {outcome}" for name, outcome in expected.items()])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0
"$folder/venv/bin/python" "$folder/forward.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
