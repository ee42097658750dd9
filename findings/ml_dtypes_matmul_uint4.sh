#!/usr/bin/env bash
# Expected: a product of two uint4 vectors is unsigned, by `a @ b` as by numpy.dot, or an error says that nobody computes it.
# Seen: with numpy 2.4.6 and ml_dtypes 0.6.0 the type has no matmul of its own, and numpy takes the first one that it can cast to: `a @ b` is an
# int8, which is negative from 128 on, while numpy.dot stays in uint4, modulo 16. For the floating types `a @ b` is a float32 and numpy.dot
# rounds to the type after every term.
# Output seen: "uint4, 200 ones: a @ b = -56 (int8), dot = 8 (uint4)" and "float8_e4m3fn, 200 ones: a @ b = 200 (float32), dot = 192 (float8_e4m3fn)".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/product.py" <<'PYTHON'
import sys

import ml_dtypes
import numpy

print("numpy", numpy.__version__, "ml_dtypes", ml_dtypes.__version__)
seen = []
for dtype in (ml_dtypes.uint4, ml_dtypes.float8_e4m3fn):
    ones = numpy.ones(200, dtype=dtype)
    product, dot = ones @ ones, numpy.dot(ones, ones)
    seen.append(f"a @ b = {float(product):g} ({product.dtype}), dot = {float(dot):g} ({dot.dtype})")
    print(f"{numpy.dtype(dtype).name}, 200 ones: {seen[-1]}")
sys.exit(seen != ["a @ b = -56 (int8), dot = 8 (uint4)", "a @ b = 200 (float32), dot = 192 (float8_e4m3fn)"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" "$folder/product.py"
