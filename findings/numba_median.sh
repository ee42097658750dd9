#!/usr/bin/env bash
# Expected: np.median in a compiled function is NumPy's: NaN where there is one, and the mean of the two numbers in the middle as a float64.
# Seen: in numba 0.68.1 NaN is compared like a number, so that the median depends on where it stands, and half the sum of two integers is taken in 64 bits, which wraps:
# the median of 2^62 twice is negative, of uint64 2^63 twice it is 0. np.percentile and np.quantile are right. Nothing is said.
# Output seen: "[nan, 1, 3, -1]: numba 2.0, percentile nan, numpy nan", "[1, 2, 3, 4, nan]: numba 3.0, percentile nan, numpy nan",
# "[2^62, 2^62]: numba -4.611686018427388e+18, percentile 4.611686018427388e+18, numpy 4.611686018427388e+18", "[2^63, 2^63]: numba 0.0, percentile 9.223372036854776e+18,
# numpy 9.223372036854776e+18".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numba
import numpy as np

print("numba", numba.__version__, "numpy", np.__version__)
nan = float("nan")
cases = {
    "[nan, 1, 3, -1]": np.array([nan, 1, 3, -1]),
    "[1, 2, 3, 4, nan]": np.array([1, 2, 3, 4, nan]),
    "[2^62, 2^62]": np.array([2**62] * 2),
    "[2^63, 2^63]": np.array([2**63] * 2, np.uint64),
}
compiled = numba.njit(lambda a: (np.median(a), np.percentile(a, 50)))
seen = []
for name, numbers in cases.items():
    median, percentile = compiled(numbers)
    right = float(np.median(numbers))
    print(f"{name}: numba {median}, percentile {percentile}, numpy {right}")
    seen.append((np.array_equal(median, right, equal_nan=True), np.array_equal(percentile, right, equal_nan=True)))
sys.exit(seen != [(False, True)] * 4)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile numba==0.68.1 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
