"""Evaluations whose prompts are split over several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.evaluation import Candidate, evaluate, make_task
from tests.distributed.ranks import FOUR

TIMES = ("tokens_per_second", "speedup", "speedup_quartiles", "seconds")
COMPETING = [Candidate("tiny-trimode", "autoregressive"), Candidate("tiny-trimode", "linear_self_speculation", 8)]


def rows(group: Any, problems: int, batch_size: int) -> list[dict[str, Any]]:
    task = make_task("sums", problems)._replace(limit=24)
    models = {"tiny-trimode": pd.models.load("tiny-trimode")}
    found = [asdict(row) for row in evaluate(models, COMPETING, task, batch_size=batch_size, group=group)]
    for row in found:
        assert len(row["seconds"]) == -(-problems // batch_size)
    return [{name: value for name, value in row.items() if name not in TIMES} for row in found]


@pytest.mark.parametrize("count, problems, batch_size", [(2, 5, 2), (2, 1, 1), pytest.param(4, 3, 1, marks=FOUR)])
def test_all_ranks_find_what_one_finds(ranks, count: int, problems: int, batch_size: int) -> None:
    """Also if a rank has fewer batches than the others, or none."""
    assert ranks.run(count, rows, problems, batch_size) == [rows(None, problems, batch_size)] * count


ARGUMENTS = ["--model", "tiny-code", "--method", "jacobi", "--width", "4", "--task", "sums", "--problems", "3"]


def command(
    *arguments: str, ranks: int, restarts: int = 0, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launch += ["--max-restarts", str(restarts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = [*launch, *(["-m", "pdkernels"] if script is None else [str(script)]), "eval", *ARGUMENTS, *arguments]
    return subprocess.run(given, capture_output=True, text=True, env=environment, timeout=300)


def figures(path: Path) -> list[dict[str, Any]]:
    benchmarks = json.loads(path.read_text())["benchmarks"]
    return [{n: v for n, v in x["extra_info"].items() if n not in TIMES} for x in benchmarks]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process finds."""
    path = tmp_path_factory.mktemp("alone") / "figures.json"
    done = command("--json", str(path), ranks=1)
    assert done.returncode == 0, done.stderr
    return figures(path)


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    path = tmp_path / "figures.json"
    done = command("--json", str(path), ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("autoregressive") == 1
    assert figures(path) == alone


KILLS = """
import os, signal
from pdkernels import cli
from pdkernels.evaluation import comparison

known, count = comparison.decoding.generate, 0

def generate(*arguments, **options):
    global count
    count += 1
    if count == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return known(*arguments, **options)

comparison.decoding.generate = generate
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_process_loses_and_doubles_nothing(tmp_path: Path, alone: list[dict[str, Any]], restarts: int) -> None:
    """Where torchrun may not start it again, there is an error and no file, until the command is given again."""
    script, path = tmp_path / "killed.py", tmp_path / "figures.json"
    script.write_text(KILLS)
    done = command("--json", str(path), ranks=2, restarts=restarts, script=script)
    assert "exitcode: -9" in done.stderr
    assert (done.returncode == 0) == path.exists() == bool(restarts)
    if not restarts:
        done = command("--json", str(path), ranks=2)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("autoregressive") == 1
    assert figures(path) == alone


@pytest.mark.slow
def test_sweeps_are_for_one_process() -> None:
    refused = command("--sweep", "block_size=2,4", ranks=2)
    assert refused.returncode != 0 and "--sweep and --family planned run in one process" in refused.stderr
