"""Random calls of all ops; more of them: ``python -m tests.ops.fuzz --calls 1000000``, or PDKERNELS_FUZZ_CALLS."""

from __future__ import annotations

import os

import pytest
import torch

from tests.ops import fuzz
from tests.ops.examples import PUBLIC

CALLS = int(os.environ.get("PDKERNELS_FUZZ_CALLS", 2400))
PARTS = 4


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, PARTS))])
def test_calls_are_right_or_refused_with_an_error(part: int) -> None:
    counts, faults = fuzz.fuzz(CALLS // PARTS, seed=part)
    assert not faults, "\n".join(faults)
    valid = {op: counts[f"{op} valid"] for op in PUBLIC}
    assert all(valid.values()), valid


def test_it_finds_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with wrong results, one that raises a foreign error, and one that writes before it raises."""

    def wrong(op: str, arguments: fuzz.Arguments, backend: str) -> tuple[object, Exception | None]:
        if backend == "reference":
            return torch.zeros(3), None
        if op == "off":
            return torch.ones(3), None
        if op == "foreign":
            return None, RuntimeError("pdkernels: broken")
        arguments["x"].fill_(1)
        return None, ValueError("pdkernels.op: x must be something else, got this.")

    monkeypatch.setattr(fuzz, "outcome", wrong)
    monkeypatch.setattr(fuzz, "make", lambda op, seed: {"x": torch.zeros(3)})
    monkeypatch.setitem(fuzz.OPS, "off", fuzz.OPS["silu_and_mul"])
    assert fuzz.check("off", 0) == "another result than the reference"
    assert fuzz.check("foreign", 0).startswith("foreign error: RuntimeError")
    assert fuzz.check("writes", 0).startswith("memory changed by a call that raised")
