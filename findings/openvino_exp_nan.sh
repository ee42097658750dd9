#!/usr/bin/env bash
# Expected: NaN goes through elementwise functions, and a softmax of a row with a NaN is NaN everywhere, as in NumPy, PyTorch and onnxruntime.
# Seen: OpenVINO 2026.4.1 on a CPU says that exp(NaN) is infinity, that relu, clamp and hsigmoid of NaN are 0, and gives a row with one NaN the
# softmax 0 everywhere else. tanh, log and sqrt keep NaN. So a model that has gone wrong in one layer gives numbers again in the next.
# Output seen: "exp inf", "relu 0.0", "clamp 0.0", "hsigmoid 0.0", "tanh nan", "log nan", "sqrt nan", "softmax [0.0, nan, 0.0]".
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


nan = np.array([np.nan], np.float32)
functions = {
    "exp": op.exp,
    "relu": op.relu,
    "clamp": lambda x: op.clamp(x, 0.0, 1.0),
    "hsigmoid": op.hsigmoid,
    "tanh": op.tanh,
    "log": op.log,
    "sqrt": op.sqrt,
}
seen = [f"{name} {run(function, nan).item()}" for name, function in functions.items()]
seen.append(f"softmax {run(lambda x: op.softmax(x, 0), np.array([1, np.nan, 2], np.float32)).tolist()}")
print(*seen, sep="\n")
expected = ["exp inf", "relu 0.0", "clamp 0.0", "hsigmoid 0.0", "tanh nan", "log nan", "sqrt nan", "softmax [0.0, nan, 0.0]"]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
