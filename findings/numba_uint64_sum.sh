#!/usr/bin/env bash
# Expected: in a compiled function, arithmetic of arrays of uint64 and int64 has NumPy's results: the docs list its ufuncs and operators as supported, and the dtype of the
# result is NumPy's, float64.
# Seen: numba 0.68.1 computes the sum, difference or product in int64, lets it wrap, and converts what is left to float64: 2^63 + 1 is -9.2e18, and (2^64 - 1) * -1 is 1. A
# Python number counts as int64, so that `a + 1` of an array of uint64, which in NumPy 2 is uint64, is float64 and 0 for 2^64 - 1. Quotients, comparisons and np.maximum are
# right. Nothing is said.
# Output seen, for 2^63, 2^64 - 1 and 5 with 1, -1 and -1: "a + b: numba float64 [-9.223372036854776e+18, -2.0, 4.0], numpy float64 [9.223372036854776e+18,
# 1.8446744073709552e+19, 4.0]", "a - b: numba float64 [9.223372036854776e+18, 0.0, 6.0], numpy float64 [9.223372036854776e+18, 1.8446744073709552e+19, 6.0]", "a * b: numba
# float64 [-9.223372036854776e+18, 1.0, -5.0], numpy float64 [9.223372036854776e+18, -1.8446744073709552e+19, -5.0]", "a + 1: numba float64 [-9.223372036854776e+18, 0.0, 6.0],
# numpy uint64 [9223372036854775809, 0, 6]".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numba
import numpy as np

print("numba", numba.__version__, "numpy", np.__version__)
a, b = np.array([2**63, 2**64 - 1, 5], np.uint64), np.array([1, -1, -1])


def results(a, b):
    return a + b, a - b, a * b, a + 1, a / b, np.maximum(a, b)


names = ("a + b", "a - b", "a * b", "a + 1", "a / b", "maximum")
same = {}
for name, compiled, plain in zip(names, numba.njit(results)(a, b), results(a, b)):
    same[name] = compiled.dtype == plain.dtype and bool(np.array_equal(compiled, plain))
    print(f"{name}: numba {compiled.dtype} {compiled.tolist()}, numpy {plain.dtype} {plain.tolist()}")
sys.exit(list(same.values()) != [False] * 4 + [True] * 2)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile numba==0.68.1 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
