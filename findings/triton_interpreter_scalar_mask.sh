#!/usr/bin/env bash
# Expected: TRITON_INTERPRET=1 runs a kernel whose load is masked by a comparison of scalars, such as `mask=n > 2`, which compiled kernels may use
# and which Triton 3.8.0's interpreter runs.
# Seen: Triton 3.9.0's interpreter refuses it ("mask has unsupported dtype"): the comparison keeps the dtype of its operands when it is spread over
# the block. A comparison of blocks, such as `mask=offsets < n`, works.
# Output seen: "3.8.0: [0.0, 1.0, 2.0, 3.0]" and "3.9.0: mask has unsupported dtype".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/load.py" <<'PYTHON'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=n > 2, other=0.0))


x, out = torch.arange(4.0), torch.full((4,), -1.0)
try:
    copy[(1,)](x, out, 3, 4)
    seen = str(out.tolist())
except Exception as error:
    seen = str(error.__cause__ or error).splitlines()[-1]
print(f"{triton.__version__}: {seen}")
sys.exit(seen != sys.argv[1])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
for pair in "3.8.0=[0.0, 1.0, 2.0, 3.0]" "3.9.0=mask has unsupported dtype"; do
  "$folder/venv/bin/pip" install -q --disable-pip-version-check --no-deps "triton==${pair%%=*}"
  TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/load.py" "${pair#*=}"
done
