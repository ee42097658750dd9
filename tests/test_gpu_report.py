"""Tables and pictures of a GPU's results, on made-up results, and the clock they are taken from, on a pretended GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpu_clock, gpu_report, report
from bench.dry_run import dry_run
from tests.harness.pretended_gpu import without_gpu
from tests.support.forks import forked

ROOT = Path(__file__).resolve().parent.parent
FLOORS = dict(device="Made Up", copy_gb_per_s=4000.0, read_gb_per_s=4200.0, bf16_tflops=800.0, fp32_tflops=50.0)


def result(candidate: str, group: str, median: float, ratio: float, **facts: object) -> dict:
    extra = {
        "op": "silu",
        "candidate": candidate,
        "median_us": median,
        "ratio_to_baseline": ratio,
        "baseline": "torch.compile",
        "baseline_median_us": median / ratio,
        "device": "Made Up",
        "torch": "2.11.0",
        "pdkernels": "0",
        "timed_by": "graph replay",
        "dtype": "bf16",
        **facts,
    }
    return {"group": group, "extra_info": extra, "stats": {"iqr": 4e-7, "max": 1e-3}}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    small, large = "silu, 8 rows, cuda", "silu, 16 rows, cuda"
    benchmarks = [
        result("pdkernels", small, 2.0, 0.5, bytes_moved=1_000_000),  # 2 MB at 4 TB/s: 0.5 us
        result("torch eager", small, 9.0, 3.0, timed_by="calls"),
        result("torch.compile", small, 4.0, 1.0),
        result("pdkernels", large, 10.0, 1.0, bytes_moved=1_000_000, flops=4_000_000_000),  # 5 us at 800 TFLOP/s
        result("torch.compile", large, 9.0, 0.9),
    ]
    (tmp_path / "h0").mkdir()
    (tmp_path / "h0/silu.json").write_text(json.dumps({"machine_info": {"gpu": FLOORS}, "benchmarks": benchmarks}))
    (tmp_path / "h0/part-4.json").write_text(json.dumps({"part": 4, "ok": True}))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/silu.json").write_text(json.dumps({"machine_info": {}, "benchmarks": benchmarks}))
    return tmp_path


def test_tables_of_a_gpu(results: Path, tmp_path: Path) -> None:
    text = gpu_report.pages(results)
    assert text.count("Made Up") == 1 and "copy 4,000 GB/s" in text and "bf16 product 800 TFLOP/s" in text
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert lines[0] == ["| µs (times ours)", "silu, 8 rows", "silu, 16 rows |"]
    assert lines[2:] == [
        ["| **pdkernels**", "2.0 ± 0.2 (1.00x)", "10.0 ± 0.2 (1.00x) |"],
        ["| torch eager", "9.0 ± 0.2* (6.00x)", "- |"],
        ["| torch.compile", "4.0 ± 0.2 (2.00x)", "9.0 ± 0.2 (0.90x) |"],
        ["| floor's time by ours", "25%", "50% |"],
    ]
    assert gpu_report.summary(results).splitlines()[-1] == "| silu | 2 | 0.90x to 2.00x | 25% to 50% |"
    gpu_report.plot(results, tmp_path / "images")
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["bench_h0.png"]


def test_a_baseline_that_is_no_candidate_is_a_peer() -> None:
    rows = [result(name, "product, 1 rows, cuda", 4.0, 2.0)["extra_info"] for name in ("q4_0", "q8_0")]
    rows = [{**row, "group": "product, 1 rows, cuda", "iqr_us": 0.4, "floors": FLOORS} for row in rows]
    assert gpu_report.best_peer(rows) == 0.5  # forms of ours
    assert gpu_report.op_table(rows).splitlines()[-1] == "| torch.compile, the baseline | 2.0 (0.50x) |"
    floor = [{**row, "baseline": "memcpy of the same bytes"} for row in rows]
    assert gpu_report.best_peer(floor) is None


def test_no_gpu_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    monkeypatch.setattr(report, "GPU_RESULTS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:gpu summary -->\n<!-- /bench -->\n<!-- bench:gpu -->\n<!-- /bench -->\n")
    report.renew(page, [])
    assert page.read_text().count(gpu_report.NOTHING) == 2


@without_gpu
def test_a_dry_run_leads_to_a_table(tmp_path: Path) -> None:
    result = tmp_path / "gpu/linear.json"
    result.parent.mkdir()
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "bench/bench_linear_token_statistics.py"]
    arguments += ["-k", "bf16 and pdkernels", "--benchmark-only", f"--benchmark-json={result}"]
    # A worker of xdist exports its name, and pytest-benchmark measures nothing if it finds one.
    code = """
import os, sys
for name in [*os.environ]:
    if name.startswith("PYTEST_"):
        del os.environ[name]
sys.path.insert(0, os.getcwd())
import pytest
sys.exit(int(pytest.main(sys.argv[1:])))
"""
    ran = forked(code, *arguments, environment={"PDKERNELS_BENCH_DRY": "1"}, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-3000:]
    text = gpu_report.pages(tmp_path)
    assert "a GPU in name only" in text and "**pdkernels**" in text and "floor's time by ours" in text
    clock = json.loads(result.read_text())["benchmarks"][0]
    assert clock["stats"]["rounds"] == 2 and clock["extra_info"]["timed_by"] == "graph replay"


@without_gpu
def test_the_clock_of_a_gpu_and_its_floors() -> None:
    clock = gpu_clock.GpuClock()
    for cached in (gpu_clock.eviction, gpu_clock.floors):
        cached.cache_clear()
    with dry_run():
        x = torch.ones(3, device="cuda")
        took = [clock.run(lambda: x.add_(1), ahead=ahead) for ahead in (True, False)]
        assert x.tolist() == [3, 3, 3] and all(t > 0 for t in took) and clock() == sum(took)
        assert gpu_clock.replay(lambda: x.add_(1)) is not None and x.tolist()[0] >= 6
        floors = gpu_clock.floors()
        assert set(FLOORS) | {"shortest_launch_us"} == set(floors)
        assert all(floors[name] >= 0 for name in FLOORS if name != "device")
    for cached in (gpu_clock.eviction, gpu_clock.floors):
        cached.cache_clear()


@without_gpu
def test_what_reads_the_device_is_not_replayed() -> None:
    calls: list[int] = []

    def asks() -> None:
        calls.append(1)
        if len(calls) == 3:  # two calls come before the capture
            raise RuntimeError("operation not permitted when stream is capturing")

    with dry_run():
        assert gpu_clock.replay(asks) is None and len(calls) == 3
