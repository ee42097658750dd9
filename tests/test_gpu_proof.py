"""The parts of the GPU proof that run without a GPU: its summaries, its steps, and every line of the benchmarks."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bench_block_sparse_attention as attention
from scripts import gpu_proof, proof_summaries, wheelhouse
from tests.harness.pretended_gpu import without_gpu

ROOT = Path(__file__).resolve().parent.parent
RACE = """
========= COMPUTE-SANITIZER
verify_draft: 60 calls on cuda
========= Error: Race reported between Write access at void pdkernels::cuda::verify<long>(long *)+0x1d0 in verify_draft.cu:80
=========     and Read access at void pdkernels::cuda::verify<long>(long *)+0x210 in verify_draft.cu:84 [32 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_the_output_of_a_checker_is_summed_up() -> None:
    assert doctest.testmod(proof_summaries).failed == 0
    found = proof_summaries.sanitizer_summary(RACE)
    assert found["verdict"].startswith("RACECHECK SUMMARY: 1 hazard") and found["called"] == ["verify_draft"]
    assert found["found"] == {
        "Error: Race reported between Write access, pdkernels::cuda::verify": 1,
        "and Read access, pdkernels::cuda::verify": 1,
    }
    assert proof_summaries.sanitizer_summary("Killed")["verdict"] == "none"


def test_every_benchmark_has_a_part() -> None:
    benchmarks = {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
    listed = [name for names in gpu_proof.BENCHMARKS.values() for name in names]
    # Decoding with the tiny models, SmolLM2 and models of transformers are measured on the host; loops without one are in part 3, next to
    # their tests.
    on_the_host = ["decoding", "decoding_step", "device_loop", "smollm2", "transformers"]
    assert sorted([*listed, *on_the_host]) == sorted(benchmarks)


def test_steps_are_cut_off_and_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = gpu_proof.Part(tmp_path, 1, gpu_proof.time.monotonic() + 60, dry=True)
    code = """
import time
try:
    print('begun', flush=True)
    time.sleep(50)
finally:
    print('what was found')
"""
    part.ends = gpu_proof.time.monotonic() + 3
    late, said = part.run("late", [sys.executable, "-c", code])
    part.ends += 60
    assert "what was found" in said
    empty, _ = part.run("empty", [sys.executable, "-c", "print('nothing')"], needs="all is well")
    fine, said = part.run("fine", [sys.executable, "-c", "print('all is well')"], needs="all is well")
    lost, _ = part.run("lost", ["/no/such/program"])
    assert [step.returncode for step in (late, empty, fine, lost)] == [124, 1, 0, 127]
    assert late.last_line == "KeyboardInterrupt" and said == "all is well\n" and "all is well" in part.log.read_text()
    assert fine.command == "python -c print('all is well')"


def test_all_parts_fit_into_half_an_hour_and_each_into_a_call() -> None:
    assert gpu_proof.LIMITS.keys() == gpu_proof.PARTS.keys()
    whole = {number: limit for number, limit in gpu_proof.LIMITS.items() if number != 7}
    assert sum(whole.values()) <= 1800 and max(gpu_proof.LIMITS.values()) <= 570


def build(folder: Path, monkeypatch: pytest.MonkeyPatch, answers: list[str]) -> gpu_proof.Part:
    """Part 0 with programs that print `answers` in place of its own; an answer that is empty fails."""
    monkeypatch.setattr(gpu_proof, "BUILT", folder / "built.json")
    part = gpu_proof.Part(folder, 0, gpu_proof.time.monotonic() + 60, dry=False)
    run, left = part.run, iter(answers)

    def instead(name: str, command: list[str | Path], **options: Any) -> tuple[gpu_proof.Step, str]:
        said = next(left)
        return run(name, [sys.executable, "-c", f"print({said!r}); raise SystemExit({int(not said)})"], **options)

    monkeypatch.setattr(part, "run", instead)
    gpu_proof.run_build(part)
    return part


FACTS = {"python": "3.12", "torch": "2.11", "compiled": {"cuda_archs": "90a"}}


def test_other_parts_need_a_build_of_these_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDKERNELS_COMMIT", "one")
    build(tmp_path, monkeypatch, [""])
    assert gpu_proof.not_built(False).startswith("part 0, which installs and builds, has not succeeded here. Run: ")
    # Built, but without kernels for CUDA, or a library that cannot be imported.
    build(tmp_path, monkeypatch, [sys.executable, json.dumps(FACTS | {"compiled": {"cuda_archs": ""}})])
    assert gpu_proof.not_built(False)
    build(tmp_path, monkeypatch, [sys.executable, ""])
    assert gpu_proof.not_built(False)
    part = build(tmp_path, monkeypatch, ["making .venv\n" + sys.executable, json.dumps(FACTS)])
    assert gpu_proof.not_built(False) == "" and part.python == sys.executable
    assert json.loads(gpu_proof.BUILT.read_text())["versions"] == FACTS
    monkeypatch.setenv("PDKERNELS_COMMIT", "two")
    assert gpu_proof.not_built(False).startswith("part 0 built commit one, but this is two.")
    monkeypatch.setenv("PDKERNELS_COMMIT", "one")
    monkeypatch.setattr(gpu_proof, "sources", lambda: "edited")
    assert "but this is edited" in gpu_proof.not_built(False)
    monkeypatch.undo()
    # A build that fails takes back the one before it.
    monkeypatch.setenv("PDKERNELS_COMMIT", "one")
    build(tmp_path, monkeypatch, [""])
    assert gpu_proof.not_built(True)


def test_a_part_stops_at_once_without_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_proof, "BUILT", tmp_path / "built.json")
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", "--part", "3", "1", "--dry-run"])
    monkeypatch.setenv("OUT", str(tmp_path))
    with pytest.raises(SystemExit, match="gpu_proof: part 0, which installs and builds, has not succeeded here"):
        gpu_proof.main()
    assert not list(tmp_path.glob("part-*"))


def test_the_wheelhouse_is_measured_with_the_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, kilobytes in (("small-1-py3-none-any.whl", 10), ("large-2-py3-none-any.whl", 3000)):
        (tmp_path / name).write_bytes(bytes(1024 * kilobytes))
    wheels = sorted(tmp_path.glob("*.whl"))
    total = (3010 * 1024 + sum(map(wheelhouse.size, wheelhouse.tracked()))) / 2**20
    wheelhouse.report(wheels, total + 0.1)
    assert f"2 wheels, 2.9 MiB; with the sources {total:.1f} MiB" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"over the 3 MiB of --limit. The largest wheels: large 2.9, small 0.0"):
        wheelhouse.report(wheels, 3)


@without_gpu
@pytest.mark.slow
def test_benchmarks_of_a_gpu_run_on_a_pretended_one(tmp_path: Path) -> None:
    record = tmp_path / "tests.jsonl"
    settings = os.environ | {"PDKERNELS_BENCH_DRY": "1", "PDKERNELS_TEST_RECORD": str(record), "OMP_NUM_THREADS": "1"}
    # Device loops need a driver.
    files = [
        f"bench/bench_{name}.py" for names in gpu_proof.BENCHMARKS.values() for name in names if name != "device_loop"
    ]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "tests.harness.record",
        "-k",
        "not fp32",
        "--benchmark-disable",
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, env=settings, capture_output=True, text=True
    )
    found = proof_summaries.test_summary(record)
    assert ran.returncode == 0 and found["passed"] > 80 and found["failed"] == 0, ran.stdout[-3000:]
    seen = [json.loads(line)["test"] for line in record.read_text().splitlines()]
    assert all("cuda" in test for test in seen) and {test.partition("::")[0] for test in seen} == set(files)


def test_attention_on_a_gpu_is_checked_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of a GPU, run on the CPU, checks what it checks there, gradients included."""
    draw = attention.make_inputs
    monkeypatch.setattr(attention, "make_inputs", lambda case, device: draw(case, "cpu"))
    case = attention.Case("noise-aware", (64, 4), 32, torch.bfloat16, True, (6, 2))
    inputs = draw(case, "cpu")
    attention.check("pdkernels", attention.ours(case, inputs), case, "cuda")
    short = attention.Candidate(
        lambda q, k, v: 0.9 * attention.ours(case, inputs).attention(q, k, v), inputs, lambda x: x
    )
    with pytest.raises(AssertionError, match="error over budget"):
        attention.check("pdkernels", short, case, "cuda")
    attention.oracle.cache_clear()
