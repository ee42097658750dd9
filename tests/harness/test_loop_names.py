"""No kernel has a loop that Triton's front end gets wrong (`tests/harness/loop_names.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cudasim.build import ROOT
from tests.harness import loop_names
from tests.harness.triton_interpreter import requires_triton

KERNELS = sorted(path for folder in ("triton", "gluon") for path in (ROOT / "pdkernels" / folder).glob("*.py"))

# What copies the value that `a` entered with, and what does not.
KERNEL = """
@triton.jit
def kernel(x, n):
    a, c = tl.load(x), tl.load(x + 1)
    {before}
    for i in range(n):
        {within}
        a = a + c
    tl.store(x, b)
"""
WRONG = [
    ("b = a", "b = a"),
    ("b = a", "d = a\n        b = d"),
    ("d = a\n    b = d", "b = a"),
    ("b, d = a, a", "b, d = d, a"),
    ("b = a.to(tl.int32)", "b = tl.cast(a, tl.int32)"),
    ("b = a if x is None else c", "b = a"),
    ("b = a", "if i == 3:\n            b = a"),
    ("b = a", "while b < i:\n            b = a"),
]
RIGHT = [
    ("b = a", "b = a + 1"),
    ("b = a", "b = c"),
    ("b = c", "b = a"),
    ("b = tl.zeros_like(a)", "b = a"),
    ("b = a", "c = c + b"),
]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_name_enters_a_loop_as_the_value_of_another_that_it_takes_there(path: Path) -> None:
    assert loop_names.aliased(path.read_text()) == [], "give one a value of its own: see tests/harness/loop_names.py"


@pytest.mark.parametrize(("before", "within"), WRONG)
def test_such_names_are_seen(before: str, within: str) -> None:
    assert loop_names.aliased(KERNEL.format(before=before, within=within))


@pytest.mark.parametrize(("before", "within"), RIGHT)
def test_other_names_are_not(before: str, within: str) -> None:
    assert loop_names.aliased(KERNEL.format(before=before, within=within)) == []


@requires_triton
def test_what_the_front_end_forgets_is_seen() -> None:
    """In Triton that has the fault: once this fails, another version has mended it, and the rule may go when that is the oldest."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", loop_names.__name__]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == ["last_of_three: b", "before_the_last: b"], done.stderr
