#!/usr/bin/env bash
# Expected: a loss with reduction="mean" over a DTensor is the mean over the whole tensor, as mean() of a DTensor is, whose rows may be shared out unevenly.
# Seen: in torch 2.13.0 mse_loss, smooth_l1_loss, huber_loss and binary_cross_entropy_with_logits take the mean of the ranks' means: of five rows on two ranks, three and two,
# a row of the second rank counts one and a half times as much. Nothing is said. mean() of the same numbers, l1_loss, reduction="sum", and four rows are right.
# Output seen (a DTensor, the whole tensor; x and y differ by 1 in the last row alone): "mse_loss: 0.25, 0.2", "smooth_l1_loss: 0.12, 0.1", "huber_loss: 0.12, 0.1",
# "binary_cross_entropy_with_logits: 0.85, 0.82", "l1_loss: 0.2, 0.2", "mean of squares: 0.2, 0.2", "mse_loss, sum: 6.0, 6.0", "mse_loss of four rows: 0.25, 0.25".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

losses = {
    **{name: getattr(F, name) for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "l1_loss")},
    "mean of squares": lambda x, y: ((x - y) ** 2).mean(),
    "mse_loss, sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse_loss of four rows": F.mse_loss,
}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh, seen = init_device_mesh("cpu", (2,)), []
    for name, loss in losses.items():
        rows = 4 if "four" in name else 5
        x, y = torch.zeros(rows, 6), torch.zeros(rows, 6)
        x[-1] = 1
        right = loss(x, y).item()
        found = loss(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Shard(0)])).full_tensor().item()
        seen.append(f"{name}: {round(found, 2)}, {round(right, 2)}")
    if rank == 0:
        pathlib.Path(folder, "seen").write_text("\n".join(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
    seen = pathlib.Path(sys.argv[1], "seen").read_text().split("\n")
    print(*seen, sep="\n")
    expected = [
        "mse_loss: 0.25, 0.2",
        "smooth_l1_loss: 0.12, 0.1",
        "huber_loss: 0.12, 0.1",
        "binary_cross_entropy_with_logits: 0.85, 0.82",
        "l1_loss: 0.2, 0.2",
        "mean of squares: 0.2, 0.2",
        "mse_loss, sum: 6.0, 6.0",
        "mse_loss of four rows: 0.25, 0.25",
    ]
    sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
