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

from pdkernels.training import noise_level, pack_dual_stream
from tests.distributed.ranks import COUNTS

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


def test_ranks_have_masking_ratios_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    there, found = example(), []
    monkeypatch.setattr(there.dist, "get_world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(there.dist, "get_rank", lambda rank=rank: rank)
        batch = there.own_batch(7, 2, 9, "rank")
        (weight,) = batch.masked_weights.unique().tolist()  # one for all texts of the rank
        assert batch.samples == 3 and weight == pytest.approx(1 / (0.8 * noise_level(7, 2, rank) + 0.2))
        found.append(weight)
        assert len(there.own_batch(7, 2, 9).masked_weights.unique()) == 3
    assert len(set(found)) == 3


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_gradients_are_those_of_one_process(ranks, sharding: str, count: int) -> None:
    there = example()
    torch.manual_seed(0)
    objective = there.Objective(there.Transformer(there.CONFIG, mask_token=there.MASK_TOKEN))
    batch = pack_dual_stream([there.sample(7, 0, number) for number in range(SAMPLES)], there.WIDTH, there.MASK_TOKEN)
    loss = objective(batch, len(batch.ar_rows) + len(batch.masked_rows))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
    numbers = sum(parameter.numel() for parameter in objective.parameters())
    for found, total, held in ranks.run(count, gradients, sharding):
        assert abs(total - loss.item()) <= 1e-5
        # Every tensor's rows are dealt out: of the 258 ids to four ranks 65, 65, 65 and 63, else equally many.
        assert held == numbers if sharding == "ddp" else abs(held - numbers / count) <= 1.5 * there.CONFIG.hidden_size
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
from torch.distributed.checkpoint import FileSystemWriter

def dies(module, name, at, rank):
    known, count = getattr(module, name), 0

    def function(*arguments, **options):
        nonlocal count
        count += 1
        if count == at and os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return known(*arguments, **options)

    setattr(module, name, function)

{place}
there.main(sys.argv[1:])
"""
PLACES = {
    "step": 'dies(there, "train_step", 6, "1")',
    "start": 'dies(there, "init_process_group", 1, "1")',
    "save": 'dies(FileSystemWriter, "write_data", 2, "1")',
    "first": 'dies(there, "train_step", 4, "0")',
}


def trained(folder: Path, script: Path, ranks: int, steps: int, restarts: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The log, and how the launch ended."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch += ["--max-restarts", str(restarts)]
    arguments = ["--folder", str(folder), "--steps", str(steps), "--samples", "4", "--every", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, str(script), *arguments], capture_output=True, timeout=300, env=environment)
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()], done.returncode


def killing(folder: Path, place: str) -> Path:
    """The example, of which a process is killed there."""
    script = folder / "killed.py"
    script.write_text(KILLS.format(examples=str(ROOT / "examples"), place=PLACES[place]))
    return script


def weights(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Of the model and of the optimizer."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / f"step-{steps:07}", folder / "whole.pt")
    tree = torch.load(folder / "whole.pt")
    return {str(path): leaf for path, leaf in torch.utils._pytree.tree_flatten_with_path(tree)[0]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("plain")
    lines, code = trained(folder, ROOT / "examples/train_on_ranks.py", 2, 8)
    assert code == 0 and [line["step"] for line in lines] == list(range(8))
    return folder


def check_same(disturbed: Path, plain: Path) -> None:
    """Losses and weights, bit for bit."""
    assert (disturbed / "log.jsonl").read_text() == (plain / "log.jsonl").read_text()
    found, expected = weights(disturbed, 8), weights(plain, 8)
    assert found.keys() == expected.keys() and len(found) > 50
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


@pytest.mark.slow
def test_a_killed_process_loses_nothing(tmp_path: Path, plain: Path) -> None:
    """Its run ends with an error; the next one goes on from the last checkpoint."""
    cut_off, code = trained(tmp_path, killing(tmp_path, "step"), 2, 8)
    assert code != 0 and [line["step"] for line in cut_off] == list(range(5))
    _, code = trained(tmp_path, ROOT / "examples/train_on_ranks.py", 2, 8)
    assert code == 0
    check_same(tmp_path, plain)
    # Another number of processes goes on with the same checkpoint.
    longer, code = trained(tmp_path, ROOT / "examples/train_on_ranks.py", 1, 10)
    assert code == 0 and len(longer) == 10


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_torchrun_starts_a_killed_process_again(tmp_path: Path, plain: Path, place: str) -> None:
    """In a step, before the ranks found each other, while it writes a checkpoint, and the rank that speaks for all."""
    _, code = trained(tmp_path, killing(tmp_path, place), 2, 8, restarts=1)
    assert code == 0
    check_same(tmp_path, plain)


def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path, there = tmp_path / "log.jsonl", example()
    assert there.log_lines(path, 5) == []
    lines = [json.dumps({"step": step}) + "\n" for step in range(3)]
    path.write_text("".join(lines) + '{"st')
    assert there.log_lines(path, 5) == lines and there.log_lines(path, 2) == lines[:2]
