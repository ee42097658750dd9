#!/usr/bin/env bash
# Expected: the mean of ten million times 0.1 is 0.1 within a few units in the last place, as in NumPy, which adds in pairs, and in torch; and
# the mean of a hundred times 1,000 in float16 is 1,000, as in both, which divide a sum in 32 bits.
# Seen: mlx 0.32.4 on a CPU adds one number after the other in the array's own type. The mean is 0.1088, 9 % off; in float16 the sum passes
# 65,504, and the mean of numbers that fit is infinite.
# Output seen: "mean of 0.1 0.1088, NumPy 0.1", "mean of 1000 in float16 inf, NumPy 1000.0".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import importlib.metadata
import sys

import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
print("mlx", importlib.metadata.version("mlx"))
many, few = np.full(10_000_000, 0.1, np.float32), np.full(100, 1000, np.float16)
seen = [
    f"mean of 0.1 {mx.array(many).mean().item():.4g}, NumPy {many.mean():.4g}",
    f"mean of 1000 in float16 {mx.array(few).mean().item()}, NumPy {float(few.mean())}",
]
print(*seen, sep="\n")
sys.exit(seen != ["mean of 0.1 0.1088, NumPy 0.1", "mean of 1000 in float16 inf, NumPy 1000.0"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
