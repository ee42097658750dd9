"""Many clients for a long time: `bench.server_soak`, whose checks are on every answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
from bench import server_soak, soak_clients


@pytest.mark.slow
def test_sixty_four_clients_for_ten_minutes(tmp_path: Path) -> None:
    found = soak_clients.soak(tmp_path / "log", 64, 600)
    print(found)
    leaks_nothing(found)


def leaks_nothing(found: dict[str, object]) -> None:
    held, counts = found["held"], found["counts"]
    assert isinstance(held, dict) and isinstance(counts, dict)
    _, early, _, late = held["resident_mb"]
    assert late < 1.02 * early
    assert held["files"][3] <= held["files"][1] + 8 and held["threads"][3] <= held["threads"][1] + 2
    assert set(counts) >= set(server_soak.KINDS)


def test_the_committed_soak_leaked_nothing_and_has_a_table() -> None:
    found = json.loads(server_soak.RESULTS.read_text())
    leaks_nothing(found)
    assert found["clients"] >= 24 and found["seconds"] == 600 and len(found["resident_mb"]) > 100
    assert server_soak.soak_table(server_soak.RESULTS).count("\n| ") == len(server_soak.KINDS) + 7
