#!/usr/bin/env bash
# Expected: a layer with int8 weights gives nearly what the layer gave before, in float16 as in bfloat16: a comment in its code says that scales are widened so that nothing
# overflows.
# Seen: torchao 0.18.0 rounds the sum over the whole numbers of the weights to the activation's type before it multiplies by the scale of the row. In float16 that is infinite
# where 127 times the output, over the row's largest weight, is beyond 65,504: outputs of 640 where weights are 1, and outputs of 52 where they are at most 0.1. The same with
# activations in int8. Groups of weights, IntxWeightOnlyConfig and bfloat16 are right. Nothing is said.
# Output seen, where the output is 640: "float16: Int8WeightOnly inf, in groups 638, Int8DynamicActivation inf, asymmetric inf, Intx 638", "bfloat16: Int8WeightOnly 640, in
# groups 640, Int8DynamicActivation 636, asymmetric 636, Intx 640", and for weights below 0.1 "float16, outputs from 49 to 74: 63 of 64 infinite".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import copy
import sys

import torch
import torchao
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    quantize_,
)

print("torch", torch.__version__, "torchao", torchao.__version__)
configs = {
    "Int8WeightOnly": Int8WeightOnlyConfig(),
    "in groups": Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "Int8DynamicActivation": Int8DynamicActivationInt8WeightConfig(),
    "asymmetric": Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC),
    "Intx": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(32)),
}


def output(weight, x, config):
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=x.dtype)
    layer.weight.data = weight.to(x.dtype)
    model = torch.nn.Sequential(copy.deepcopy(layer))
    quantize_(model, config)
    return model(x).detach().float()


texts, kept = [], []
for dtype in (torch.float16, torch.bfloat16):
    values = {name: float(output(torch.ones(64, 64), torch.full((1, 64), 10.0, dtype=dtype), config)[0, 0]) for name, config in configs.items()}
    kept += [name for name, value in values.items() if abs(value - 640) < 10]
    texts.append(f"{str(dtype)[6:]}: " + ", ".join(f"{name} {value:.0f}" for name, value in values.items()))
torch.manual_seed(0)
weight, x = 0.1 * torch.rand(64, 64), torch.full((1, 64), 20.0, dtype=torch.float16)
right = (x.float() @ weight.half().float().T)[0]
infinite = torch.isinf(output(weight, x, configs["Int8WeightOnly"])).sum()
texts.append(f"float16, outputs from {right.min():.0f} to {right.max():.0f}: {infinite} of 64 infinite")
print(*texts, sep="\n")
sys.exit(not (kept == ["in groups", "Intx", *configs] and right.isfinite().all() and infinite > 32))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 torchao==0.18.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" 2> "$folder/warnings" || { cat "$folder/warnings" >&2; exit 1; }
