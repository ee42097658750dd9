"""Settings shared by all tests."""

from __future__ import annotations

import os

from hypothesis import settings

from tests.harness.triton_interpreter import choose_mode

choose_mode()

# Examples are the same in every run; no deadline, since the machines that run this are shared. `HYPOTHESIS_PROFILE=explore`
# looks for new ones.
settings.register_profile("default", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
