#!/usr/bin/env bash
# Expected: safetensors.numpy reads what safetensors.numpy has written, from a file (load_file) as from bytes (load).
# Seen: safetensors 0.8.0 writes bfloat16 and float8 arrays of ml_dtypes 0.6.0 with their right names. bfloat16 comes back from load_file, and load
# raises KeyError. float8 comes back from neither: load_file looks for numpy.float8_e4m3fn and raises AttributeError.
# Output seen: "bfloat16: load_file bfloat16, load KeyError" and for three float8 types "load_file AttributeError, load KeyError".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/read.py" <<'PYTHON'
import sys
from importlib.metadata import version

import ml_dtypes
import numpy
from safetensors.numpy import load, load_file, save, save_file

print("safetensors", version("safetensors"), "ml_dtypes", version("ml_dtypes"), "numpy", version("numpy"))


def outcome(read, source) -> str:
    try:
        return read(source)["ones"].dtype.name
    except (AttributeError, KeyError) as error:
        return type(error).__name__


seen = []
for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
    tensors, path = {"ones": numpy.ones(4, dtype=getattr(ml_dtypes, name))}, f"{sys.argv[1]}/{name}.safetensors"
    save_file(tensors, path)
    seen.append(f"load_file {outcome(load_file, path)}, load {outcome(load, save(tensors))}")
    print(f"{name}: {seen[-1]}")
sys.exit(seen != ["load_file bfloat16, load KeyError", *["load_file AttributeError, load KeyError"] * 3])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.6.0
"$folder/venv/bin/python" "$folder/read.py" "$folder"
