#!/usr/bin/env bash
# Expected: scaled_dot_product_attention(is_causal=True) with a scale of 0 averages the values up to each query, and with a negative scale prefers unlike keys: its
# documentation scales the scores first and masks then, and names no limit of scale.
# Seen: torch 2.13.0 on a CPU masks first and scales then in its fused kernel: -inf times a scale that is 0 or negative is NaN or infinity, so that every row but the
# last, which masks nothing, is NaN. The same mask as attn_mask, and the same call by the mathematical kernel, give what the documentation says.
# Output seen: "scale 0, is_causal: 7 of 8 rows NaN, the others right", "scale 0, attn_mask: 0 of 8 rows NaN, the others right", the same for "is_causal, MATH", the like for
# -0.25; for 0.25 no row is NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
torch.set_num_threads(1)
print("torch", torch.__version__)
q, k, v = torch.randn(3, 1, 1, 8, 16).unbind()
mask, seen = torch.ones(8, 8, dtype=torch.bool).tril(), []
for scale in (0.25, 0.0, -0.25):
    right = ((q @ k.mT) * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v
    ways = {"is_causal": scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale), "attn_mask": scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)}
    with sdpa_kernel(SDPBackend.MATH):
        ways["is_causal, MATH"] = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    for way, x in ways.items():
        others = "the others right" if torch.allclose(x[~x.isnan()], right[~x.isnan()], atol=1e-5) else "others wrong"
        seen.append(f"scale {scale:g}, {way}: {x.isnan().any(-1).sum()} of 8 rows NaN, {others}")
print(*seen, sep="\n")
ways = ("is_causal", "attn_mask", "is_causal, MATH")
expected = [f"scale {scale}, {way}: {7 if way == ways[0] and scale != '0.25' else 0} of 8 rows NaN, the others right" for scale in ("0.25", "0", "-0.25") for way in ways]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
