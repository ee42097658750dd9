from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.distributed.ranks import Ranks

if not (dist.is_available() and dist.is_gloo_available()):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes with a gloo group."""
    started = Ranks()
    yield started
    started.close()
