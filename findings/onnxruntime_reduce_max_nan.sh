#!/usr/bin/env bash
# Expected: the largest of numbers among which there is NaN is NaN, wherever it stands, as in NumPy, in the reference of onnx, and in Max of
# the same runtime.
# Seen: ReduceMax of onnxruntime 1.32.0 on a CPU gives NaN if it comes first, and otherwise passes it over. So a check of the largest logit
# for NaN depends on where it is.
# Output seen: "ReduceMax [nan, 2, 3] nan", "ReduceMax [1, nan, 3] 3.0", "ReduceMax [1, 2, nan] 2.0", "Max of 1 and nan nan".
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


def run(op: str, **arrays: np.ndarray) -> tuple[float, float]:
    """What the runtime gives, and what the reference does."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in arrays.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node(op, list(arrays), ["y"])], "g", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, arrays)[0].item(), ReferenceEvaluator(model).run(None, arrays)[0].item()


nan = float("nan")
lists = {"[nan, 2, 3]": [nan, 2, 3], "[1, nan, 3]": [1, nan, 3], "[1, 2, nan]": [1, 2, nan]}
found = {f"ReduceMax {name}": run("ReduceMax", x=np.array(x, np.float32)) for name, x in lists.items()}
found["Max of 1 and nan"] = run("Max", a=np.array([1], np.float32), b=np.array([nan], np.float32))
seen = [f"{name} {own}" for name, (own, _) in found.items()]
print(*seen, sep="\n")
print("the reference of onnx:", [reference for _, reference in found.values()])
expected = ["ReduceMax [nan, 2, 3] nan", "ReduceMax [1, nan, 3] 3.0", "ReduceMax [1, 2, nan] 2.0", "Max of 1 and nan nan"]
sys.exit(seen != expected or not all(np.isnan(reference) for _, reference in found.values()))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
