#!/usr/bin/env bash
# Expected: sums, maxima, products of matrices and powers of 32-bit integers are exact, as sums and products of the elements of two tensors are,
# and as NumPy has them.
# Seen: OpenVINO 2026.4.1 on a CPU computes them in float32. 16,777,217 + 2 is 16,777,218, the larger of 2147483646 and 2147483647 is
# -2147483648, and 3 to the power of 19 is off by 37. A CumSum of the same numbers is exact. So positions, counts and masks that are added up
# as integers are right up to 2^24 only.
# Output seen: "ReduceSum 16777218", "ReduceMax -2147483648", "MatMul 16777216", "Power 1162261504", "CumSum 16777219".
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


def integers(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


first = op.constant(np.array([0]))
seen = {
    "ReduceSum": run(lambda x: op.reduce_sum(x, first), integers(16777217, 2)),
    "ReduceMax": run(lambda x: op.reduce_max(x, first), integers(2147483646, 2147483647)),
    "MatMul": run(lambda a, b: op.matmul(a, b, False, False), integers(16777217, 1)[None], integers(1, 0)[:, None]),
    "Power": run(op.power, integers(3), integers(19)),
    "CumSum": run(lambda x: op.cum_sum(x, op.constant(np.array(0))), integers(16777217, 2))[1:],
}
found = {name: int(value.item()) for name, value in seen.items()}
for name, value in found.items():
    print(name, value)
expected = {
    "ReduceSum": 16777218,
    "ReduceMax": -2147483648,
    "MatMul": 16777216,
    "Power": 1162261504,
    "CumSum": 16777219,
}
sys.exit(found != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
