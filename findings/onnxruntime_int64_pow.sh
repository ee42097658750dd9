#!/usr/bin/env bash
# Expected: powers and sums of squares of int64 are exact where the result fits 64 bits, as in NumPy and in the reference of onnx; positions,
# hashes and ids are such numbers.
# Seen: onnxruntime 1.32.0 on a CPU computes them by way of doubles, so that bits beyond the 53rd are lost: 3 to the 39th ends in 256 and not
# in 267, and a square in 288 and not in 289.
# Output seen: "3 ** 39 4052555153018976256, reference 4052555153018976267", "94906267 ** 2 9007199515875288, reference 9007199515875289",
# "94906267 ** 2 + 3 ** 2 9007199515875296, reference 9007199515875298".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

print("onnxruntime", onnxruntime.__version__, "onnx", onnx.__version__)


def run(op: str, **lists: list[int]) -> str:
    arrays = {name: np.array(numbers, np.int64) for name, numbers in lists.items()}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, x.shape) for name, x in arrays.items()]
    output = helper.make_tensor_value_info("y", TensorProto.INT64, [1])
    graph = helper.make_graph([helper.make_node(op, list(arrays), ["y"])], "g", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return f"{session.run(None, arrays)[0].item()}, reference {ReferenceEvaluator(model).run(None, arrays)[0].item()}"


seen = [
    f"3 ** 39 {run('Pow', a=[3], b=[39])}",
    f"94906267 ** 2 {run('Pow', a=[94906267], b=[2])}",
    f"94906267 ** 2 + 3 ** 2 {run('ReduceSumSquare', x=[94906267, 3])}",
]
print(*seen, sep="\n")
expected = [
    "3 ** 39 4052555153018976256, reference 4052555153018976267",
    "94906267 ** 2 9007199515875288, reference 9007199515875289",
    "94906267 ** 2 + 3 ** 2 9007199515875296, reference 9007199515875298",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
