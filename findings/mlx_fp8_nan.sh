#!/usr/bin/env bash
# Expected: NaN stays NaN in an 8-bit float that has one (e4m3fn), as in ml_dtypes and torch, so that a broken weight or activation is seen.
# Seen: to_fp8 of mlx 0.32.4 on a CPU makes the largest number of it, 448, as it does of infinity; the result of from_fp8 looks sound.
# Output seen: "mlx [448.0, 448.0, 18.0]", "ml_dtypes [nan, nan, 18.0]".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import importlib.metadata
import sys

import ml_dtypes
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
print("mlx", importlib.metadata.version("mlx"))
numbers = np.array([np.nan, np.inf, 18], np.float32)
seen = [
    f"mlx {mx.from_fp8(mx.to_fp8(mx.array(numbers)), mx.float32).tolist()}",
    f"ml_dtypes {numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()}",
]
print(*seen, sep="\n")
sys.exit(seen != ["mlx [448.0, 448.0, 18.0]", "ml_dtypes [nan, nan, 18.0]"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" "$folder/seen.py"
