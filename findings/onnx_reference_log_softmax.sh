#!/usr/bin/env bash
# Expected: onnx's reference evaluator, the judge of other runtimes, gives the log-probability -1000 to a logit that is 1,000 below the largest,
# and log(0) + log(0) is -inf in its ReduceLogSumExp.
# Seen: in onnx 1.23.2 it takes the logarithm of a softmax that has become 0, and says -inf; ReduceLogSumExp of two times -inf is NaN.
# onnxruntime 1.32.0 gives -1000 and -inf.
# Output seen: "LogSoftmax reference [-inf, 0.0], onnxruntime [-1000.0, 0.0]", "ReduceLogSumExp reference [nan], onnxruntime [-inf]".
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


def run(op: str, numbers: list[float]) -> str:
    feed = {"x": np.array(numbers, np.float32)}
    ends = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", [next(ends)], [next(ends)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with np.errstate(all="ignore"):
        reference = ReferenceEvaluator(model).run(None, feed)[0]
    return f"{op} reference {reference.tolist()}, onnxruntime {session.run(None, feed)[0].tolist()}"


seen = [run("LogSoftmax", [0, 1000]), run("ReduceLogSumExp", [float("-inf"), float("-inf")])]
print(*seen, sep="\n")
expected = [
    "LogSoftmax reference [-inf, 0.0], onnxruntime [-1000.0, 0.0]",
    "ReduceLogSumExp reference [nan], onnxruntime [-inf]",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
