"""References are attributes of their package before anyone has imported them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.forks import forked

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_reference_is_reached_by_its_name() -> None:
    """Those that the docs name among them; and no sampler is loaded before it is named."""
    named = {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"`pd\.reference\.(\w+)", page.read_text(encoding="utf-8"))
    }
    assert {"jacobi", "jacobi_multiblock"} <= named
    code = f"""
import sys, pdkernels as pd
assert "pdkernels.reference.slowfast" not in sys.modules
for name in {sorted(named | {"slowfast", "llada", "recurrent_adaptive"})}:
    assert getattr(pd.reference, name).__name__ == f"pdkernels.reference.{{name}}" and name in dir(pd.reference)
assert not hasattr(pd.reference, "jacoby")
"""
    result = forked(code)
    assert result.returncode == 0, result.stderr
