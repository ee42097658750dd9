"""The parts of the GPU proof that run without a GPU: its summaries, its steps, and every line of the benchmarks."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import bench_block_sparse_attention as attention
from scripts import gpu_proof, proof_summaries
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
    late, _ = part.run(
        "late", [sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(50)"], share=0.05
    )
    empty, _ = part.run("empty", [sys.executable, "-c", "print('nothing')"], needs="all is well")
    fine, said = part.run("fine", [sys.executable, "-c", "print('all is well')"], needs="all is well")
    lost, _ = part.run("lost", ["/no/such/program"])
    assert [step.returncode for step in (late, empty, fine, lost)] == [124, 1, 0, 127]
    assert late.last_line == "begun" and said == "all is well\n" and "all is well" in part.log.read_text()
    assert fine.command == "python -c print('all is well')"


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
