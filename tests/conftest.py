"""Settings shared by all tests."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

from tests.harness.covering import mark_the_rest_slow
from tests.harness.triton_interpreter import choose_mode

choose_mode()

# Examples are the same in every run; no deadline, since the machines that run this are shared. `HYPOTHESIS_PROFILE=explore`
# looks for new ones.
settings.register_profile("default", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
# It also draws constants of the modules that are imported, which depend on the tests that ran before in the same process.
if hasattr(providers := sys.modules.get("hypothesis.internal.conjecture.providers"), "_get_local_constants"):
    providers._get_local_constants = providers.Constants
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest_slow(items)
