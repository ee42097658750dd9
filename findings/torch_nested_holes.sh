#!/usr/bin/env bash
# Expected: what is computed of a jagged nested tensor is computed of its rows. What torch.nested.narrow or the lengths of nested_tensor_from_jagged leave out, such as the
# unused end of a cache, counts for nothing, or the call is refused, as sum(1) is: "not supported for non-contiguous nested tensors with holes".
# Seen: in torch 2.13.0 sum(), mean(), max(), min(), prod(), all() and any() take in the numbers of the holes too, without a word. A copy by contiguous() has no holes, and the right numbers.
# Without holes, a row whose numbers are all -inf gets -3.4e38 from amax(1) and max(1) if another row is longer, and argmax(1) a place behind its end; alone it gets -inf and 0.
# Output seen (of 1 to 6 in rows of 2, 1 and 3, with 100 behind each): "sum 21.0, with holes 621.0", "mean 3.5, with holes 51.75", "max 6.0, with holes 100.0",
# "any > 50 False, with holes True", "copied: 21.0", "sum(1) refused", "amax(1) of -inf: alone -inf, beside a longer row -3.4e+38, argmax 1".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import math
import sys

import torch

print("torch", torch.__version__)
cache = torch.tensor([[1.0, 2, 100, 100], [3, 100, 100, 100], [4, 5, 6, 100]])
lengths = torch.tensor([2, 1, 3])
narrow = torch.nested.narrow(cache, 1, torch.zeros(3, dtype=torch.long), lengths, layout=torch.jagged)
made = torch.nested.nested_tensor_from_jagged(cache.flatten(), torch.arange(0, 16, 4), lengths)
rows = [row[:n] for row, n in zip(cache, lengths.tolist())]
assert all(torch.equal(row, own) for x in (narrow, made) for row, own in zip(x.unbind(), rows))
ops = {"sum": torch.sum, "mean": torch.mean, "max": torch.max, "any > 50": lambda x: (x > 50).any()}
seen = []
for name, op in ops.items():
    with_holes = op(narrow).item()
    assert op(made).item() == with_holes
    seen.append(f"{name} {op(torch.cat(rows)).item()}, with holes {with_holes}")
seen.append(f"copied: {narrow.contiguous().sum().item()}")
try:
    seen.append(f"sum(1) {narrow.sum(1)}")
except RuntimeError:
    seen.append("sum(1) refused")
nothing = torch.full((1,), -math.inf)
alone, beside = (torch.nested.nested_tensor(list(x), layout=torch.jagged) for x in ((nothing,), (nothing, torch.zeros(3))))
seen.append(f"amax(1) of -inf: alone {alone.amax(1)[0].item()}, beside a longer row {beside.amax(1)[0].item():.1e}, argmax {beside.argmax(1)[0].item()}")
print(*seen, sep="\n")
expected = [
    "sum 21.0, with holes 621.0",
    "mean 3.5, with holes 51.75",
    "max 6.0, with holes 100.0",
    "any > 50 False, with holes True",
    "copied: 21.0",
    "sum(1) refused",
    "amax(1) of -inf: alone -inf, beside a longer row -3.4e+38, argmax 1",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
