"""`user.py` passes ``mypy --strict``, its mistakes are errors, and it calls every public function."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pdkernels as pd

USER = Path(__file__).with_name("user.py")
ROOT = USER.parent.parent.parent


def test_every_public_function_is_called() -> None:
    called = {node.attr for node in ast.walk(ast.parse(USER.read_text())) if isinstance(node, ast.Attribute)}
    public = {
        name for module in (pd, pd.decoding) for name in module.__all__ if inspect.isroutine(getattr(module, name))
    }
    assert public - called == set()


@pytest.mark.slow
def test_types_as_a_user_sees_them() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(USER)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
