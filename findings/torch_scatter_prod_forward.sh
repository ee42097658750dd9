#!/usr/bin/env bash
# Expected: forward-mode derivatives of scatter_reduce(..., "prod") are those of backward mode, or are refused, as those of index_reduce are.
# Seen: in torch 2.13.0 they are 0 wherever something was multiplied, without a word: torch.func.jvp and jacfwd give zeros where jacrev and differences give the product of the
# other factors, and torch.func.hessian, which is forward over reverse, is wrong too. "sum", "mean" and "amax" are right.
# Output seen: "prod of (2, 3), (5,): jacfwd [[0, 0, 0], [0, 0, 0]], jacrev [[3, 2, 0], [0, 0, 1]]", "second derivative of the first product by its factors: hessian 0, twice jacrev 1"
# and "sum, mean, amax: the same".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import torch
from torch.func import hessian, jacfwd, jacrev

factors, to = torch.tensor([2.0, 3.0, 5.0]), torch.tensor([0, 0, 1])


def reduced(kind: str, x: torch.Tensor) -> torch.Tensor:
    return torch.ones(2).scatter_reduce(0, to, x, kind)


def prod(x: torch.Tensor) -> torch.Tensor:
    return reduced("prod", x)


print("torch", torch.__version__)
forward, backward = jacfwd(prod)(factors).int().tolist(), jacrev(prod)(factors).int().tolist()
mixed, twice = (int(h(lambda x: prod(x)[0])(factors)[0, 1]) for h in (hessian, lambda f: jacrev(jacrev(f))))
seen = [f"prod of (2, 3), (5,): jacfwd {forward}, jacrev {backward}", f"second derivative of the first product by its factors: hessian {mixed}, twice jacrev {twice}"]
same = all(torch.allclose(jacfwd(lambda x: reduced(kind, x))(factors), jacrev(lambda x: reduced(kind, x))(factors)) for kind in ("sum", "mean", "amax"))
seen.append(f"sum, mean, amax: {'the same' if same else 'differ'}")
print(*seen, sep="\n")
sys.exit(not (forward == [[0] * 3] * 2 and backward == [[3, 2, 0], [0, 0, 1]] and (mixed, twice) == (0, 1) and same))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
