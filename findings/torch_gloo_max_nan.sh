#!/usr/bin/env bash
# Expected: the largest over all ranks, of numbers among which one is NaN, is NaN, as torch.maximum has it, or is the other number, as torch.fmax has it; the same for
# every element, whichever rank has the NaN.
# Seen: all_reduce with MAX or MIN on gloo, torch 2.13.0: it depends on the element and on the rank. If all of one rank's numbers are NaN, half of the results are; which
# half depends on the rank. Of a single number NaN stays if rank 0 has it and is lost if rank 1 has it. So the largest logit of a row whose vocabulary is
# on two ranks hides a model that has gone wrong on one of them; amax of a DTensor goes that way, its max and argmax do not.
# Output seen: "NaN on rank 0: MAX 1 of 1, 4 of 8; MIN 1 of 1, 4 of 8", "NaN on rank 1: MAX 0 of 1, 4 of 8; MIN 0 of 1, 4 of 8", "SUM 8 of 8",
# "DTensor, NaN on rank 1: amax 2.0, max nan". Two processes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import math
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def kept(rank: int, bad: int, op: str) -> str:
    """How many results are NaN, of 1 and of 8, where all numbers of the rank `bad` are."""
    counts = []
    for size in (1, 8):
        numbers = torch.full((size,), math.nan if rank == bad else 1.0)
        dist.all_reduce(numbers, getattr(dist.ReduceOp, op))
        counts.append(f"{int(numbers.isnan().sum())} of {size}")
    return f"{op} {', '.join(counts)}"


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    seen = [f"NaN on rank {bad}: {kept(rank, bad, 'MAX')}; {kept(rank, bad, 'MIN')}; {kept(rank, bad, 'SUM')}" for bad in range(2)]
    row = distribute_tensor(torch.tensor([[1.0, 2.0, 3.0, math.nan]]), init_device_mesh("cpu", (2,)), [Shard(1)])
    seen.append(f"DTensor, NaN on rank 1: amax {row.amax(-1).full_tensor().item()}, max {row.max(-1).values.full_tensor().item()}")
    pathlib.Path(folder, f"seen{rank}").write_text("\n".join(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
    seen, other = (pathlib.Path(sys.argv[1], f"seen{rank}").read_text().split("\n") for rank in range(2))
    print(*seen, sep="\n")
    expected = [
        "NaN on rank 0: MAX 1 of 1, 4 of 8; MIN 1 of 1, 4 of 8; SUM 1 of 1, 8 of 8",
        "NaN on rank 1: MAX 0 of 1, 4 of 8; MIN 0 of 1, 4 of 8; SUM 1 of 1, 8 of 8",
        "DTensor, NaN on rank 1: amax 2.0, max nan",
    ]
    sys.exit(seen != expected or other != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
