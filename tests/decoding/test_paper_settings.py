"""The papers' settings: methods take them, and the page says where defaults differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding import available, find
from pdkernels.decoding.causal.jacobi import DEFAULT_BLOCK_SIZE

SETTINGS = {name: find(name).paper_settings for name in available() if find(name).paper_settings}
PAGE = Path(__file__).resolve().parents[2] / "docs/decoding.md"


@pytest.mark.parametrize("method", SETTINGS)
def test_a_method_takes_them(method: str) -> None:
    model = pd.models.load(find(method).example)
    prompt = "12 + 34 = ?\n"
    result = pd.decoding.generate(model, prompt, method, max_new_tokens=8, **SETTINGS[method])
    assert 0 < result.stats.tokens <= 8
    assert hash(find(method)) is not None


def test_the_page_lists_the_defaults_that_differ() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Settings of the papers")[1]
    listed: set[tuple[str, str, str, str]] = set()
    method = ""
    for name, option, paper, default in re.findall(
        r"^\| (`\w+`)? ?\| `(\w+)` \| (\S+) \| (\S+) \|", section, re.MULTILINE
    ):
        method = name.strip("`") or method
        listed.add((method, option, paper, default))
    different = set()
    for method, settings in SETTINGS.items():
        options: dict[str, Any] = find(method).options
        for option, value in settings.items():
            default = options[option].default
            if (method, option) == ("jacobi", "block_size"):
                default = DEFAULT_BLOCK_SIZE
            if default != value:
                different.add((method, option, str(value), str(default)))
    assert listed == different
