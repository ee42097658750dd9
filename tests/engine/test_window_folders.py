"""Layers with windows in engines that share a folder, and in requests that name adapters: nobody gets the rows of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdkernels.cache import WindowedPool
from pdkernels.decoding import generate
from pdkernels.decoding.steps import Staging
from pdkernels.models import load_adapter
from pdkernels.models.architectures.windows import Window
from tests.decoding.test_windows import model_with
from tests.engine.test_windows import NEW, asked, check_given_back, drawn, engine, small_pages
from tests.support.lora import random_adapter

__all__ = ["small_pages"]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "end_tokens": ()}


def test_adapters_of_a_model_with_windows(tmp_path: Path) -> None:
    """The same prompt with each, together and then again, after a restart too."""
    model, text, names = model_with((Window(16), None)), drawn(1, 297), [None, "small", "wide"]
    for adapter, rank in {"small": 4, "wide": 24}.items():
        load_adapter(model, adapter, random_adapter(model, tmp_path / adapter, rank, seed=rank, size=0.3))
    expected = [generate(model, text, adapter=name, **GREEDY).tokens for name in names]
    assert len({tuple(tokens.tolist()) for tokens in expected}) == 3
    for known in (0, 296):
        with engine(model, max_running=4, prefix_dir=tmp_path / "texts") as one:
            for method in ("autoregressive", "jacobi"):
                handles = [one.submit(text, method, adapter=name, **GREEDY) for name in names]
                for handle, tokens in zip(handles, expected):
                    assert handle.result(60).tokens.equal(tokens)
                    assert method == "jacobi" or handle.reused == known
            for name, tokens in zip(names, expected):
                more = [*text, *tokens.tolist(), *drawn(2, 20)]
                assert asked(one, model, more, adapter=name).reused >= 297 + NEW - 1
        check_given_back(one)


def test_layers_with_windows_have_files_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that keeps all rows of all layers, beside one that does not, with one model and folder."""
    model, text = model_with((Window(16), None)), drawn(0, 297)
    for known in (0, 296):
        for in_windows in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if not in_windows:
                    patch.setattr("pdkernels.engine.pages._sizes", lambda *_: (400, {}))
                with engine(model, prefix_dir=tmp_path) as one:
                    assert isinstance(one._memory.pages.pool, WindowedPool) is in_windows
                    assert asked(one, model, text).reused == known
    assert "ignored" not in caplog.text


def test_pages_of_a_beginning_are_held_until_it_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tree and by who begins, so that finding pages for the rest does not forget them."""
    model, begin, seen = model_with((Window(16), Window(33))), Staging.begin, list[tuple[int, int]]()

    def watched(self: Staging, pages: list[int], partial: int | None, text: list[int], *more: Any) -> None:
        pool = self.pool
        assert isinstance(pool, WindowedPool)
        held = [*pages, *([] if partial is None else [partial])]
        assert all(pool.holders(page) > 1 for page in held)
        for window, numbers in more[3].items():
            group = pool.groups[window]
            here = [number for number in numbers if number != group.scratch]
            assert all(group.holders(number) > 1 for number in here)
            seen.append((len(held), len(here)))
        begin(self, pages, partial, text, *more)

    monkeypatch.setattr(Staging, "begin", watched)
    with engine(model) as one:
        for end in (1, 9, 30):
            asked(one, model, [*drawn(1, 301), *drawn(end, end)])
    assert sum(min(counts) > 0 for counts in seen) == 4
    check_given_back(one)
