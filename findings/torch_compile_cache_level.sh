#!/usr/bin/env bash
# Expected: a cache of torch.compile that is kept, copied with a container or shared by machines gives right results, or is passed over, where the CPU differs from the
# one it was written on, as ATEN_CPU_CAPABILITY, a documented setting, makes it differ here.
# Seen: the key of Inductor's cache in torch 2.13.0 says nothing about the level of the vector units. A graph that was compiled with AVX-512 is taken from the cache with
# AVX2, and its C++ is compiled again with vectors half as wide in loops of the old steps: x + 1 is right for 8 elements of every 16, and the others stay as the
# memory was. Nothing is said, and a second process with AVX2 does the same. A folder of its own for each level is right.
# Output seen: "avx512, empty folder: right 48 of 48, hits 0", "avx2, empty folder: right 48 of 48, hits 0", "avx2, folder of avx512: right 24 of 48, hits 1".
# Needs a C++ compiler, and a CPU with AVX-512.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import os
import pathlib
import subprocess
import sys

import torch
from torch._dynamo.utils import counters


def compiled() -> str:
    """What the compiled function gives in this process."""
    torch.set_num_threads(1)
    x = torch.arange(48.0)
    right = torch.compile(lambda x: x + 1)(x) == x + 1
    groups = right.view(3, 2, 8)  # the halves of the vectors of AVX-512
    assert groups[:, 0].all() and (right.all() or not groups[:, 1].all())
    return f"right {'48' if right.all() else '24'} of 48, hits {counters['inductor']['fxgraph_cache_hit']}"


def process(level: str, cache: pathlib.Path) -> str:
    settings = {"ATEN_CPU_CAPABILITY": level, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, __file__], env=os.environ | settings, check=True, capture_output=True, text=True).stdout.strip()


if len(sys.argv) == 1:
    print(compiled())
    sys.exit()
folder = pathlib.Path(sys.argv[1])
print("torch", torch.__version__)
cases = {"avx512, empty folder": ("avx512", "a"), "avx2, empty folder": ("avx2", "b"), "avx2, folder of avx512": ("avx2", "a")}
seen = [f"{case}: {process(level, folder / name)}" for case, (level, name) in cases.items()]
print(*seen, sep="\n")
expected = ["right 48 of 48, hits 0", "right 48 of 48, hits 0", "right 24 of 48, hits 1"]
sys.exit(seen != [f"{case}: {result}" for case, result in zip(cases, expected)])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
