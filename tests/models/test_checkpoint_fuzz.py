"""Checkpoints with random faults: an error that names the file, or a correct load, quickly and in little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdkernels import models
from tests.support import checkpoint_fuzz
from tests.support.checkpoint_judge import check_right


@pytest.mark.parametrize(("first", "count"), [(0, 300), pytest.param(300, 4700, marks=pytest.mark.slow)])
def test_corrupted_checkpoints_are_refused_by_name_or_load_correctly(first: int, count: int, tmp_path: Path) -> None:
    ends = checkpoint_fuzz.run(first, count, tmp_path)
    # Both outcomes occur, and refusals have many reasons.
    assert count / 10 < ends["right"] < 0.9 * count and len(ends) > 30


@pytest.mark.parametrize(("first", "count"), [(0, 200), pytest.param(200, 39_800, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_corrupted_adapters_and_gguf_files_are_refused_by_name_or_load(first: int, count: int, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.support import door_fuzz

    ends = door_fuzz.run(first, count, tmp_path)
    assert count / 20 < ends["right"] < 0.9 * count and len(ends) > 20


def test_without_a_fault_all_load_correctly(tmp_path: Path) -> None:
    for number, (fields, content) in enumerate(checkpoint_fuzz.bases()):
        for shards in (1, 3):
            folder = tmp_path / f"{number}-{shards}"
            folder.mkdir()
            checkpoint_fuzz.Checkpoint(fields, content, shards).write(folder)
            check_right(models.load(folder), folder)
