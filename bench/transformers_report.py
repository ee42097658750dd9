"""The table of transformers' own tests."""

from __future__ import annotations

import json
from pathlib import Path

from bench.gpu_report import table


def transformers_tests(path: Path) -> str:
    """From `scripts/transformers_tests.py --out`."""
    if not path.exists():
        return "not measured"
    found = json.loads(path.read_text())
    lines = [[model, str(one["sdpa"]), str(one["pdkernels"])] for model, one in found["models"].items()]
    chosen = f", chosen by `-k {found['chosen']}`" if found["chosen"] else ""
    facts = (
        f"transformers {found['transformers']}, torch {found['torch']}; tests of transformers {found['tests']}{chosen}"
    )
    return f"{table(['`test_modeling_*.py`', 'pass with sdpa', 'of these with ours'], lines)}\n\n{facts}"
