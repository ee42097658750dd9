"""Train a small tri-mode model on several processes: FSDP2 (one group a layer) or DDP, with checkpoints that any number of them can resume.

    torchrun --standalone --nproc-per-node 2 examples/train_on_ranks.py --folder run --steps 200

Next-token prediction on a clean copy of sums worked out digit by digit, and the filling of masks on a noisy copy, packed under a dual-stream
mask, whose plan each process makes for its own samples. A sample belongs to its step and number, whichever process draws it, and the loss
is over the rows of all processes: gradients are those of one process with all samples. If a process dies, torchrun ends the others
and, with --max-restarts, which is its own option, starts all of them again; without it the same command does. They continue from the last
complete checkpoint. Steps since then are repeated, and their lines in log.jsonl replaced.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pdkernels.distributed import init_process_group
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from pdkernels.training import (
    DualStreamBatch,
    DualStreamSample,
    arithmetic,
    as_ids,
    draw_masks,
    dual_stream_loss,
    noise_level,
    pack_dual_stream,
)

MASK_TOKEN = ByteTokenizer.vocab_size
WIDTH, TILE = 8, 64
CONFIG = TransformerConfig(
    vocab_size=MASK_TOKEN + 1, hidden_size=128, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate_size=192
)


class Objective(nn.Module):
    """The model wrapped in its loss: the module whose forward and backward FSDP and DDP hook into."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: DualStreamBatch, rows: int) -> torch.Tensor:
        """The loss of a process's samples, as its share of the loss over all `rows`."""
        device = self.model.device
        plan = batch.mask.plan(TILE, TILE, device)
        hidden = self.model.hidden(batch.tokens[None].to(device), positions=batch.positions.to(device), mask=plan)[0]
        ar, masked = (self.model.logits(hidden[chosen.to(device)]) for chosen in (batch.ar_rows, batch.masked_rows))
        return dual_stream_loss(ar, masked, batch, normaliser=rows).total


def sample(seed: int, step: int, number: int, level: float | None = None) -> DualStreamSample:
    """A text and its masked positions, at a noise level of its own or at the given one."""
    own = hash((seed, step, number)) % 2**31
    problem = next(iter(arithmetic(own)))
    ids = as_ids([(problem.prompt + problem.steps).encode()]).long()
    masked, share = draw_masks(len(ids), torch.Generator().manual_seed(own), min_p_mask=0.2, t=level)
    return DualStreamSample(ids, masked & (torch.arange(len(ids)) >= len(problem.prompt)), share)


def own_batch(seed: int, step: int, samples: int, ratios: str = "sample") -> DualStreamBatch:
    """The samples of this process: every n-th of all of them. With the ratios of "rank" they share a noise level, which is another in each
    process, as in Nemotron-Labs-Diffusion (section 2.3); the result then depends on the number of processes."""
    numbers = range(dist.get_rank(), samples, dist.get_world_size())
    level = noise_level(seed, step, dist.get_rank()) if ratios == "rank" else None
    return pack_dual_stream([sample(seed, step, number, level) for number in numbers], WIDTH, MASK_TOKEN)


def distributed(model: Transformer, sharding: str, device: torch.device) -> nn.Module:
    """The objective over all processes."""
    objective = Objective(model.to(device))
    if sharding == "ddp":
        return DistributedDataParallel(objective)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


def train_step(objective: nn.Module, optimizer: torch.optim.Optimizer, batch: DualStreamBatch) -> float:
    """One step; returns the loss of all processes together."""
    counts = torch.tensor([len(batch.ar_rows) + len(batch.masked_rows)], device=next(objective.parameters()).device)
    dist.all_reduce(counts)
    loss = objective(batch, int(counts))
    optimizer.zero_grad()
    # Both average gradients over processes, and the parts of the loss add up.
    (loss * dist.get_world_size()).backward()
    torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def last_checkpoint(folder: Path) -> tuple[int, Path | None]:
    """The steps done and the folder that stores them; a folder without its metadata, which is written last, is from an interrupted save."""
    whole = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    return (int(whole[-1].name.removeprefix("step-")), whole[-1]) if whole else (0, None)


def state_of(objective: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(objective, optimizer)
    return {"model": model, "optimizer": optim}


def log_lines(path: Path, done: int) -> list[str]:
    """Lines of the steps before `done`, which stay; the last line may have been cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < done]


def train(chosen: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(chosen.seed)  # equal weights on all processes
    objective = distributed(Transformer(CONFIG, mask_token=MASK_TOKEN), chosen.sharding, device)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=2e-3)
    folder, log = Path(chosen.folder), Path(chosen.folder) / "log.jsonl"
    done, path = last_checkpoint(folder)
    if path is not None:
        state = state_of(objective, optimizer)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(objective, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    speaks = dist.get_rank() == 0
    if speaks:
        folder.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(log_lines(log, done)))
    for step in range(done, chosen.steps):
        loss = train_step(objective, optimizer, own_batch(chosen.seed, step, chosen.samples, chosen.ratios))
        if speaks:
            with log.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        if (step + 1) % chosen.every == 0 or step + 1 == chosen.steps:
            dcp.save(state_of(objective, optimizer), checkpoint_id=folder / f"step-{step + 1:07}")
            if speaks:
                print(f"step {step + 1}: loss {loss:.4f}, saved", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="for checkpoints and log.jsonl; what is there is resumed")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=8, help="of a step, on all processes together")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--sharding", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument(
        "--ratios", choices=("sample", "rank"), default="sample", help="what has a masking ratio of its own"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600, help="seconds that processes wait for each other")
    chosen = parser.parse_args(arguments)
    gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    init_process_group(timeout=timedelta(seconds=chosen.timeout))
    try:
        if chosen.samples < dist.get_world_size():
            raise ValueError(f"--samples must be at least one for each process, got {chosen.samples}")
        train(chosen, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
