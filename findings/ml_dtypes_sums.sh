#!/usr/bin/env bash
# Expected: numpy.mean of a thousand ones is 1 in bfloat16, as it is in float16, whose sums numpy keeps in float32.
# Seen: with numpy 2.4.6 and ml_dtypes 0.6.0 it is 0.256: the sum stops at 256, where one more is less than half a step. float8_e8m0fnu, the type
# of the scales of MX formats, has no zero: numpy.zeros holds 2^-127 in it, and the sum of ones, which starts from zero, is NaN.
# Output seen: "mean of 1000 ones: bfloat16 0.255859, float16 1" and "float8_e8m0fnu: 3 of 3 zeros are not zero, sum of ones nan".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/sums.py" <<'PYTHON'
import sys

import ml_dtypes
import numpy

print("numpy", numpy.__version__, "ml_dtypes", ml_dtypes.__version__)
means = [float(numpy.mean(numpy.ones(1000, dtype=dtype))) for dtype in (ml_dtypes.bfloat16, numpy.float16)]
zeros = numpy.count_nonzero(numpy.zeros(3, dtype=ml_dtypes.float8_e8m0fnu))
total = float(numpy.sum(numpy.ones(3, dtype=ml_dtypes.float8_e8m0fnu)))
seen = [
    f"mean of 1000 ones: bfloat16 {means[0]:g}, float16 {means[1]:g}",
    f"float8_e8m0fnu: {zeros} of 3 zeros are not zero, sum of ones {total:g}",
]
print(*seen, sep="\n")
expected = ["mean of 1000 ones: bfloat16 0.255859, float16 1", "float8_e8m0fnu: 3 of 3 zeros are not zero, sum of ones nan"]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" "$folder/sums.py"
