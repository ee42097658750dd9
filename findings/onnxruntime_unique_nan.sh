#!/usr/bin/env bash
# Expected: Unique of [NaN, NaN, 1] has 1 among its values. NaN may count once, as in NumPy and in the reference of onnx, or twice.
# Seen: onnxruntime 1.32.0 on a CPU takes NaN for the same as any number it meets in its search: the 1 is gone, with a count of 3 for NaN, and of
# [1, NaN, 2] the NaN is gone and 1 counts twice.
# Output seen: "[nan, nan, 1.0] -> [nan], counts [3]", "[1.0, nan, 2.0] -> [1.0, 2.0], counts [2, 1]", "[2.0, 1.0, 2.0] -> [1.0, 2.0], counts [1, 2]".
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


def unique(numbers: list[float]) -> str:
    given = np.array(numbers, np.float32)
    outputs = ["values", "first", "inverse", "counts"]
    graph = helper.make_graph(
        [helper.make_node("Unique", ["x"], outputs)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, given.shape)],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values, _, _, counts = session.run(None, {"x": given})
    reference = ReferenceEvaluator(model).run(None, {"x": given})
    print("the reference of onnx:", reference[0].tolist(), reference[3].tolist())
    return f"{numbers} -> {values.tolist()}, counts {counts.tolist()}"


nan = float("nan")
seen = [unique(numbers) for numbers in ([nan, nan, 1.0], [1.0, nan, 2.0], [2.0, 1.0, 2.0])]
print(*seen, sep="\n")
expected = ["[nan, nan, 1.0] -> [nan], counts [3]", "[1.0, nan, 2.0] -> [1.0, 2.0], counts [2, 1]", "[2.0, 1.0, 2.0] -> [1.0, 2.0], counts [1, 2]"]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
