#!/usr/bin/env bash
# Expected: `get_slice(name)[...]`, with which loaders read a rank's part of a matrix, follows Python's rules for slices: bounds are cut to the tensor, negative ones count
# from its end, and [:] is the whole tensor, as `get_tensor` gives it.
# Seen: safetensors 0.8.0 takes single negative places, steps and [2:2], and refuses a stop beyond the end (where 4 ranks share 6 rows), a start at the end, negative bounds
# with an OverflowError, and [:] of a tensor without rows, which `get_tensor` reads.
# Output seen: "[-1] as numpy", "[::2] as numpy", "[2:2] as numpy", "[4:8] SafetensorError", "[6:] SafetensorError", "[-2:] OverflowError", "[:-1] OverflowError",
# "no rows: get_tensor (0, 3), [:] SafetensorError".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

rows = np.arange(24, dtype=np.float32).reshape(6, 4)
save_file({"rows": rows, "none": np.zeros((0, 3), np.float32)}, sys.argv[1])
cut = {
    "[-1]": np.s_[-1],
    "[::2]": np.s_[::2],
    "[2:2]": np.s_[2:2],
    "[4:8]": np.s_[4:8],
    "[6:]": np.s_[6:],
    "[-2:]": np.s_[-2:],
    "[:-1]": np.s_[:-1],
}


def outcome(part, index, expected):
    try:
        found = part[index]
    except Exception as error:
        return type(error).__name__
    return "as numpy" if found.shape == expected.shape and np.array_equal(found, expected) else "other rows"


with safe_open(sys.argv[1], "numpy") as file:
    seen = [f"{name} {outcome(file.get_slice('rows'), index, rows[index])}" for name, index in cut.items()]
    whole = file.get_tensor("none")
    seen.append(f"no rows: get_tensor {whole.shape}, [:] {outcome(file.get_slice('none'), np.s_[:], whole)}")
print(*seen, sep="\n")
expected = ["[-1] as numpy", "[::2] as numpy", "[2:2] as numpy", "[4:8] SafetensorError", "[6:] SafetensorError"]
expected += ["[-2:] OverflowError", "[:-1] OverflowError", "no rows: get_tensor (0, 3), [:] SafetensorError"]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder/rows.safetensors"
