#!/usr/bin/env bash
# Expected: the probabilities of a softmax in 16 bits add up to 1 within their rounding, whatever the size of the vocabulary, as in NumPy and
# torch, where the sum of the exponentials is kept in 32 bits.
# Seen: in mlx 0.32.4 on a CPU it is kept in 16 bits, and stops growing: at 2,048 in float16, at 256 in bfloat16. Those of 32,000 equal logits
# add up to 15.6 in float16 and to 125 in bfloat16. With precise=True they add up to 1. logsumexp is right either way.
# Output seen: "float16 32000: 15.625, precise 0.9995", "bfloat16 32000: 125.0, precise 0.9995", "bfloat16 512: 2.0, precise 1.0".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import importlib.metadata
import sys

import mlx.core as mx

mx.set_default_device(mx.cpu)
print("mlx", importlib.metadata.version("mlx"))


def mass(dtype: mx.Dtype, size: int, precise: bool) -> float:
    return round(mx.softmax(mx.zeros(size, dtype), precise=precise).astype(mx.float32).sum().item(), 4)


seen = [
    f"{str(dtype).split('.')[-1]} {size}: {mass(dtype, size, False)}, precise {mass(dtype, size, True)}"
    for dtype, size in ((mx.float16, 32000), (mx.bfloat16, 32000), (mx.bfloat16, 512))
]
print(*seen, sep="\n")
expected = ["float16 32000: 15.625, precise 0.9995", "bfloat16 32000: 125.0, precise 0.9995", "bfloat16 512: 2.0, precise 1.0"]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
