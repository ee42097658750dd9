#!/usr/bin/env bash
# Expected: adapter_names of a forward pass says which adapter each row of the batch goes through, or is refused, as by DoRA: "Cannot pass `adapter_names` when DoRA is
# enabled".
# Seen: in peft 0.21.2 LoRA and RoAd follow it. LoHa, LoKr, IA3, OFT, BOFT, VeRA, FourierFT and HRA on linear layers take the names and put every row through the active
# adapter, rows that asked for "__base__" too. Nothing is said.
# Output seen (which of active, other and base each row was computed with, for the names active, other and __base__): "LoRA: active other base", "Road: active other
# base", and "active active active" for the eight others; "LoRA with use_dora: ValueError".
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
configs = {
    "LoRA": peft.LoraConfig(r=4),
    "Road": peft.RoadConfig(group_size=4),
    "LoHa": peft.LoHaConfig(r=4),
    "LoKr": peft.LoKrConfig(r=4),
    "IA3": peft.IA3Config(feedforward_modules=[]),
    "OFT": peft.OFTConfig(r=0, oft_block_size=4),
    "BOFT": peft.BOFTConfig(boft_block_size=4),
    "VeRA": peft.VeraConfig(r=4),
    "FourierFT": peft.FourierFTConfig(n_frequency=20),
    "HRA": peft.HRAConfig(r=4),
    "LoRA with use_dora": peft.LoraConfig(r=4, use_dora=True),
}
torch.manual_seed(0)
base, x = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)), torch.randn(3, 16)
base.eval()


@torch.no_grad()
def rows(config: peft.PeftConfig) -> str:
    config.target_modules = ["0", "2"]
    model = get_peft_model(copy.deepcopy(base), config, adapter_name="active")
    model.add_adapter("other", copy.deepcopy(config))
    model.eval()
    right = {"base": base(x)}
    for name in ("other", "active"):
        model.set_adapter(name)
        for key, weights in model.named_parameters():  # as if it had been trained
            if weights.requires_grad and name in key.split("."):
                weights.add_(torch.randn(weights.shape) * 0.3)
        right[name] = model(x)
    try:
        mixed = model(x, adapter_names=["active", "other", "__base__"])
    except ValueError:
        return "ValueError"
    return " ".join(next((name for name in right if mixed[row].allclose(right[name][row], atol=1e-5)), "none") for row in range(3))


seen = {name: rows(config) for name, config in configs.items()}
print(*(f"{name}: {kind}" for name, kind in seen.items()), sep="\n")
expected = dict.fromkeys(configs, "active active active") | dict.fromkeys(("LoRA", "Road"), "active other base") | {"LoRA with use_dora": "ValueError"}
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
