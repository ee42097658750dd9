"""The ten minutes on a GPU that tell most, rehearsed without one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import pdkernels as pd
from bench import verified_tokens
from scripts import gpu_proof, gpu_window, sanitizer_driver
from tests.harness.pretended_gpu import without_gpu

ROOT = Path(__file__).resolve().parent.parent


def test_its_steps_fit_into_a_call() -> None:
    assert [step.name for step in gpu_window.WINDOW] == list("ABCDEFGH")
    # Part 0 is built before, in a call of its own or in the same quarter of an hour.
    assert sum(step.seconds for step in gpu_window.WINDOW) <= gpu_proof.LIMITS[7]
    assert gpu_proof.LIMITS[0] + gpu_proof.LIMITS[7] <= 15 * 60


def test_what_it_names_exists() -> None:
    assert set(gpu_window.NEW) <= set(sanitizer_driver.OPS)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("[io]*/test_*.py"))
    files = " ".join(path.name for path in (ROOT / "tests/ops").glob("test_*.py"))
    assert all(
        name in files or re.search(rf"^def test_\w*{name}", tests, re.MULTILINE) for name in gpu_window.NEW.values()
    )
    names = gpu_window.failed_before()
    assert len(names) > 5 and all(re.search(rf"^def {name}\(", tests, re.MULTILINE) for name in names)


def test_a_step_that_is_cut_off_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = gpu_proof.Part(tmp_path, 7, gpu_proof.time.monotonic() + 60, dry=True)
    kept = []

    def late(part: gpu_proof.Part) -> None:
        part.run("late", [sys.executable, "-c", "import time; time.sleep(50)"])

    def prompt(part: gpu_proof.Part) -> None:
        kept.append(json.loads((tmp_path / "part-7.json").read_text()))
        part.run("prompt", [sys.executable, "-c", "print('all is well')"])

    steps = (gpu_window.Timed("A", 1, late), gpu_window.Timed("B", 30, prompt))
    monkeypatch.setattr(gpu_window, "WINDOW", steps)
    gpu_window.run_window(part)
    assert [step.returncode for step in part.steps] == [124, 0] and part.ends > gpu_proof.time.monotonic() + 20
    assert [step["name"] for step in kept[0]["steps"]] == ["late"] and not kept[0]["ok"]


def written(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, object]]]:
    monkeypatch.setattr(sys, "argv", ["verified_tokens", "--dry-run", "--drafts", "4", "--to", str(path)])
    verified_tokens.main()
    rows: dict[str, list[dict[str, object]]] = json.loads(path.read_text())["rows"]
    return rows


@without_gpu
def test_a_whole_model_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "verified_tokens.json"
    rows = written(path, monkeypatch)
    for weights in ("bf16", "q4_0"):
        alone, drafted = rows[weights]
        assert alone["forwards"] == verified_tokens.NEW - 1 and drafted["forwards"] == verified_tokens.NEW // 3
        assert all(row["first"] == -1 and row["same_bits"] is True and row["off"] == 0 for row in rows[weights])
        assert [row["forwards"] for row in rows[weights]] == [verified_tokens.forwards_of(48, n) for n in (0, 4)]
    table = verified_tokens.verified_table(json.loads(path.read_text()))
    assert table.count("\n| bf16, ") == table.count("\n| q4_0, ") == 2 and "up to" not in table

    def believed(draft, predictions):  # takes every draft for right
        verdict = pd.ops.verify_draft(draft, predictions)
        return SimpleNamespace(accepted=verdict.accepted * 0 + draft.shape[1], next_token=verdict.next_token)

    monkeypatch.setattr(verified_tokens.pd, "verify_draft", believed)
    wrong = written(path, monkeypatch)["bf16"]
    assert wrong[1]["first"] == 3  # a wrong draft that was taken
    assert "| up to 3 |" in verified_tokens.verified_table(json.loads(path.read_text()))
