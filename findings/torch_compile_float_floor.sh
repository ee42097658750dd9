#!/usr/bin/env bash
# Expected: under torch.compile, x // y and x % y of floats are those of eager mode and of Python: 1.0 // 0.1 is 9, since 0.1 is a little more than a tenth, and a finite
# positive x % infinity is x.
# Seen: on a CPU torch 2.13.0 divides and rounds the quotient down: 1 // 0.1 is 10 in float32 and in float64, with 1 % 0.1 of 0.1, and -2.5 // infinity is -0, not -1. Where it
# uses vector units, x % y is x less a quotient times y: 10000000000 % 3 is 0 in float32 where eager mode gives 1, and 2 % infinity is NaN. A single number, which no
# vector unit takes, has the right remainder.
# Output seen: "float32: 1 // 0.1: eager 9, compiled 10", "float32: 1e+10 % 3: eager 1, compiled 0", "float32: 2 % inf: eager 2, compiled nan", "float32: -2.5 // inf: eager -1,
# compiled -0" and so on. Needs a C++ compiler, and a CPU with AVX2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import math
import sys

import torch

torch.set_num_threads(1)
print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())


def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x // y, x % y


pairs = torch.tensor([[1, 0.1], [1, 0.1], [1e10, 3], [2, math.inf], [-2.5, math.inf]], dtype=torch.float64)
compiled, seen = torch.compile(both, dynamic=False), {}
for name, dtype, repeats in (("float32", torch.float32, 16), ("float64", torch.float64, 16), ("one number", torch.float32, 1)):
    for pair, sign in zip(pairs, ("//", "%", "%", "%", "//")):
        x, y = (part.repeat(repeats).to(dtype) for part in pair)
        seen[f"{name}: {pair[0]:g} {sign} {pair[1]:g}"] = [f"{results[sign == '%'][0].item():.6g}" for results in (both(x, y), compiled(x, y))]
print(*[f"{case}: eager {eager}, compiled {other}" for case, (eager, other) in seen.items()], sep="\n")
expected = {f"{name}: {case}": results for name in ("float32", "float64", "one number") for case, results in (("1 // 0.1", ["9", "10"]), ("1 % 0.1", ["0.1", "0.1"]), ("-2.5 // inf", ["-1", "-0"]))}
expected |= {f"{name}: 2 % inf": ["2", "nan"] for name in ("float32", "float64")} | {"float32: 1e+10 % 3": ["1", "0"], "one number: 1e+10 % 3": ["1", "1"]}
sys.exit(any(seen[case] != results for case, results in expected.items()))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/seen.py"
