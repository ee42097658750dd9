#!/usr/bin/env bash
# Expected: np.floor_divide is `//`, np.divmod is the pair of `//` and `%`, and np.fmod has the sign of the dividend, as in NumPy.
# Seen: in numba 0.68.1 np.floor_divide and np.divmod of floats take the floor of a quotient that is already rounded: 1 by 0.1 is 10 with a remainder of 0.1, and -1 by infinity is -0; `//` in the same
# function is right. np.fmod of negative integers divides them as unsigned ones: fmod(-7, 3) is 0 and fmod(7, -3) is 7; of floats it is right. Nothing is said.
# Output seen: "1 by 0.1: // 9.0, floor_divide 10.0, divmod 10.0 and 0.09999999999999995", "-1 by inf: // -1.0, floor_divide -0.0, divmod -0.0 and inf",
# "fmod of -7, 7, -7 and 3, -3, -3: int64 [0, 7, -7], float64 [-1.0, 1.0, -1.0]".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numba
import numpy as np

print("numba", numba.__version__, "numpy", np.__version__)
compiled = numba.njit(lambda a, b: (a // b, np.floor_divide(a, b), np.divmod(a, b)))
fmod = numba.njit(lambda a, b: np.fmod(a, b))
dividends, divisors = np.array([1.0, -1.0]), np.array([0.1, np.inf])
operator, function, (quotient, remainder) = compiled(dividends, divisors)
for i in range(2):
    print(f"{dividends[i]:g} by {divisors[i]:g}: // {operator[i]}, floor_divide {function[i]}, divmod {quotient[i]} and {remainder[i]}")
right = np.floor_divide(dividends, divisors)
seen = [operator.tolist() == right.tolist(), function.tolist() == [10.0, 0.0], quotient.tolist() == [10.0, 0.0]]
a, b = np.array([-7, 7, -7]), np.array([3, -3, -3])
whole, floats = fmod(a, b).tolist(), fmod(a.astype(float), b.astype(float)).tolist()
print(f"fmod of -7, 7, -7 and 3, -3, -3: int64 {whole}, float64 {floats}; numpy {np.fmod(a, b).tolist()}")
seen += [whole == [0, 7, -7], floats == np.fmod(a, b).tolist()]
sys.exit(not all(seen))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile numba==0.68.1 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
