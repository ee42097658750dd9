#!/usr/bin/env bash
# Expected: comparing a tensor of integers with a number, or with a tensor of one number, says which is larger, as NumPy does. Type promotion keeps the tensor's dtype for
# the result of arithmetic; a comparison has no such result, and no value of an int8 is 775.
# Seen: torch 2.13.0 first wraps the number to the tensor's dtype, without a word: 71 < 775 is False in int8 (775 is 7 there), 5 == 2**32 + 5 is True in int32, and isin,
# searchsorted and maximum do the same. A tensor with one dimension is compared rightly, clamp raises, and under torch.compile all are as in eager mode.
# Output seen: "int8: 71 < 775 False, == 327 True, < tensor(775) False, < tensor([775]) True", "int32: 5 < 2**32 False, == 2**32 + 5 True", "isin 327: True,
# searchsorted of 775: 0, maximum: 71", "numpy: True".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numpy as np
import torch

x, y, far = torch.tensor([71], dtype=torch.int8), torch.tensor([5], dtype=torch.int32), torch.tensor(775)
seen = [
    f"int8: 71 < 775 {(x < 775).item()}, == 327 {(x == 327).item()}, < tensor(775) {(x < far).item()}, < tensor([775]) {(x < far[None]).item()}",
    f"int32: 5 < 2**32 {(y < 2**32).item()}, == 2**32 + 5 {(y == 2**32 + 5).item()}",
    f"isin 327: {torch.isin(x, 327).item()}, searchsorted of 775: {torch.searchsorted(x, 775).item()}, maximum: {torch.maximum(x, far).item()}",
    f"numpy: {(x.numpy() < np.int64(775)).item()}",
]
print("torch", torch.__version__)
print(*seen, sep="\n")
expected = ["int8: 71 < 775 False, == 327 True, < tensor(775) False, < tensor([775]) True", "int32: 5 < 2**32 False, == 2**32 + 5 True"]
expected += ["isin 327: True, searchsorted of 775: 0, maximum: 71", "numpy: True"]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
