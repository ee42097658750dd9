#!/usr/bin/env bash
# Expected: jax.lax.top_k puts the lower index first where two elements are equal, as its documentation says, and takes every NaN for the same, as jnp.sort, jnp.argsort
# and jnp.argmax of the same array do.
# Seen: on a CPU jax 0.10.2 puts 0.0 before -0.0, which equals it, whatever their places, and orders NaN by its sign bit: a NaN with it comes after -inf, one without it
# before inf. On x86 the NaN of inf - inf and of 0 / 0 has it, so that top_k(3) of such numbers passes over them, where argmax finds them. bfloat16 does the same.
# Output seen: "top_k of [-0.0, 0.0, -0.0, 0.0]: [1, 3, 0, 2], argsort [0, 1, 2, 3]", "top_k of [nan, 1.0, -inf, nan with sign]: [0, 1, 2, 3], argmax 0" and "without the first:
# top_k [0, 1, 2], argmax 2", for float32 and bfloat16.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
seen = {}
for dtype in (jnp.float32, jnp.bfloat16):
    zeros = jnp.array([-0.0, 0.0, -0.0, 0.0], dtype)
    nans = jnp.asarray(np.copysign(np.array([np.nan, 1, np.inf, np.nan], np.float32), [1, 1, -1, -1]).astype(dtype))
    places = [jax.lax.top_k(x, len(x))[1].tolist() for x in (zeros, nans, nans[1:])]
    argsort, argmax = jnp.argsort(zeros, descending=True).tolist(), [int(jnp.argmax(x)) for x in (nans, nans[1:])]
    seen[dtype.dtype.name] = (*places, argsort, *argmax)
    print(f"{dtype.dtype.name}: top_k of [-0.0, 0.0, -0.0, 0.0]: {places[0]}, argsort {argsort}")
    print(f"{dtype.dtype.name}: top_k of [nan, 1.0, -inf, nan with sign]: {places[1]}, argmax {argmax[0]}; without the first: top_k {places[2]}, argmax {argmax[1]}")
expected = ([1, 3, 0, 2], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3], 0, 2)
sys.exit(seen != {"float32": expected, "bfloat16": expected})
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/seen.py"
