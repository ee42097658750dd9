#!/usr/bin/env bash
# Expected: cumsum(-1) of a DTensor is cumsum(1), whether its columns are on one rank or on two: a DTensor has the values of the whole tensor, and
# an op that needs a whole row gathers it.
# Seen: torch 2.13.0 gathers for dim=1. For dim=-1 each rank adds up its own columns, and the sums begin again at every rank, without a word: positions that are
# counted from a mask, as models count them, start anew in the second half of a text. cumprod and logcumsumexp do the same; sum, softmax, sort and cummax take -1 for 1.
# Output seen: "cumsum(1): as one tensor", "cumsum(-1): [1, 2, 3, 4, 1, 2, 3, 4]", "cumprod(-1): [2, 4, 8, 16, 2, 4, 8, 16]", "logcumsumexp(-1): begins again",
# and "as one tensor" for sum, softmax, sort and cummax of -1. Two processes on a CPU, with gloo.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mask, two, numbers = torch.ones(1, 8, dtype=torch.long), torch.full((1, 8), 2), torch.zeros(1, 8)
cases = {  # what is computed, of what
    "cumsum(1)": (lambda x: x.cumsum(1), mask),
    "cumsum(-1)": (lambda x: x.cumsum(-1), mask),
    "cumprod(1)": (lambda x: x.cumprod(1), two),
    "cumprod(-1)": (lambda x: x.cumprod(-1), two),
    "logcumsumexp(1)": (lambda x: x.logcumsumexp(1), numbers),
    "logcumsumexp(-1)": (lambda x: x.logcumsumexp(-1), numbers),
    "sum(-1)": (lambda x: x.sum(-1), mask),
    "softmax(-1)": (lambda x: x.softmax(-1), numbers),
    "sort(-1)": (lambda x: x.sort(-1).values, numbers),
    "cummax(-1)": (lambda x: x.cummax(-1).values, mask),
}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh, seen = init_device_mesh("cpu", (2,)), []
    for name, (op, whole) in cases.items():
        right, got = op(whole), op(distribute_tensor(whole, mesh, [Shard(1)])).full_tensor()
        halves = torch.cat([op(half) for half in whole.chunk(2, 1)], 1) if "cum" in name else right
        if torch.equal(got, right):
            seen.append(f"{name}: as one tensor")
        else:
            assert torch.equal(got, halves)
            seen.append(f"{name}: {'begins again' if got.is_floating_point() else got[0].tolist()}")
    if rank == 0:
        pathlib.Path(folder, "seen").write_text("\n".join(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
    seen = pathlib.Path(sys.argv[1], "seen").read_text().split("\n")
    print(*seen, sep="\n")
    wrong = {"cumsum(-1)": [1, 2, 3, 4] * 2, "cumprod(-1)": [2, 4, 8, 16] * 2, "logcumsumexp(-1)": "begins again"}
    sys.exit(seen != [f"{name}: {wrong.get(name, 'as one tensor')}" for name in cases])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
