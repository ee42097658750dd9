#!/usr/bin/env bash
# Expected: two configs made from one dictionary of rope settings, each with its own `rope_theta`, have their own bases; arguments are read only.
# Seen: in transformers 5.24.0 the first config writes its base into the caller's dictionary, and the second one takes that instead of the one it
# was given: a Qwen3 model gets 500,000 in place of 1,000,000, without a word. With a dictionary of its own it has the right one.
# Output seen: "LlamaConfig 500000.0", "the dictionary afterwards {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 500000.0}",
# "Qwen3Config, given 1000000.0: 500000.0", "with a dictionary of its own: 1000000.0".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import transformers
from transformers import LlamaConfig, Qwen3Config

print("transformers", transformers.__version__)
rule = {"rope_type": "linear", "factor": 2.0}
first = LlamaConfig(rope_scaling=rule, rope_theta=500000.0).rope_parameters["rope_theta"]
seen = [f"LlamaConfig {first}", f"the dictionary afterwards {rule}"]
second = Qwen3Config(rope_scaling=rule, rope_theta=1000000.0).rope_parameters["rope_theta"]
own = Qwen3Config(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=1000000.0).rope_parameters["rope_theta"]
seen += [f"Qwen3Config, given 1000000.0: {second}", f"with a dictionary of its own: {own}"]
print(*seen, sep="\n")
expected = [
    "LlamaConfig 500000.0",
    "the dictionary afterwards {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 500000.0}",
    "Qwen3Config, given 1000000.0: 500000.0",
    "with a dictionary of its own: 1000000.0",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
