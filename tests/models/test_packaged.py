"""Weights in other packages: located by entry points, never imported, and asked for where they are missing."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pdkernels as pd
from pdkernels import cli
from pdkernels.models.checkpoints import packaged
from pdkernels.models.checkpoints.packaged import weight_folder, weight_folders
from tests.support import weights

NAMES = ("smollm2-dflash", "smollm2-drafter", "smollm2-eagle")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package of weights is installed."""
    monkeypatch.setattr(packaged, "entry_points", lambda group: ())


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("name", NAMES)
def test_missing_weights_are_one_sentence_at_every_door(name: str) -> None:
    model: Any = pd.models.load("tiny-code")
    remedy = "`pip install pdkernels-smollm2`, or in a checkout `pip install packages/smollm2`"
    sentence = f"{name} is in a package of its own: {remedy}."
    for door in (
        lambda: pd.models.load("tiny-code", drafter=name),
        lambda: pd.models.load_drafter(name, model),
        lambda: pd.decoding.generate(model, "import o", "eagle", drafter=name),
    ):
        with pytest.raises(ImportError) as caught:
            door()
        assert str(caught.value) == f"pdkernels.models.load: {sentence}"
    result = CliRunner().invoke(cli.app, ["generate", "--model", "tiny-code", "--prompt", "x", "--drafter", name])
    assert result.exit_code == 2 and sentence in result.stderr and "Traceback" not in result.stderr


@pytest.mark.usefixtures("bare")
def test_a_path_is_a_folder_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert weight_folder(Path(NAMES[0])) == Path(NAMES[0]) and weight_folder("./mine") == Path("./mine")


def test_the_package_of_the_checkout_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights.install_smollm2(monkeypatch, tmp_path)
    project = (weights.ROOT / "packages/smollm2/pyproject.toml").read_text()
    group = rf'\[project.entry-points."{re.escape(packaged.WEIGHTS_GROUP)}"\]\nsmollm2 = "{folder.name}"\n'
    assert re.search(group, project) and f'name = "{packaged._WEIGHTS_PACKAGES[NAMES[0]]}"' in project
    assert tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and "_" not in path.name)) == NAMES
    assert tuple(sorted(packaged._WEIGHTS_PACKAGES)) == NAMES
    assert set(pd.models.available_drafters()) >= {"smollm2-dflash", "smollm2-eagle"}
    assert set(weight_folders("adapter_config.json")) >= {"smollm2-drafter"}
    assert [weight_folder(name).name for name in NAMES] == list(NAMES)


@pytest.mark.parametrize(
    "value",
    [
        "os:system",
        "pdkernels_mine:run",
        "pdkernels_mine.__init__",
        "../pdkernels_mine",
        "no_such_module",
        "json",
        "a b",
        "",
    ],
)
def test_entry_points_that_name_no_package_are_nothing(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weight_folders("config.json")
    folder = weights.install(monkeypatch, tmp_path, value)
    (folder / "mine").mkdir()
    (folder / "mine/config.json").write_text("{}")
    assert weight_folders("config.json") == before


def test_a_package_of_weights_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weights.install(monkeypatch, tmp_path)  # fails if it is
    (folder / "mine").mkdir()
    (folder / "mine/config.json").write_text("{}")
    assert weight_folder("mine") == folder / "mine" and "mine" in pd.models.available_drafters()
    with pytest.raises(RuntimeError, match="imported"):
        importlib.import_module(folder.name)
