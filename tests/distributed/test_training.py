"""The training example on several processes: gradients of one process, and the state after one of them is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pdkernels.training import pack_dual_stream

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 6


def example() -> ModuleType:
    """Loaded from its file, as the other examples are."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("train_on_ranks", ROOT / "examples/train_on_ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(group: Any, sharding: str) -> tuple[dict[str, torch.Tensor], float, int]:
    """Gradients of one step, without a process group before and after it."""
    there = example()
    torch.manual_seed(0)
    model = there.Transformer(there.CONFIG, mask_token=there.MASK_TOKEN)
    objective = there.distributed(model, sharding, torch.device("cpu"))
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.0)
    loss = there.train_step(objective, optimizer, there.own_batch(7, 0, SAMPLES))
    found, held = {}, 0
    for name, parameter in objective.named_parameters():
        gradient = parameter.grad
        held += getattr(parameter, "_local_tensor", parameter).numel()
        found[name.removeprefix("module.")] = getattr(gradient, "full_tensor", lambda g=gradient: g)()
    return found, loss, held


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_gradients_are_those_of_one_process(ranks, sharding: str) -> None:
    there = example()
    torch.manual_seed(0)
    objective = there.Objective(there.Transformer(there.CONFIG, mask_token=there.MASK_TOKEN))
    batch = pack_dual_stream([there.sample(7, 0, number) for number in range(SAMPLES)], there.WIDTH, there.MASK_TOKEN)
    loss = objective(batch, len(batch.ar_rows) + len(batch.masked_rows))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
    numbers = sum(parameter.numel() for parameter in objective.parameters())
    for found, total, held in ranks.run(4, gradients, sharding):
        assert abs(total - loss.item()) <= 1e-5
        # Every tensor's rows are dealt out: 65, 65, 65 and 63 of the 258 ids, else equally many.
        assert held == numbers if sharding == "ddp" else abs(held - numbers / 4) <= 1.5 * there.CONFIG.hidden_size
        for name, parameter in objective.named_parameters():
            difference = (found[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert difference <= 2e-5, (name, difference)


def test_layers_read_no_parameters_of_others(ranks) -> None:
    """What FSDP requires; a second forward follows, in case only the first one worked."""
    assert ranks.run(2, two_forwards) == [True, True]


def two_forwards(group: Any) -> bool:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import pdkernels as pd

    model: Any = pd.models.load("tiny-code")
    tokens = torch.arange(20)[None]
    whole = model(tokens)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return all(torch.equal(model(tokens), whole) for _ in range(2))


KILLS = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import train_on_ranks as there
step = there.train_step
count = 0

def dying(*arguments):
    global count
    count += 1
    if count == 6 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)

there.train_step = dying
there.main(sys.argv[1:])
"""


def trained(folder: Path, script: Path, ranks: int, steps: int) -> tuple[list[dict[str, Any]], int]:
    """The log, and how the launch ended."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = ["--folder", str(folder), "--steps", str(steps), "--samples", "4", "--every", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, str(script), *arguments], capture_output=True, timeout=300, env=environment)
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()], done.returncode


@pytest.mark.slow
def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """Its run ends with an error; the next one continues from the last checkpoint, and the losses of both are, bit for bit, those of
    an uninterrupted run."""
    kills, script = tmp_path / "killed.py", ROOT / "examples/train_on_ranks.py"
    kills.write_text(KILLS.format(examples=str(ROOT / "examples")))
    cut_off, code = trained(tmp_path / "disturbed", kills, 2, 8)
    assert code != 0 and [line["step"] for line in cut_off] == list(range(5))
    disturbed, code = trained(tmp_path / "disturbed", script, 2, 8)
    plain, plain_code = trained(tmp_path / "plain", script, 2, 8)
    assert code == plain_code == 0
    assert disturbed == plain and [line["step"] for line in plain] == list(range(8))
    # Another number of processes continues from the same checkpoint.
    longer, code = trained(tmp_path / "plain", script, 1, 10)
    assert code == 0 and longer[:8] == plain and len(longer) == 10
