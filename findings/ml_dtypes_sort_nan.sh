#!/usr/bin/env bash
# Expected: numpy.sort puts NaN last and sorts the rest, for every floating dtype; numpy.unique, which sorts, finds each value once.
# Seen: with numpy 2.4.6 and ml_dtypes 0.6.0 a bfloat16 or float8 array that holds a NaN comes back in its old order, and unique returns values
# twice. float16, and the same arrays without the NaN, are sorted. Whoever takes the largest logits by a sort gets the first ones.
# Output seen: "bfloat16: sort [3, nan, 1, 2, nan, 0], unique of [1, nan, 1] has 3 values" and the same for float8_e4m3fn; "float16: sort
# [0, 1, 2, 3, nan, nan], unique of [1, nan, 1] has 2 values".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/sort.py" <<'PYTHON'
import sys

import ml_dtypes
import numpy

print("numpy", numpy.__version__, "ml_dtypes", ml_dtypes.__version__)
nan, seen = numpy.nan, {}
for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, numpy.float16):
    name = numpy.dtype(dtype).name
    values = [float(value) for value in numpy.sort(numpy.array([3, nan, 1, 2, nan, 0], dtype=dtype))]
    count = len(numpy.unique(numpy.array([1, nan, 1], dtype=dtype)))
    seen[name] = f"sort [{', '.join(f'{value:g}' for value in values)}], unique of [1, nan, 1] has {count} values"
    print(f"{name}: {seen[name]}")
unsorted = "sort [3, nan, 1, 2, nan, 0], unique of [1, nan, 1] has 3 values"
expected = {"bfloat16": unsorted, "float8_e4m3fn": unsorted}
sys.exit(seen != expected | {"float16": "sort [0, 1, 2, 3, nan, nan], unique of [1, nan, 1] has 2 values"})
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" "$folder/sort.py"
