#!/usr/bin/env bash
# Expected: a value that a float8 type of torch cannot hold becomes infinity where the type has one and NaN elsewhere, as in torch 2.11, and a
# negative value in float8_e8m0fnu, which has no sign, becomes NaN, as in ml_dtypes.
# Seen: in torch 2.13.0 float8_e4m3fn, and it alone, holds its largest number instead: 1e30 and infinity both become 448. In torch 2.11.0 they
# became NaN. float8_e4m3fnuz still gives NaN, and float8_e5m2 infinity. float8_e8m0fnu drops the sign: -500 becomes 512.
# Output seen: "float8_e4m3fn [448.0, 448.0]", "float8_e4m3fnuz [nan, nan]", "float8_e5m2 [inf, inf]", "float8_e8m0fnu of -500: 512.0".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/casts.py" <<'PYTHON'
import sys

import torch

print("torch", torch.__version__)
large = torch.tensor([1e30, float("inf")])
seen = [f"{name} {large.to(getattr(torch, name)).float().tolist()}" for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")]
seen.append(f"float8_e8m0fnu of -500: {torch.tensor(-500.0).to(torch.float8_e8m0fnu).float().item()}")
print(*seen, sep="\n")
expected = ["float8_e4m3fn [448.0, 448.0]", "float8_e4m3fnuz [nan, nan]", "float8_e5m2 [inf, inf]", "float8_e8m0fnu of -500: 512.0"]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/casts.py"
