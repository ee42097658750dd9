#!/usr/bin/env bash
# Expected: torch.sparse.mm of two sparse matrices is their product, whatever the layout, as `@` is.
# Seen: in torch 2.13.0 on a CPU torch.sparse.mm of two CSC matrices has no values, whatever the matrices: all zeros, whose column pointers still count the right number of
# entries, so that the tensor contradicts itself. `@` gives the product, and so do CSR matrices, also one behind a CSC. Nothing is said.
# Output seen: "csr csr: [[9.0, 2.0], [0.0, 3.0]], with @ [[9.0, 2.0], [0.0, 3.0]]", "csc csc: [[0.0, 0.0], [0.0, 0.0]], with @ [[9.0, 2.0], [0.0, 3.0]]", and for the latter
# "0 values, column pointers [0, 1, 3]".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys
import warnings

import torch

warnings.simplefilter("ignore")  # that these layouts are in beta state
print("torch", torch.__version__)
a, b = torch.tensor([[1.0, 0, 2], [0, 3, 0]]), torch.tensor([[1.0, 2], [0, 1], [4, 0]])
layouts = {"csr": torch.sparse_csr, "csc": torch.sparse_csc}
seen = {}
for left, right in (("csr", "csr"), ("csc", "csr"), ("csc", "csc")):
    pair = a.to_sparse(layout=layouts[left]), b.to_sparse(layout=layouts[right])
    product, with_operator = torch.sparse.mm(*pair), pair[0] @ pair[1]
    seen[left, right] = torch.equal(product.to_dense(), a @ b), torch.equal(with_operator.to_dense(), a @ b)
    print(f"{left} {right}: {product.to_dense().tolist()}, with @ {with_operator.to_dense().tolist()}")
print(f"csc csc: {product.values().numel()} values, column pointers {product.ccol_indices().tolist()}")
empty = 0
for dtype in (torch.float32, torch.float64, torch.complex64):
    torch.manual_seed(0)
    for _ in range(20):
        left, right = torch.rand(8, 8, dtype=dtype), torch.rand(8, 8, dtype=dtype)
        product = torch.sparse.mm(left.to_sparse_csc(), right.to_sparse_csc())
        empty += product.values().numel() == 0
print(f"of 60 products of full matrices, {empty} are empty")
right = all(value == (pair != ("csc", "csc"), True) for pair, value in seen.items())
sys.exit(not (right and empty == 60))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
