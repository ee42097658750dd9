#!/usr/bin/env bash
# Expected: NaN is greater than nothing, and no answer depends on which vector instructions the processor has.
# Seen: OpenVINO 2026.4.1 on a CPU with AVX-512 answers True to NaN > 1, NaN >= 1 and 1 >= NaN, and lets Select take NaN where x > 0. Held to AVX2 on the
# same processor (ONEDNN_MAX_CPU_ISA), it answers False. Less and LessEqual are False on both.
# Output seen with AVX-512: "NaN > 1 True", "NaN >= 1 True", "1 >= NaN True", "NaN < 1 False", "NaN <= 1 False", "where x > 0 nan"; held to AVX2: all
# False and 7.0. A processor without AVX-512 runs the second half only.
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


nan, one, other = (np.array([x], np.float32) for x in (np.nan, 1, 7))


def positive(x):
    return op.select(op.greater(x, op.constant(np.float32(0))), x, op.constant(other))


seen = [
    f"NaN > 1 {run(op.greater, nan, one).item()}",
    f"NaN >= 1 {run(op.greater_equal, nan, one).item()}",
    f"1 >= NaN {run(op.greater_equal, one, nan).item()}",
    f"NaN < 1 {run(op.less, nan, one).item()}",
    f"NaN <= 1 {run(op.less_equal, nan, one).item()}",
    f"where x > 0 {run(positive, nan).item()}",
]
print(*seen, sep="\n")
wide = sys.argv[1] == "avx512"
greater = [f"{name} {wide}" for name in ("NaN > 1", "NaN >= 1", "1 >= NaN")]
sys.exit(seen != [*greater, "NaN < 1 False", "NaN <= 1 False", f"where x > 0 {'nan' if wide else '7.0'}"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1 numpy==2.4.6
if grep -q avx512f /proc/cpuinfo; then
    "$folder/venv/bin/python" "$folder/seen.py" avx512
fi
ONEDNN_MAX_CPU_ISA=AVX2 "$folder/venv/bin/python" "$folder/seen.py" avx2
