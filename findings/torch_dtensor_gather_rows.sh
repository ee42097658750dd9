#!/usr/bin/env bash
# Expected: gather of a DTensor gives what it gives of the whole tensor: index may have fewer rows than the input, says its documentation, and its row n then reads
# row n of the input, wherever that row is.
# Seen: in torch 2.13.0 each rank reads from its own rows by its own part of the index: with eight rows on two ranks and an index of four, the third and fourth row of
# the index read rows 4 and 5 in place of 2 and 3. Nothing is said. An index of as many rows as the input is right, and one row too, which cannot be split. Columns do
# the same for dim=0; scatter and scatter_add, which have the same rule, are right.
# Output seen: "index of 4, split: rows [0, 1, 4, 5]", the same for an index on every rank and for columns; "index of 8, split: rows [0, 1, 2, 3, 4, 5, 6, 7]",
# "index of 1, split: rows [0]". Two processes on a CPU, with gloo.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

whole = torch.arange(8)[:, None] + torch.arange(0, 30, 10)  # row n is n, 10 + n, 20 + n


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh, seen = init_device_mesh("cpu", (2,)), []
    rows, columns = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole.T.contiguous(), mesh, [Shard(1)])
    for size in (8, 4, 1):
        index = torch.zeros(size, 1, dtype=torch.long)
        for name, placement in (("split", Shard(0)), ("on every rank", Replicate())):
            got = rows.gather(1, distribute_tensor(index, mesh, [placement])).full_tensor()
            seen.append(f"index of {size}, {name}: rows {got[:, 0].tolist()}")
    index = torch.zeros(1, 4, dtype=torch.long)
    seen.append(f"columns: {columns.gather(0, distribute_tensor(index, mesh, [Replicate()])).full_tensor()[0].tolist()}")
    to = distribute_tensor(torch.zeros(8, 1, dtype=torch.long), mesh, [Shard(0)])
    four = distribute_tensor(torch.zeros(4, 1, dtype=torch.long), mesh, [Shard(0)])
    source = distribute_tensor(torch.ones(4, 1, dtype=torch.long), mesh, [Shard(0)])
    for name in ("scatter", "scatter_add"):
        seen.append(f"{name}: {getattr(to, name)(1, four, source).full_tensor()[:, 0].tolist()}")
    if rank == 0:
        pathlib.Path(folder, "seen").write_text("\n".join(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
    seen = pathlib.Path(sys.argv[1], "seen").read_text().split("\n")
    print(*seen, sep="\n")
    wrong = [0, 1, 4, 5]
    expected = [f"index of {size}, {name}: rows {rows}" for size, rows in ((8, [*range(8)]), (4, wrong), (1, [0])) for name in ("split", "on every rank")]
    expected += [f"columns: {wrong}"] + [f"{name}: {[1] * 4 + [0] * 4}" for name in ("scatter", "scatter_add")]
    sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
