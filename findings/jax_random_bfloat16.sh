#!/usr/bin/env bash
# Expected: draws in bfloat16 are those of the distribution, rounded to bfloat16.
# Seen: jax 0.10.2 makes each of a uniform number of 7 bits, so that there are 128 of them. Of 200,000 normal numbers in bfloat16 none is above 2.52 or below -2.89, where 1,560
# should be, and their mean is -0.011. bernoulli of a p in bfloat16 is true in multiples of 1/128: 0.77 % of the time for 0.1 %. choice with such a p only ever draws 128 of
# 4,000 things that are equally probable. float16 has 1,024. Nothing is said. (random.categorical: see jax_categorical_bfloat16.sh.)
# Output seen: "normal float32: largest 4.52, smallest -4.32, mean 0.000, 197652 values", "normal bfloat16: largest 2.52, smallest -2.89, mean -0.011, 128 values",
# "bernoulli of 0.001: float32 0.0009, bfloat16 0.0077, float16 0.0021", "choice of 4000: float32 4000 are drawn, bfloat16 128 are drawn, float16 1024 are drawn".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
key, count = jax.random.key(0), 200_000
values, rates, distinct, extremes = {}, {}, {}, {}
for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    name = dtype.__name__
    normal = np.asarray(jax.random.normal(key, (count,), dtype).astype(jnp.float32))
    values[name], extremes[name] = len(np.unique(normal)), max(normal.max(), -normal.min())
    print(f"normal {name}: largest {normal.max():.2f}, smallest {normal.min():.2f}, mean {normal.mean():.3f}, {values[name]} values")
    rates[name] = float(jax.random.bernoulli(key, jnp.full(count, 0.001, dtype)).mean())
    distinct[name] = len(np.unique(np.asarray(jax.random.choice(key, 4000, (count,), p=jnp.full(4000, 1 / 4000, dtype)))))
print("bernoulli of 0.001:", ", ".join(f"{name} {rate:.4f}" for name, rate in rates.items()))
print("choice of 4000:", ", ".join(f"{name} {number} are drawn" for name, number in distinct.items()))
right = rates["float32"] < 0.0012 and distinct["float32"] == 4000 and extremes["float32"] > 4
sys.exit(not (right and values["bfloat16"] == distinct["bfloat16"] == 128 and extremes["bfloat16"] < 3 and rates["bfloat16"] > 0.007))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/seen.py"
