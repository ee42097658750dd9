"""Every kind of argument of every Triton kernel compiles, for every architecture: what the interpreter accepts, a compiler may refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdkernels import backends
from pdkernels.ops.library import OPS
from tests.cudasim.build import ROOT
from tests.harness import specialisations
from tests.harness import triton_budgets as harness
from tests.harness.triton_interpreter import requires_triton

pytestmark = requires_triton
FUNCTIONS = tuple(specialisations.CHOICES)
APPEND = "speculative_attention_append_"
# Backward passes of others come with their own kernels' calls.
BY_TRITON = {name for name, kernel in backends.ON_CUDA.items() if kernel == "triton"}


def sources() -> list[Path]:
    harness_files = ("choices", "loop_names", "specialisations", "state_specialisations")
    own = [ROOT / "tests" / "harness" / f"{name}.py" for name in harness_files]
    return sorted([*(ROOT / "pdkernels" / "ops").glob("*.py"), *own])


def compiled(*cases: str) -> dict[str, dict[str, Any]]:
    found = harness.measure(list(cases), specialisations.__name__, sources())
    for case, report in found.items():
        failures = [f"{given}\n    {error}" for given, error in report["failures"].items()]
        assert not failures, f"\n{case}: {len(failures)} of {report['calls']} calls\n" + "\n".join(failures[:5])
        assert report["forgotten"] == [], f"{case}: see tests/harness/loop_names.py"
        assert report["compiled"] > 0 or case.endswith(":empty")
    return found


def test_the_choices_are_those_of_all_functions_and_their_arguments() -> None:
    """A new function with a Triton kernel, or a new argument, has to be listed before anything else passes."""
    assert set(FUNCTIONS) == BY_TRITON == {name for name in OPS if name in BY_TRITON}
    assert {name: specialisations.unknown(name) for name in FUNCTIONS} == {name: [] for name in FUNCTIONS}


def test_a_covering_has_all_combinations() -> None:
    choices = {"a": (0, 1, 2), "b": (None, "x"), "c": range(4), "d": (True, False)}
    rows = list(specialisations.covering(choices, 3))
    assert len(rows) < 3 * 2 * 4 * 2
    assert {(row["a"], row["b"], row["c"]) for row in rows} == {
        (a, b, c) for a in choices["a"] for b in choices["b"] for c in choices["c"]
    }


def test_a_sample_compiles() -> None:
    """Every choice of every argument."""
    compiled(*(f"sm_90:ttir:{name}:1" for name in FUNCTIONS))


@pytest.mark.slow
def test_no_size_is_too_large_for_a_grid() -> None:
    compiled(*(f"sm_90:ttir:{name}:{sizes}" for name in FUNCTIONS for sizes in ("large", "empty")))


@pytest.mark.slow
def test_pairs_of_choices_compile_where_the_most_arguments_are_optional() -> None:
    (found,) = compiled(f"sm_90:ttir:{APPEND}:2").values()
    assert found["one-sided"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_kinds_of_arguments_compile(name: str) -> None:
    found = compiled(*(f"sm_90:ttir:{name}:{calls}" for calls in ("3", "presences")))
    # `sources` are of the op that appends, which has the same kernel.
    alone = [] if name != "speculative_attention" else ["speculative_attention _split_kernel sources"]
    assert found[f"sm_90:ttir:{name}:3"]["one-sided"] == alone


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [one for one in harness.SHARED_LIMIT if one != "sm_90"])
def test_they_compile_with_the_blockings_of_other_architectures(architecture: str) -> None:
    compiled(*(f"{architecture}:ttir:{name}:2" for name in FUNCTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", harness.SHARED_LIMIT)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "speculative_attention"])
def test_all_blockings_fit_the_machine(name: str, architecture: str) -> None:
    """To machine code, whose shared memory the harness holds against what a block may have."""
    (report,) = compiled(f"{architecture}:cubin:{name}:extremes").values()
    assert max(report["shared"].values()) <= harness.SHARED_LIMIT[architecture]
