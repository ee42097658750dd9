#!/usr/bin/env bash
# Expected: torch.add(x, y, alpha=a) is x + a * y, and x.add(y, alpha=-1) is x - y, whichever of the two is sparse.
# Seen: in torch 2.13.0 on a CPU, where x is CSR or CSC and y is dense, alpha multiplies x: x.add(y, alpha=-1) is y - x, and x.add(y, alpha=0) is y. With the dense matrix in
# front it is right; a COO matrix in front of a dense one is refused by name. Nothing is said.
# Output seen, for the diagonal matrix of 1 and 2 and the full one of 10 to 40: "csr alpha 2.5: [[12.5, 20.0], [30.0, 45.0]] for [[26.0, 50.0], [75.0, 102.0]]",
# "csr alpha -1: [[9.0, 20.0], [30.0, 38.0]] for [[-9.0, -20.0], [-30.0, -38.0]]", the same for csc, "dense in front: right".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys
import warnings

import torch

warnings.simplefilter("ignore")  # that these layouts are in beta state
print("torch", torch.__version__)
diagonal, full = torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([[10.0, 20.0], [30.0, 40.0]])
swapped = right = 0
for name, layout in (("csr", torch.sparse_csr), ("csc", torch.sparse_csc)):
    sparse = diagonal.to_sparse(layout=layout)
    for alpha in (2.5, -1, 0):
        result = torch.add(sparse, full, alpha=alpha)
        print(f"{name} alpha {alpha}: {result.tolist()} for {torch.add(diagonal, full, alpha=alpha).tolist()}")
        swapped += torch.equal(result, full + alpha * diagonal)
        right += torch.equal(torch.add(full, sparse, alpha=alpha), full + alpha * diagonal)
print("dense in front:", "right" if right == 6 else "wrong")
try:
    torch.add(diagonal.to_sparse(), full, alpha=2.5)
    refused = False
except RuntimeError as error:
    refused = True
    print("coo:", error)
sys.exit(not (swapped == right == 6 and refused))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
