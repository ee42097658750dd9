#!/usr/bin/env bash
# Expected: quantize_ with a config for weights keeps a layer near what it was: a row of zeros, as padded rows of a head or pruned ones are, stays zeros, and weights of 1 bit,
# which IntxWeightOnlyConfig takes as it takes 2 to 8, keep their signs.
# Seen: in torchao 0.18.0 Float8WeightOnlyConfig divides a row of zeros by its scale of 0, and its output is NaN (reported as pytorch/ao#4713). With torch.int1 and the default
# mapping every weight is 0, since half a step is rounded to even; MappingType.ASYMMETRIC leaves few weights of 32, and SYMMETRIC_NO_CLIPPING_ERR makes all NaN. The
# signs times the mean would leave an error of 0.5. Nothing is said. Int8WeightOnlyConfig keeps the row of zeros.
# Output seen: "a row of zeros: Float8WeightOnly nan, Int8WeightOnly 0.0", "uniform weights in 1 bit: SYMMETRIC 0 of 2048 are left, error 1.00",
# "ASYMMETRIC 97 of 2048 are left, error 0.99", "SYMMETRIC_NO_CLIPPING_ERR 2048 of 2048 are left, error nan", "the signs times the mean: error 0.50".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import torch
import torchao
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

print("torch", torch.__version__, "torchao", torchao.__version__)


def weights(matrix, config):
    model = torch.nn.Sequential(torch.nn.Linear(*matrix.shape[::-1], bias=False))
    model[0].weight.data = matrix.clone()
    quantize_(model, config)
    return model[0].weight.dequantize()


torch.manual_seed(0)
uniform = torch.rand(32, 64) - 0.5
rows = uniform.clone()
rows[3] = 0
zeros = {name: float(weights(rows, config())[3].sum()) for name, config in (("Float8WeightOnly", Float8WeightOnlyConfig), ("Int8WeightOnly", Int8WeightOnlyConfig))}
print("a row of zeros:", ", ".join(f"{name} {total}" for name, total in zeros.items()))
left, errors = {}, {}
for mapping in MappingType:
    bits = weights(uniform, IntxWeightOnlyConfig(weight_dtype=torch.int1, granularity=PerGroup(32), mapping_type=mapping))
    left[mapping.name], errors[mapping.name] = int((bits != 0).sum()), float((bits - uniform).norm() / uniform.norm())
    print(f"uniform weights in 1 bit: {mapping.name} {left[mapping.name]} of 2048 are left, error {errors[mapping.name]:.2f}")
signs = uniform.sign() * uniform.abs().mean()
print(f"the signs times the mean: error {(signs - uniform).norm() / uniform.norm():.2f}")
nan = errors["SYMMETRIC_NO_CLIPPING_ERR"]
right = zeros["Float8WeightOnly"] != zeros["Float8WeightOnly"] and zeros["Int8WeightOnly"] == 0
sys.exit(not (right and left["SYMMETRIC"] == 0 and errors["ASYMMETRIC"] > 0.95 and nan != nan))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 torchao==0.18.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" 2> "$folder/warnings" || { cat "$folder/warnings" >&2; exit 1; }
