#!/usr/bin/env bash
# Expected: a conversion gives the nearest number of the new type, ties to even, as NumPy's astype and Python's struct do from float64 to float16.
# Seen: torch 2.13.0 on a CPU rounds float64 and int64 to float32 on the way to float16 and bfloat16, and what is just above the middle of two neighbours becomes a tie: half
# of these numbers end at the lower neighbour. torch.tensor and torch.full of a Python number do the same, so that torch.from_numpy of NumPy's float16 is another tensor.
# Output seen: "1 + 2^-11 + 2^-40 in float16: to 1.0, tensor 1.0, full 1.0, numpy 1.0009765625, struct 1.0009765625", "float64 to float16: 512 of 1024 not the nearest",
# "float64 to bfloat16: 64 of 128 not the nearest", "int64 to bfloat16: 64 of 128 not the nearest".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import struct
import sys

import numpy as np
import torch

print("torch", torch.__version__, "numpy", np.__version__)
number = 1 + 2.0**-11 + 2.0**-40
found = {
    "to": torch.tensor([number], dtype=torch.float64).to(torch.float16).item(),
    "tensor": torch.tensor(number, dtype=torch.float16).item(),
    "full": torch.full((), number, dtype=torch.float16).item(),
    "numpy": float(np.float64(number).astype(np.float16)),
    "struct": struct.unpack("e", struct.pack("e", number))[0],
}
seen = ["1 + 2^-11 + 2^-40 in float16: " + ", ".join(f"{name} {value}" for name, value in found.items())]
for name, dtype, bits in (("float16", torch.float16, 10), ("bfloat16", torch.bfloat16, 7)):
    lower = 1 + torch.arange(2**bits).double() / 2**bits  # all numbers of the type from 1 to 2
    step = 2.0**-bits
    rounded = (lower + step / 2 + 2.0**-40).to(dtype).double()
    seen.append(f"float64 to {name}: {int((rounded != lower + step).sum())} of {len(lower)} not the nearest")
lower, step = 2**40 + 2**33 * torch.arange(128), 2**33
rounded = (lower + step // 2 + 1).to(torch.bfloat16).long()
seen.append(f"int64 to bfloat16: {int((rounded != lower + step).sum())} of 128 not the nearest")
print(*seen, sep="\n")
expected = [
    "1 + 2^-11 + 2^-40 in float16: to 1.0, tensor 1.0, full 1.0, numpy 1.0009765625, struct 1.0009765625",
    "float64 to float16: 512 of 1024 not the nearest",
    "float64 to bfloat16: 64 of 128 not the nearest",
    "int64 to bfloat16: 64 of 128 not the nearest",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
