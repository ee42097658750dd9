#!/usr/bin/env bash
# Expected: jax.random.categorical draws each of 32,000 equal logits about equally often, in bfloat16 as in float32: the dtype rounds the logits, not the draw. What its
# documentation says of a bias is about float32 and probabilities below 1e-7, with mode="high" below 1e-14.
# Seen: jax 0.10.2 makes its noise in the dtype of the logits, so that many tokens share the largest sum, and the first of them is taken. In bfloat16 every draw is
# among the first 1,000 tokens. mode="high" does not mend it: it draws twice as many of those as it should, and if tokens stand in the order of their probability,
# the unlikely half (2 % of the mass) first, it draws a token of that half in over a fifth of the draws; the default never does. float32 is right.
# Output seen: "float32: first 1000 of 32000 3 %, unlikely half 2 %", "bfloat16 low: first 1000 of 32000 100 %, unlikely half 0 %",
# "bfloat16 high: first 1000 of 32000 7 %, unlikely half 23 %", "mass: 3 %, 2 %". 2,000 draws each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
TOKENS, FIRST, DRAWS = 32000, 1000, 2000
equal = jnp.zeros(TOKENS, jnp.bfloat16)
rising = jnp.asarray(np.sort(np.random.default_rng(0).normal(scale=2, size=TOKENS)), jnp.bfloat16)
half = float(jax.nn.softmax(rising.astype(jnp.float32))[: TOKENS // 2].sum())


def share(logits: jax.Array, end: int, mode: str) -> float:
    """How many of the draws are tokens below `end`."""
    return float((jax.random.categorical(jax.random.key(0), logits, shape=(DRAWS,), mode=mode) < end).mean())


cases = {"float32": (jnp.float32, "low"), "bfloat16 low": (jnp.bfloat16, "low"), "bfloat16 high": (jnp.bfloat16, "high")}
shares = {}
for name, (dtype, mode) in cases.items():
    shares[name] = share(equal.astype(dtype), FIRST, mode), share(rising.astype(dtype), TOKENS // 2, mode)
    print(f"{name}: first {FIRST} of {TOKENS} {shares[name][0]:.0%}, unlikely half {shares[name][1]:.0%}".replace("%", " %"))
print(f"mass: {FIRST / TOKENS:.0%}, {half:.0%}".replace("%", " %"))
right = all(abs(shares["float32"][n] - mass) < 0.015 for n, mass in enumerate((FIRST / TOKENS, half)))
low, high = shares["bfloat16 low"], shares["bfloat16 high"]
sys.exit(not (right and low[0] > 0.99 and low[1] < 0.001 and high[0] > 0.05 and high[1] > 0.15))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/seen.py"
