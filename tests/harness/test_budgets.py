from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cudasim.build import HERE as SIMULATOR
from tests.harness.budgets import (
    INCLUDE_DIRS,
    Resources,
    add_missing,
    find_nvcc,
    load_budgets,
    measure,
    problems,
    short_name,
)

MEASURED = {
    "copy<float>": {"sm_80": Resources(30, 0, 0, 0), "sm_90a": Resources(33, 0, 0, 64)},
    "sum": {"sm_80": Resources(16, 8, 0, 0), "sm_90a": Resources(16, 0, 0, 0)},
}


def test_within_budget() -> None:
    budgets = {"copy<float>": {"registers": 40, "shared": {"sm_90a": 64}}, "sum": {"registers": 16, "spill": 8}}
    assert problems("x.cu", MEASURED, budgets) == []


def test_each_excess_is_named() -> None:
    budgets = {"copy<float>": {"registers": {"sm_80": 30, "sm_90a": 32}}, "sum": {"registers": 16}}
    assert problems("x.cu", MEASURED, budgets) == [
        "x.cu: copy<float> on sm_90a takes 33 registers, its budget is 32",
        "x.cu: copy<float> on sm_90a takes 64 bytes of shared, its budget is 0",
        "x.cu: sum on sm_80 takes 8 bytes of spill, its budget is 0",
    ]


def test_missing_and_stale_entries() -> None:
    missing, stale = problems("x.cu", {"copy<float>": MEASURED["copy<float>"]}, {"old": {"registers": 8}})
    assert missing.endswith('add under \'x.cu\':  "copy<float>": {"registers": 40, "shared": 64}')
    assert stale == "x.cu: old has a budget but is gone. Remove its line."


def test_adding_keeps_existing_budgets_and_grants_no_spills(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps({"x.cu": {"copy<float>": {"registers": 8}, "old": {"registers": 8}}, "y.cu": {}}))
    add_missing({"x.cu": MEASURED}, path)
    assert load_budgets(path) == {"x.cu": {"copy<float>": {"registers": 8}, "sum": {"registers": 16}}}
    assert path.read_text().count("\n") == 6  # one line a kernel


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        ("plain(float*)", "plain"),
        ("void move<(int)4, a::B<int, (bool)1> >(int4*)", "move<(int)4, a::B<int, (bool)1> >"),
        ("void a::(anonymous namespace)::move<float>(float (*)(int))", "move<float>"),
        ("_Zsymbol", "_Zsymbol"),
    ],
)
def test_names_are_short(demangled: str, short: str) -> None:
    assert short_name(demangled) == short


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc (no GPU)")
@pytest.mark.parametrize(
    ("file", "kernel", "shared"), [("correct", "transpose_static<float, 16>", 1088), ("broken", "fill", 0)]
)
def test_real_kernels_are_measured(file: str, kernel: str, shared: int) -> None:
    """The simulator's fixtures: this also shows that they are CUDA as nvcc understands it."""
    measured = measure(SIMULATOR / "kernels" / f"{file}.cu", include_dirs=INCLUDE_DIRS, archs=["90a"])
    assert measured[kernel]["sm_90a"].shared == shared
    assert 0 < measured[kernel]["sm_90a"].registers <= 255
