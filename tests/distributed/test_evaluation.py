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

TIMES = ("tokens_per_second", "speedup", "speedup_quartiles", "seconds")
COMPETING = [Candidate("tiny-trimode", "autoregressive"), Candidate("tiny-trimode", "linear_self_speculation", 8)]


def rows(group: Any, problems: int, batch_size: int) -> list[dict[str, Any]]:
    task = make_task("sums", problems)._replace(limit=24)
    models = {"tiny-trimode": pd.models.load("tiny-trimode")}
    found = [asdict(row) for row in evaluate(models, COMPETING, task, batch_size=batch_size, group=group)]
    for row in found:
        assert len(row["seconds"]) == -(-problems // batch_size)
    return [{name: value for name, value in row.items() if name not in TIMES} for row in found]


@pytest.mark.parametrize("count, problems, batch_size", [(2, 5, 2), (4, 3, 1)])
def test_all_ranks_find_what_one_finds(ranks, count: int, problems: int, batch_size: int) -> None:
    """Also if a rank has fewer batches than the others, or none."""
    assert ranks.run(count, rows, problems, batch_size) == [rows(None, problems, batch_size)] * count


ARGUMENTS = ["--model", "tiny-code", "--method", "jacobi", "--width", "4", "--task", "sums", "--problems", "3"]


def command(*arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m"]
    if ranks > 1:
        launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = [*launch, "pdkernels", "eval", *ARGUMENTS, *arguments]
    return subprocess.run(given, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path: Path) -> None:
    figures = []
    for ranks in (1, 2):
        path = tmp_path / f"{ranks}.json"
        done = command("--json", str(path), ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("autoregressive") == 1
        benchmarks = json.loads(path.read_text())["benchmarks"]
        figures.append([{n: v for n, v in x["extra_info"].items() if n not in TIMES} for x in benchmarks])
    assert figures[0] == figures[1]


@pytest.mark.slow
def test_sweeps_are_for_one_process() -> None:
    refused = command("--sweep", "block_size=2,4", ranks=2)
    assert refused.returncode != 0 and "--sweep and --family planned must be run by one process" in refused.stderr
