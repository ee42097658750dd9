#!/usr/bin/env bash
# Expected: reductions of bfloat16 on a CPU add up in float32 and round once, as torch's sum, mean, dot, cumsum, cumprod and scatter_add do.
# Seen: in torch 2.13.0 prod, histc, index_add and index_put(accumulate=True) round to bfloat16 as they go, beside functions that compute the same and do not. The product
# of 1,000 times 1.0078125, which is 2397, is 1632 by prod and 2400 by cumprod; 1,000 ones add up to 256 by index_add and index_put and to 1000 by scatter_add, and
# histc counts 256 of 1,000 numbers.
# Output seen: "product: prod 1632.0, cumprod 2400.0", "1,000 ones: index_add 256.0, index_put 256.0, histc 256.0, scatter_add 1000.0, cumsum 1000.0, sum 1000.0".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import torch

torch.set_num_threads(1)
factors, ones = torch.full((1000,), 1.0078125, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bfloat16)
nothing, places = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.int64)
sums = {
    "index_add": nothing.index_add(0, places, ones),
    "index_put": nothing.index_put((places,), ones, accumulate=True),
    "histc": torch.histc(ones, 1),
    "scatter_add": nothing.scatter_add(0, places, ones),
    "cumsum": ones.cumsum(0)[-1:],
    "sum": ones.sum(),
}
seen = [f"product: prod {factors.prod().item()}, cumprod {factors.cumprod(0)[-1].item()}"]
seen.append("1,000 ones: " + ", ".join(f"{name} {total.item()}" for name, total in sums.items()))
print("torch", torch.__version__, *seen, sep="\n")
few, whole = ("index_add", "index_put", "histc"), ("scatter_add", "cumsum", "sum")
prod = abs(factors.prod().item() - 2397) > 240 and abs(factors.cumprod(0)[-1].item() - 2397) < 12
sys.exit(not (prod and all(sums[name].item() == 256 for name in few) and all(sums[name].item() == 1000 for name in whole)))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
