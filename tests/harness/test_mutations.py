"""Planted faults are of the package as it is; `make mutations` says whether the tests find them."""

from __future__ import annotations

import pytest

from tests.harness.mutations import MUTATIONS, ROOT, lines


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_changes_one_line_and_names_tests(name: str) -> None:
    mutation = MUTATIONS[name]
    assert len(lines(mutation)) == 1 and mutation.line != mutation.fault
    assert all((ROOT / "tests" / test).exists() for test in mutation.tests.split())
