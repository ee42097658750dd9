#!/usr/bin/env bash
# Expected: add_weighted_adapter of one adapter with the weight 1 makes an adapter that computes the same, by "cat" and by "svd".
# Seen: in peft 0.21.2 that holds for plain LoRA, with patterns of ranks and of alphas too. The new adapter takes use_dora and lora_bias from the old one's config, and
# neither its magnitudes nor its biases: a DoRA has magnitudes of its own, made of the base's weights, and the biases are 0. Of use_rslora it takes a second scale, the
# root of the rank, beside the one that is already in its matrices. Nothing is said.
# Output seen (how far the new one's output is from the old one's, over what the old one changes, by "cat" and by "svd"): "plain 0.0 0.0", "rank_pattern 0.0 0.0",
# "alpha_pattern 0.0 0.0", "use_rslora 3.0 3.0" (rank 16), "use_dora 0.9 0.9", "lora_bias 0.4 0.4".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import peft
import torch
from peft import LoraConfig, get_peft_model

print("peft", peft.__version__)
torch.set_num_threads(1)
kinds = {
    "plain": {},
    "rank_pattern": {"rank_pattern": {"0": 8}},
    "alpha_pattern": {"alpha_pattern": {"0": 64}},
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
}


@torch.no_grad()
def distance(combination: str, **options) -> float:
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(64, 64))
    x = torch.randn(8, 64)
    plain = base(x)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=16, target_modules=["0"], **options), "old")
    for name, weights in model.named_parameters():  # as if it had been trained
        if "lora_B" in name:
            weights.normal_(std=0.1)
        elif "magnitude" in name:
            weights.mul_(2)
    old = model(x)
    model.base_model.add_weighted_adapter(["old"], [1.0], "new", combination_type=combination)
    model.base_model.set_adapter("new")
    return float((model(x) - old).norm() / (old - plain).norm())


seen = {name: [distance(combination, **options) for combination in ("cat", "svd")] for name, options in kinds.items()}
for name, (cat, svd) in seen.items():
    print(name, f"{cat:.1f}", f"{svd:.1f}")
right = all(max(seen[name]) < 1e-4 for name in ("plain", "rank_pattern", "alpha_pattern"))
wrong = all(abs(value - 3) < 1e-3 for value in seen["use_rslora"]) and min(seen["use_dora"] + seen["lora_bias"]) > 0.1
sys.exit(not (right and wrong))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
