#!/usr/bin/env bash
# Expected: a torch module that counts the tokens of a boolean mask by cumsum gives the same counts after openvino.convert_model, as the module's sum does: torch adds up
# booleans as int64.
# Seen: openvino 2026.4.1 converts cumsum of booleans, traced or exported, to one whose result is boolean: every count from 1 on is True, and the padding that a mask hides and
# the first token behind it cannot be told by their counts. Nothing is said. With dtype=torch.int64 and for integers it counts. sum and prod of booleans are right.
# Output seen (of 0, 0, 1, 1, 1): "mask.cumsum(-1): int64 [0, 0, 1, 2, 3] in torch, traced bool [0, 0, 1, 1, 1], exported bool [0, 0, 1, 1, 1]", the same for ids.ne(0), and
# "int64 [0, 0, 1, 2, 3]" three times with dtype=torch.int64 and for integers; "mask.sum(-1): int64 [3] in torch, traced int64 [3], exported int64 [3]".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys
from collections.abc import Callable

import numpy as np
import openvino
import torch

print("openvino", openvino.__version__, "torch", torch.__version__)
ids = torch.tensor([0, 0, 7, 8, 9])


class Module(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def words(values: np.ndarray) -> str:
    return f"{values.dtype} {values.astype(int).ravel().tolist()}"


def line(name: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> str:
    module, found = Module(function).eval(), []
    for model in (openvino.convert_model(module, example_input=(x,)), openvino.convert_model(torch.export.export(module, (x,)))):
        found.append(words(np.array(openvino.Core().compile_model(model, "CPU")([x.numpy()])[0])))
    return f"{name}: {words(function(x).numpy())} in torch, traced {found[0]}, exported {found[1]}"


seen = [
    line("mask.cumsum(-1)", lambda mask: mask.cumsum(-1), ids > 0),
    line("ids.ne(0).cumsum(-1)", lambda x: x.ne(0).cumsum(-1), ids),
    line("mask.cumsum(-1, dtype=torch.int64)", lambda mask: mask.cumsum(-1, dtype=torch.int64), ids > 0),
    line("integers", lambda mask: mask.cumsum(-1), (ids > 0).long()),
    line("mask.sum(-1)", lambda mask: mask.sum(-1), ids > 0),
]
print(*seen, sep="\n")
right, wrong = "int64 [0, 0, 1, 2, 3]", "bool [0, 0, 1, 1, 1]"
expected = [f"{name}: {right} in torch, traced {wrong}, exported {wrong}" for name in ("mask.cumsum(-1)", "ids.ne(0).cumsum(-1)")]
expected += [f"{name}: {right} in torch, traced {right}, exported {right}" for name in ("mask.cumsum(-1, dtype=torch.int64)", "integers")]
expected += ["mask.sum(-1): int64 [3] in torch, traced int64 [3], exported int64 [3]"]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile openvino==2026.4.1 torch==2.13.0 numpy==2.4.6 packaging==26.4
"$folder/venv/bin/python" "$folder/seen.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
