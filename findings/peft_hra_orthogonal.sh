#!/usr/bin/env bash
# Expected: a fresh adapter leaves a model as it was. HRA reflects by vectors that come in equal pairs at first, so that its rank should be even, and apply_GS makes the
# vectors orthogonal to each other.
# Seen: in peft 0.21.2 what is left of the second of two equal vectors is rounding, which apply_GS=True makes a vector of length 1, or divides by 0. A fresh adapter then
# changes the output as much as a trained one does, or makes all of it NaN (seen in layers of 16 and of 32 inputs), and training begins there. Nothing is said.
# Output seen (the largest distance of a fresh adapter's output from the model's, over its length, in eight layers of 16, 32 and 64 inputs each): "rank 2: 0.0, NaN 0 times",
# "rank 2, apply_GS: 1.1, NaN 0 times", "rank 8: 0.0, NaN 0 times", "rank 8, apply_GS: 2.3, NaN 4 times".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import peft
import torch
from peft import HRAConfig, get_peft_model

print("peft", peft.__version__)
torch.set_num_threads(1)
seen = {}
with torch.no_grad():
    for rank in (2, 8):
        for orthogonal in (False, True):
            distances = []
            for seed in range(8):
                for width in (16, 32, 64):
                    torch.manual_seed(seed)
                    base, x = torch.nn.Sequential(torch.nn.Linear(width, width)), torch.randn(8, width)
                    right = base(x)
                    y = get_peft_model(base, HRAConfig(r=rank, apply_GS=orthogonal, target_modules=["0"])).eval()(x)
                    distances.append(float((y - right).norm() / right.norm()))
            far = [distance for distance in distances if distance == distance]
            seen[rank, orthogonal] = distances
            print(f"rank {rank}{', apply_GS' if orthogonal else ''}: {max(far, default=0):.1f}, NaN {len(distances) - len(far)} times")
right = all(distance < 1e-4 for (_, orthogonal), distances in seen.items() if not orthogonal for distance in distances)
wrong = all(not distance < 0.1 for (_, orthogonal), distances in seen.items() if orthogonal for distance in distances)
sys.exit(not (right and wrong))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
