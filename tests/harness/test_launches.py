"""Counts of launches, on a simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pdkernels as pd
from tests.harness import launches
from tests.harness.pretended_gpu import pretended_gpu, without_gpu

pytestmark = without_gpu


def test_what_counts() -> None:
    with pretended_gpu():
        x, weight = torch.ones(2, 4, device="cuda"), torch.ones(4, 4, device="cuda")
        views = launches.counted(lambda: x[:1].view(4).expand(3, 4).unsqueeze(0))
        work = launches.counted(lambda: (x @ weight).add_(1).cumsum(1))
        draws = {"temperature": 0.5, "backend": "auto"}
        ours = launches.counted(lambda: [pd.token_statistics(x), pd.token_statistics(x, top_p=0.5, **draws)])
    assert views == (0, 0, 0) and work == (1, 0, 2)
    assert ours.ours == 1 + 2 and ours.products == 0


@pytest.fixture(scope="module")
def found() -> launches.Found:
    return launches.rows()


def test_fused_ops_launch_less(found: launches.Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {form for _, form, _, _ in found} == {"step", "verify", "refresh", "enter"}
    for _, _, was, now in found:
        assert was.products == now.products > 0 and now.ours > 0 and now.total < was.total
    greedy, drawn = found[0][3], found[1][3]
    assert drawn.ours == greedy.ours + 1  # `token_statistics` in place of an argmax
    monkeypatch.setattr(launches, "rows", lambda: found)
    assert launches.main(["--json", str(tmp_path / "nodes.json")]) == 0
    assert len(json.loads((tmp_path / "nodes.json").read_text())["simulated"]) == len(found)


def test_the_page_has_these_counts(found: launches.Found) -> None:
    page = launches.REGION.search(launches.PAGE.read_text())
    assert page is not None and page[0] == f"{page[1]}{launches.markdown(found)}\n{page[2]}"
