"""Installed packages of weights, such as pdkernels-smollm2, made for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdkernels.models.checkpoints.packaged import WEIGHTS_GROUP

ROOT = Path(__file__).resolve().parents[2]


def install(monkeypatch: pytest.MonkeyPatch, site: Path, module: str = "pdkernels_mine") -> Path:
    """Installs a package whose entry point is `module` in a new folder; returns that of its weights. Importing it fails."""
    info, folder = site / "mine-1.dist-info", site / "pdkernels_mine"
    for made in (info, folder):
        made.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{WEIGHTS_GROUP}]\nmine = {module}\n")
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(site))
    return folder


def install_smollm2(monkeypatch: pytest.MonkeyPatch, site: Path) -> Path:
    """Installs the package of this checkout, whether the environment has it or not. The folder of its weights."""
    install(monkeypatch, site, "pdkernels_smollm2")
    monkeypatch.syspath_prepend(str(ROOT / "packages/smollm2"))
    return ROOT / "packages/smollm2/pdkernels_smollm2"
