"""transformers' own tests of models and generation, with PyTorch's attention and with ours.

    python scripts/transformers_tests.py CHECKOUT [--models qwen3 llama ...] [--tests generate] [--out FILE]

CHECKOUT is a source tree of transformers at (about) the version that is installed: its `tests/models/<m>/test_modeling_<m>.py` holds
the generation tests of tests/generation/test_utils.py for that model. Each file runs twice: as it is, and with our attention and masks
registered as "sdpa", so that whatever asks for sdpa, by name or by default, gets ours. Tests that need a network, a GPU or another
package skip or fail in both. Prints for each model how many tests pass with sdpa, how many of those with ours, and the names of the others.
Needs pytest, parameterized and whatever else the tests import.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MODELS = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "gemma3")
OURS = "PDKERNELS_STANDS_FOR_SDPA"


def pytest_configure() -> None:
    """pytest calls this since the file is also the plugin of the second run."""
    if not os.environ.get(OURS):
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    from pdkernels.integrations.transformers import register

    register()
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface.register("sdpa", interface()["pdkernels"])


def outcomes(checkout: Path, model: str, chosen: str | None, ours: bool) -> dict[str, str]:
    """The outcome of each test: passed, failed or skipped."""
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parent), str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {OURS: "1"} if ours else {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", here.stem, f"--junitxml={report}", "-o", "addopts="]
        command += ["-k", chosen] if chosen else []
        command += [f"tests/models/{model}/test_modeling_{model}.py"]
        ran = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if not report.exists() or "error during collection" in ran.stdout:
            sys.exit(f"pytest did not run {model}:\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[f"{case.get('classname')}::{case.get('name')}"] = state
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--tests", help="as pytest's -k; by default all")
    parser.add_argument("--out", type=Path, help="write all outcomes as JSON")
    options = parser.parse_args()
    everything = {}
    print("| model | pass with sdpa | of these with ours |\n|---|---|---|", flush=True)
    others = []
    for model in options.models:
        theirs, ours = (outcomes(options.checkout, model, options.tests, flag) for flag in (False, True))
        passed = [name for name, state in theirs.items() if state == "passed"]
        kept = [name for name in passed if ours.get(name) == "passed"]
        print(f"| {model} | {len(passed)} | {len(kept)} |", flush=True)
        others += [name for name in passed if name not in kept]
        everything[model] = {"sdpa": theirs, "pdkernels": ours}
        if options.out:
            options.out.write_text(json.dumps(everything, indent=1))
    print("\n".join(["", "pass with sdpa, not with ours:", *(others or ["none"])]))


if __name__ == "__main__":
    main()
