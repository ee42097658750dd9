#!/usr/bin/env bash
# Expected: torch.vmap(f) of a batch is f of each example, stacked.
# Seen: in torch 2.13.0 vmap casts an example of one number to the integer dtype of the other operand before it divides, where torch divides as floats: a row of uint8
# divided by its own sum, 300, is divided by 44, and a division by 512 is one by zero. It wraps without a word. atan2, xlogy, copysign and ldexp do the same; int32 is
# wrong from 2**31 on.
# Output seen: "shares of a row of uint8: vmap [2.273, 4.545], alone [0.333, 0.667]", "uint8 / 512: vmap [inf, inf], alone [0.195, 0.391]", the like for atan2, xlogy and
# int32 / 2**32, and "uint8 / 2: vmap [0.5, 1.0], alone [0.5, 1.0]".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys
from collections.abc import Callable

import torch

rows = torch.tensor([[100, 200], [1, 2]], dtype=torch.uint8)
many = torch.tensor([512, 2])


def numbers(x: torch.Tensor) -> list[float]:
    return [round(number, 3) for number in x.tolist()]


def both(f: Callable[..., torch.Tensor], *batch: torch.Tensor) -> str:
    """The first example by vmap, and alone."""
    return f"vmap {numbers(torch.vmap(f)(*batch)[0])}, alone {numbers(f(*[x[0] for x in batch]))}"


seen = [
    f"shares of a row of uint8: {both(lambda row: row / row.sum(), rows)}",
    f"uint8 / 512: {both(torch.div, rows, many)}",
    f"atan2(uint8, 512): {both(torch.atan2, rows, many)}",
    f"xlogy(uint8, 512): {both(torch.xlogy, rows, many)}",
    f"int32 / 2**32: {both(torch.div, rows.int(), many * 2**23)}",
    f"uint8 / 2: {both(torch.div, rows.flip(0), many.flip(0))}",
]
print("torch", torch.__version__)
print(*seen, sep="\n")
expected = [
    "shares of a row of uint8: vmap [2.273, 4.545], alone [0.333, 0.667]",
    "uint8 / 512: vmap [inf, inf], alone [0.195, 0.391]",
    "atan2(uint8, 512): vmap [1.571, 1.571], alone [0.193, 0.372]",
    "xlogy(uint8, 512): vmap [-inf, -inf], alone [623.832, 1247.665]",
    "int32 / 2**32: vmap [inf, inf], alone [0.0, 0.0]",
    "uint8 / 2: vmap [0.5, 1.0], alone [0.5, 1.0]",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
