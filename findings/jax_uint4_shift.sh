#!/usr/bin/env bash
# Expected: a right shift of unsigned numbers brings in zeros: 8 >> 1 is 4 in uint4, as it is in uint8 and in jax.lax.shift_right_logical; and population_count counts the
# bits of an int4, of which there are four.
# Seen: jax 0.10.2 on a CPU takes `>>` and jnp.right_shift of uint4 for a shift of signed numbers: 8 >> 1 is 12 and 15 >> 1 is 15, without a word, so that unpacking two
# bits of a nibble gives other bits. population_count of int4 counts the bits of eight: that of -1 is 8, which int4 holds as -8. Products, quotients and comparisons are right.
# Output seen: "uint4: [8, 15, 7] >> 1 is [12, 15, 3], by shift_right_logical [4, 7, 3], by // 2 [4, 7, 3]", "uint8: [8, 15, 7] >> 1 is [4, 7, 3]", "population_count of
# [-1, -8, 7]: int4 [-8, 5, 3], int8 [8, 5, 3]".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
numbers, signed = [8, 15, 7], [-1, -8, 7]
x, one, two = jnp.array(numbers, jnp.uint4), jnp.uint4(1), jnp.uint4(2)
results = x >> one, jax.lax.shift_right_logical(x, jnp.full(3, one)), x // two, jnp.array(numbers, jnp.uint8) >> 1
shifted, logical, divided, wide = (np.asarray(y).astype(int).tolist() for y in results)
counts = [np.asarray(jax.lax.population_count(jnp.array(signed, dtype))).astype(int).tolist() for dtype in (jnp.int4, jnp.int8)]
seen = [f"uint4: {numbers} >> 1 is {shifted}, by shift_right_logical {logical}, by // 2 {divided}", f"uint8: {numbers} >> 1 is {wide}"]
seen.append(f"population_count of {signed}: int4 {counts[0]}, int8 {counts[1]}")
print(*seen, sep="\n")
expected = ["uint4: [8, 15, 7] >> 1 is [12, 15, 3], by shift_right_logical [4, 7, 3], by // 2 [4, 7, 3]", "uint8: [8, 15, 7] >> 1 is [4, 7, 3]"]
sys.exit(seen != [*expected, "population_count of [-1, -8, 7]: int4 [-8, 5, 3], int8 [8, 5, 3]"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/seen.py"
