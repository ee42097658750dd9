"""Settings shared by all tests."""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import settings

from tests.harness.covering import mark_the_rest_slow
from tests.harness.examples import draw_a_part
from tests.harness.triton_interpreter import choose_mode

choose_mode()

# Examples are the same in every run; no deadline, since the machines that run this are shared. `HYPOTHESIS_PROFILE=explore`
# looks for new ones.
settings.register_profile("default", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
# It also draws constants of the modules that are imported, which depend on the tests that ran before in the same process.
if hasattr(providers := sys.modules.get("hypothesis.internal.conjecture.providers"), "_get_local_constants"):
    providers._get_local_constants = providers.Constants
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_the_rest_slow(items)
    if config.getoption("markexpr") == "not slow" and PROFILE == "default":
        draw_a_part(items)


def pytest_collection_finish() -> None:
    """What is there before the first test stays; the collector need not look at these millions of objects again."""
    gc.collect()
    gc.freeze()
