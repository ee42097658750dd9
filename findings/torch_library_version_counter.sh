#!/usr/bin/env bash
# Expected: an op whose schema says `Tensor(a!)` raises the version of that tensor, however it is registered: the schema is what functionalisation
# and torch.compile read, so autograd would notice that a saved tensor has changed.
# Seen: torch 2.13.0 raises it for torch.library.custom_op(mutates_args=...) alone. The same op by torch.library.Library.define and impl leaves the
# version at 0, and a backward pass over a tensor that was saved before gives a wrong gradient without an error.
# Output seen: "custom_op: version 1, RuntimeError" and "Library: version 0, gradient 7.0 where 1.0 is right".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/saved.py" <<'PYTHON'
import sys

import torch
from torch import Tensor

library = torch.library.Library("finding", "DEF")
library.define("by_library(Tensor(a!) x) -> ()")
library.impl("by_library", lambda x: x.numpy().fill(7) and None, "CPU")


@torch.library.custom_op("finding::by_custom_op", mutates_args=["x"])
def by_custom_op(x: Tensor) -> None:
    x.numpy().fill(7)


def outcome(write) -> str:
    saved, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    loss = (weight * saved).sum()
    write(saved)
    try:
        loss.backward()
    except RuntimeError:
        return f"version {saved._version}, RuntimeError"
    return f"version {saved._version}, gradient {weight.grad[0].item()} where 1.0 is right"


seen = [outcome(torch.ops.finding.by_custom_op), outcome(torch.ops.finding.by_library)]
print(f"torch {torch.__version__}", f"custom_op: {seen[0]}", f"Library: {seen[1]}", sep="\n")
sys.exit(seen != ["version 1, RuntimeError", "version 0, gradient 7.0 where 1.0 is right"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/saved.py"
