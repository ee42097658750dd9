#!/usr/bin/env bash
# Expected: a model whose inputs and outputs are int64 or float64 computes with 64 bits, or is refused.
# Seen: OpenVINO 2026.4.1 on a CPU computes with 32 bits and returns tensors of 64. 2^40 + 1 is 1, the largest of 1, 2^33 and 5 is 5, and
# 1e300 + 1 is 3.4e38.
# Output seen: "2^40 + 1 = 1 (int64)", "2^20 * 2^20 = 0 (int64)", "largest of 1, 2^33, 5 = 5 (int64)", "1e300 + 1 = 3.4028234663852886e+38 (float64)".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numpy as np
import openvino as ov
from openvino import opset15 as op

print("openvino", ov.__version__)
core = ov.Core()


def run(function, *arrays: np.ndarray) -> np.ndarray:
    """The function of parameters, compiled for the CPU, on the arrays."""
    given = [op.parameter(list(array.shape), ov.Type(array.dtype)) for array in arrays]
    compiled = core.compile_model(ov.Model([function(*given)], given, "m"), "CPU")
    return compiled(list(arrays))[0]


def largest(x):
    return op.topk(x, op.constant(np.array(1)), 0, "max", "value").output(0)


seen = {
    "2^40 + 1": run(op.add, np.array([2**40]), np.array([1])),
    "2^20 * 2^20": run(op.multiply, np.array([2**20]), np.array([2**20])),
    "largest of 1, 2^33, 5": run(largest, np.array([1, 2**33, 5])),
    "1e300 + 1": run(op.add, np.array([1e300]), np.array([1.0])),
}
found = [f"{name} = {value.item()} ({value.dtype})" for name, value in seen.items()]
print(*found, sep="\n")
expected = [
    "2^40 + 1 = 1 (int64)",
    "2^20 * 2^20 = 0 (int64)",
    "largest of 1, 2^33, 5 = 5 (int64)",
    "1e300 + 1 = 3.4028234663852886e+38 (float64)",
]
sys.exit(found != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
