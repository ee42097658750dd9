#!/usr/bin/env bash
# Expected: YaRN's attention_factor is what rotated queries and keys are multiplied by, and with truncate false the borders of its ramp are not rounded, as in transformers,
# which made the two fields. gpt-oss is published with "truncate": false.
# Seen: mlx-lm 0.32.2 passes over both, without a word: the factor is always the one that YaRN computes, and the borders are rounded. beta_fast and mscale are followed.
# Output seen, with the rule of gpt-oss: "attention_factor 1 and 2: lengths 1.35 and 1.35, without one 1.35", "truncate: largest change of a frequency 0.00 in mlx-lm, 0.43
# by the formula", "beta_fast: 0.41".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import math
import sys
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import initialize_rope

print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"))
mx.set_default_device(mx.cpu)
DIMENSIONS, BASE = 64, 150000.0  # gpt-oss
RULE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
x = mx.random.normal((1, 1, 4, DIMENSIONS))


def rope(**fields: object):
    return initialize_rope(DIMENSIONS, BASE, False, RULE | fields, 131072)


def stretch(**fields: object) -> float:
    return float(mx.linalg.norm(rope(**fields)(x)) / mx.linalg.norm(x))


def by_formula(truncate: bool) -> np.ndarray:
    """The frequencies as the paper of YaRN has them."""
    plain = BASE ** -(np.arange(0, DIMENSIONS, 2) / DIMENSIONS)
    places = (DIMENSIONS * math.log(RULE["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(BASE)) for turns in (32.0, 1.0))
    low, high = places
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    slow = np.clip((np.arange(DIMENSIONS // 2) - low) / (high - low), 0, 1)
    return plain / RULE["factor"] * slow + plain * (1 - slow)


def change(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one / other - 1).max())


frequencies = {truncate: 1 / np.array(rope(truncate=truncate)._freqs) for truncate in (True, False)}
lengths = [stretch(attention_factor=factor) for factor in (1.0, 2.0)]
default = 0.1 * math.log(RULE["factor"]) + 1
ramps = change(frequencies[False], frequencies[True]), change(by_formula(False), by_formula(True))
fast = change(1 / np.array(rope(beta_fast=8.0)._freqs), frequencies[True])
print(f"attention_factor 1 and 2: lengths {lengths[0]:.2f} and {lengths[1]:.2f}, without one {default:.2f}")
print(f"truncate: largest change of a frequency {ramps[0]:.2f} in mlx-lm, {ramps[1]:.2f} by the formula")
print(f"beta_fast: {fast:.2f}")
same = all(abs(length - default) < 1e-3 for length in lengths) and change(frequencies[True], by_formula(True)) < 1e-4
sys.exit(not (same and ramps[0] == 0 and ramps[1] > 0.01 and fast > 0.01))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile mlx-lm==0.32.2 "mlx[cpu]==0.32.4" numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
