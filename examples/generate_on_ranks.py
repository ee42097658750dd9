"""Generate with a model that is split over several ranks.

    torchrun --standalone --nproc-per-node 2 examples/generate_on_ranks.py --model tiny-trimode "482 + 967 = ?"

Each rank reads its own part of a checkpoint's folder. On GPUs every rank takes the device of its local rank.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pdkernels as pd
import pdkernels.distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="+")
    parser.add_argument("--model", default="tiny-trimode", help="a name or a checkpoint's folder")
    parser.add_argument("--method", default=None, help="default: the first of the model's family")
    parser.add_argument("--tokens", type=int, default=64)
    chosen = parser.parse_args()

    gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    pd.distributed.init_process_group()
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        model = pd.distributed.load(chosen.model, mesh, device=device)
        method = chosen.method or next(name for name in pd.decoding.available() if pd.decoding.supports(model, name))
        with pd.distributed.count_communication() as traffic:
            result = pd.decoding.generate(model, chosen.prompt, method=method, max_new_tokens=chosen.tokens)
        if dist.get_rank() == 0:
            for prompt, text in zip(chosen.prompt, result.text):
                print(f"{prompt}{text}")
            forwards = result.stats.forwards
            print(
                f"{forwards} forwards, {traffic.calls / forwards:.1f} exchanges and {traffic.bytes / forwards:.0f} bytes each"
            )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
