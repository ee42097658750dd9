#!/usr/bin/env bash
# Expected: a model with two active adapters computes the same merged and unmerged, whatever their order.
# Seen: in peft 0.21.2 OFT does not. Two rotations do not commute: the input goes through those of the active adapters in their order, and merging multiplies the weights
# by them in the same order, which is the other one for an input. With one adapter, and with BOFT, HRA or LoRA, merging changes nothing.
# Output seen (how far the merged output is from the unmerged one, over what the adapters change): "one OFT: 0.0", "two OFT: 0.5", "two OFT, merged in the other order:
# 0.0", "two BOFT: 0.0", "two HRA: 0.0", "two LoRA: 0.0".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import copy
import sys

import peft
import torch
from peft import get_peft_model

print("peft", peft.__version__)
torch.set_num_threads(1)
torch.manual_seed(0)
base, x = torch.nn.Sequential(torch.nn.Linear(16, 16)).eval(), torch.randn(8, 16)


@torch.no_grad()
def distance(config: peft.PeftConfig, active: list[str], merged: list[str]) -> float:
    config.target_modules = ["0"]
    model = get_peft_model(copy.deepcopy(base), config, adapter_name="first")
    model.add_adapter("second", copy.deepcopy(config))
    model.eval()
    for key, weights in model.named_parameters():  # as if it had been trained
        if "first" in key or "second" in key:
            weights.add_(torch.randn(weights.shape) * 0.3)
    model.base_model.set_adapter(active)
    right = model(x)
    model.merge_adapter(merged)
    return float((model(x) - right).norm() / (right - base(x)).norm())


oft, both = peft.OFTConfig(r=0, oft_block_size=4), ["first", "second"]
seen = {
    "one OFT": distance(oft, both[:1], both[:1]),
    "two OFT": distance(oft, both, both),
    "two OFT, merged in the other order": distance(oft, both, both[::-1]),
    "two BOFT": distance(peft.BOFTConfig(boft_block_size=4), both, both),
    "two HRA": distance(peft.HRAConfig(r=4), both, both),
    "two LoRA": distance(peft.LoraConfig(r=4), both, both),
}
for name, value in seen.items():
    print(f"{name}: {value:.1f}")
sys.exit({name for name, value in seen.items() if value > 1e-4} != {"two OFT"} or seen["two OFT"] < 0.1)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
