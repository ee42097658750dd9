"""transformers' own tests of models and generation, with PyTorch's attention and with ours.

    python scripts/transformers_tests.py [SOURCE] [--models qwen3 llama ...] [--tests generate] [--out FILE]

SOURCE is a source tree of transformers, as a folder or as the path or address of a tarball; by default the tag of the version that is
installed. (An sdist lacks the tests of models.) `tests/models/<m>/test_modeling_<m>.py` holds the generation tests of
tests/generation/test_utils.py for that model. The files run twice: as they are, and with our attention and masks registered as "sdpa",
so that whatever asks for sdpa, by name or by default, gets ours. Tests that need a network, a GPU or another package skip or fail in
both. Prints for each model how many tests pass with sdpa, how many of those with ours, and the names of the others with their errors.
FILE gets the same as JSON; models of an earlier run with the same versions and choice stay in it. `python -m bench.report --write`
makes the table of docs/transformers_tests.md from bench/results/transformers_tests.json.
Needs pytest, parameterized and whatever else the tests import.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODELS = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "gemma3")
OURS = "PDKERNELS_STANDS_FOR_SDPA"
TAG = "https://github.com/huggingface/transformers/archive/refs/tags/v{}.tar.gz"


def pytest_configure() -> None:
    """pytest calls this since the file is also the plugin of the second run."""
    if not os.environ.get(OURS):
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    from pdkernels.integrations.transformers import register

    register()
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface.register("sdpa", interface()["pdkernels"])


def tree_of(source: str, temporary: Path) -> Path:
    """The folder of a source tree, unpacked into `temporary` if it is a tarball."""
    if Path(source).is_dir():
        return Path(source)
    path = source if Path(source).exists() else urllib.request.urlretrieve(source, temporary / "source.tar.gz")[0]
    with tarfile.open(path) as archive:
        archive.extractall(temporary / "unpacked", filter="data")
    (tree,) = (temporary / "unpacked").iterdir()
    return tree


def version_of(tree: Path) -> str:
    """What its setup.py names."""
    named = re.search(r'^ *version="([^"]+)"', (tree / "setup.py").read_text(), re.MULTILINE)
    return named[1] if named else tree.name


def outcomes(tree: Path, models: Sequence[str], chosen: str | None, ours: bool) -> dict[str, dict[str, str]]:
    """What became of each test of each model: "passed", "skipped", or its error in one line."""
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parent), str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {OURS: "1"} if ours else {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", here.stem, f"--junitxml={report}", "-o", "addopts="]
        command += ["-k", chosen] if chosen else []
        command += [f"tests/models/{model}/test_modeling_{model}.py" for model in models]
        ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if not report.exists() or "error during collection" in ran.stdout:
            sys.exit(f"pytest did not run {' '.join(models)}:\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[str, dict[str, str]] = {model: {} for model in models}
    for case in cases:
        ends = {child.tag: (child.get("message") or "").strip().split("\n")[0][:160] for child in case}
        error = ends.get("failure", ends.get("error"))
        module, _, group = case.get("classname", "").rpartition(".")
        state = error or "failed" if error is not None else "skipped" if "skipped" in ends else "passed"
        found[module.rpartition("test_modeling_")[2]][f"{group}::{case.get('name')}"] = state
    return found


def compared(theirs: dict[str, str], ours: dict[str, str]) -> dict[str, Any]:
    """How many tests of a model pass with sdpa, how many of these with ours, and the errors of the others."""
    passed = [name for name, state in theirs.items() if state == "passed"]
    others = {name: ours.get(name, "not run") for name in passed if ours.get(name) != "passed"}
    return {"sdpa": len(passed), "pdkernels": len(passed) - len(others), "others": others}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    installed = version("transformers")
    parser.add_argument("source", nargs="?", default=TAG.format(installed))
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--tests", help="as pytest's -k; by default all")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        tree = tree_of(options.source, Path(temporary))
        facts = {
            "transformers": installed,
            "tests": version_of(tree),
            "torch": version("torch"),
            "chosen": options.tests,
        }
        before = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
        models = before.pop("models", {})
        found: dict[str, Any] = {**facts, "models": models if before == facts else {}}
        theirs, ours = (outcomes(tree, options.models, options.tests, flag) for flag in (False, True))
        print("| model | pass with sdpa | of these with ours |\n|---|---|---|")
        for model in options.models:
            one = found["models"][model] = compared(theirs[model], ours[model])
            print(f"| {model} | {one['sdpa']} | {one['pdkernels']} |")
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    others = [f"{m}: {name}: {e}" for m, one in found["models"].items() for name, e in one["others"].items()]
    print("\n".join(["", "pass with sdpa, not with ours:", *(others or ["none"])]))


if __name__ == "__main__":
    main()
