#!/usr/bin/env bash
# Expected: an OFT that has not been trained rotates by nothing, and leaves the model as it was. With merge_adapter the model computes what it computed before.
# Seen: in peft 0.21.2 that holds for linear layers, embeddings and convolutions with a kernel of 1. For a Conv2d with a larger kernel the input is cut into patches, which
# overlap; after the rotation they are put together again in another order of dimensions than fold reads, and added up. A fresh adapter so changes the output altogether,
# and merged into the weights it does not. Nothing is said.
# Output seen (how far the output is from that without an adapter, over its length): "Linear: 0.0, merged 0.0", "Conv2d, kernel 1: 0.0, merged 0.0", "Conv2d, kernel 3: 2.9,
# merged 0.0", "Conv2d, kernel 5: 4.2, merged 0.0"; BOFT of the same convolutions 0.0 and 0.0.
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


@torch.no_grad()
def distances(layer: torch.nn.Module, config: peft.PeftConfig, x: torch.Tensor) -> tuple[float, float]:
    base = torch.nn.Sequential(layer).eval()
    right = base(x)
    config.target_modules = ["0"]
    model = get_peft_model(copy.deepcopy(base), config).eval()
    separate = model(x)
    model.merge_adapter()
    return tuple(float((value - right).norm() / right.norm()) for value in (separate, model(x)))


image = torch.randn(2, 4, 15, 15)
convolutions = {size: torch.nn.Conv2d(4, 8, size, padding=size // 2, bias=False) for size in (1, 3, 5)}
seen = {"Linear": distances(torch.nn.Linear(16, 16, bias=False), peft.OFTConfig(r=0, oft_block_size=4), torch.randn(2, 16))}
for size, layer in convolutions.items():
    seen[f"Conv2d, kernel {size}"] = distances(layer, peft.OFTConfig(r=0, oft_block_size=4), image)
    seen[f"Conv2d, kernel {size}, BOFT"] = distances(layer, peft.BOFTConfig(boft_block_size=4), image)
for name, (separate, merged) in seen.items():
    print(f"{name}: {separate:.1f}, merged {merged:.1f}")
far = {name for name, (separate, _) in seen.items() if separate > 1}
close = {name for name, (separate, _) in seen.items() if separate < 1e-5}
sys.exit(far != {"Conv2d, kernel 3", "Conv2d, kernel 5"} or far | close != {*seen} or max(merged for _, merged in seen.values()) > 1e-5)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
