"""Rehearses a release: everything that the release workflow and a first user will do, before the tag is pushed.

    python scripts/release_check.py                       # what is to do before the tag, then builds, checks, installs and tries
    python scripts/release_check.py --tag v0.2.0 --facts  # version, changelog and README alone, for that tag: the workflow's first job
    python scripts/release_check.py --dist FOLDER         # whether a folder holds all that is published, as the workflow's last job asks
    python scripts/release_check.py --notes               # the notes of the release, from CHANGELOG.md

The first form needs pip, setuptools, twine and a compiler (`make release-check` sees to that). It builds the sdist, a wheel from the
sdist, and the wheel of pdkernels-smollm2; installs that wheel with the pinned torch in a fresh environment; and there, without a
compiler on the PATH, runs the Python of the README, `make demo`'s command and `pdkernels doctor`. The index that pip is set up with
chooses the build of torch: with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu it is one of 200 MB, else one for CUDA.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
LARGEST_WHEEL = 25_000_000  # bytes
SCREEN = 45  # lines of a release's notes, at most
# CPU seconds for `import pdkernels` where torch is imported already, and for `pdkernels --help` beyond Python's own.
IMPORT_SECONDS, HELP_SECONDS = 0.4, 0.6
DEMO = ["generate", "--model", "tiny-trimode", "--method", "autoregressive", "--method", "linear_self_speculation"]
DEMO += ["--block-size", "16", "--check", "--prompt", "482 + 967 = ?"]
TIMES_IMPORT = """
import time, torch
start = time.process_time()
import pdkernels
print(time.process_time() - start)
"""


def fail(sentence: str) -> NoReturn:
    sys.exit(f"release-check: {sentence}")


def read(file: str, pattern: str) -> str:
    """The group of a pattern in a file of the checkout."""
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    return match[1] if match else fail(f"{file} has no {pattern}")


def version() -> str:
    return read("pdkernels/_version.py", '"(.+)"')


def section(changelog: str, number: str) -> tuple[str, str]:
    """Heading and text of a version in CHANGELOG.md, both empty if there is none.

    >>> section("# Changelog\\n\\n## 0.2.0 (unreleased)\\n\\nNew.\\n\\n## 0.2.0 in detail\\n\\nLong.\\n", "0.2.0")
    ('0.2.0 (unreleased)', 'New.')
    """
    match = re.search(rf"^## ({re.escape(number)} \([^\n]+\))\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return (match[1], match[2].strip()) if match else ("", "")


def to_do(number: str) -> Iterator[str]:
    """What has to change before `number` is tagged, a sentence each."""
    if (found := version()) != number:
        yield f"pdkernels/_version.py has the version {found}, not {number}."
    recipe = read("scripts/conda/recipe.yaml", r'version: "(.+)"')
    if recipe != number:
        yield f"scripts/conda/recipe.yaml has the version {recipe}, not {number}."
    heading, text = section((ROOT / "CHANGELOG.md").read_text(), number)
    if not re.fullmatch(rf"{re.escape(number)} \(\d{{4}}-\d\d-\d\d\)", heading):
        yield f"CHANGELOG.md has no heading '## {number} (YYYY-MM-DD)'{f', but {heading!r}' if heading else ''}."
    if heading and not 0 < len(text.splitlines()) <= SCREEN:
        yield f"The notes of {number} in CHANGELOG.md have {len(text.splitlines())} lines: a screen is {SCREEN}."
    for page in ("README.md", "docs/index.md"):
        if "pip install pdkernels" not in (ROOT / page).read_text():
            yield f"{page} does not say: pip install pdkernels"
    if changed := run("git", "status", "--porcelain", cwd=ROOT).splitlines():
        yield f"{len(changed)} files differ from the last commit: {', '.join(line[3:] for line in changed[:3])}."


def incomplete(folder: Path, number: str) -> Iterator[str]:
    """What a folder lacks of a release, or holds beside it, a sentence each."""
    wanted = {
        "the sdist": rf"pdkernels-{re.escape(number)}\.tar\.gz",
        "the wheel for x86-64": rf"pdkernels-{re.escape(number)}-py3-none-.*manylinux_2_28_x86_64.*\.whl",
        "the wheel for arm64": rf"pdkernels-{re.escape(number)}-py3-none-.*manylinux_2_28_aarch64.*\.whl",
        "the wheel of pdkernels-smollm2": r"pdkernels_smollm2-[\d.]+-py3-none-any\.whl",
    }
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for name, pattern in wanted.items():
        if not any(re.fullmatch(pattern, path.name) for path in files):
            yield f"{name} is missing in {folder}."
    for path in files:
        if not any(re.fullmatch(pattern, path.name) for pattern in wanted.values()):
            yield f"{path} is no part of the release {number}."
        if path.suffix == ".whl" and path.stat().st_size >= LARGEST_WHEEL:
            yield f"{path.name} has {path.stat().st_size / 1e6:.1f} MB, and at most {LARGEST_WHEEL / 1e6:.0f} are wanted."


def run(*command: object, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """Its output; if it fails the rehearsal ends with that."""
    arguments = [str(part) for part in command]
    answer = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        fail(f"{' '.join(arguments)} failed:\n{answer.stdout}{answer.stderr}")
    return answer.stdout


class Rehearsal:
    """In a folder of its own, so that nothing of the checkout can be found by accident."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dist = folder, folder / "dist"
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)

    def build(self) -> None:
        """The sdist, a wheel of what is in it, and the drafters' wheel."""
        # Leftovers of setuptools stay out of the checkout.
        (self.folder / "extra.cfg").write_text(f"[egg_info]\negg_base = {self.folder}\n")
        settings = os.environ | {"DIST_EXTRA_CONFIG": str(self.folder / "extra.cfg")}
        run(sys.executable, "setup.py", "-q", "sdist", "-d", self.dist, cwd=ROOT, environment=settings)
        (sdist,) = self.dist.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(self.folder / "sources", filter="data")
        (sources,) = (self.folder / "sources").iterdir()
        self.say(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
        command += ["--no-build-isolation", "--wheel-dir", str(self.dist)]
        settings = os.environ | {"PDKERNELS_BUILD_CUDA": "0"}  # as in the container of the workflow
        run(*command, sources, sources / "packages/smollm2", environment=settings)
        for wheel in sorted(self.dist.glob("*.whl")):
            size = wheel.stat().st_size
            self.say(f"{wheel.name}: {size / 1e6:.1f} MB")
            if size >= LARGEST_WHEEL:
                fail(f"{wheel.name} is larger than {LARGEST_WHEEL / 1e6:.0f} MB")

    def check(self) -> None:
        run(sys.executable, "-m", "twine", "check", "--strict", *sorted(self.dist.iterdir()))
        self.say("twine check --strict: passed")

    def install(self) -> None:
        """A fresh environment with the wheel and what it pulls. The command line needs its extra."""
        run(sys.executable, "-m", "venv", self.folder / "venv")
        (wheel,) = self.dist.glob("pdkernels-*.whl")
        command = [self.folder / "venv/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        torch = read("requirements.txt", r"^(torch==\S+)")
        run(*command, torch, f"{wheel}[cli]", cwd=self.folder)
        self.say(f"installed in a fresh environment, with {torch}")

    def try_it(self) -> None:
        """As a first user, with nothing on the PATH but the environment."""
        bin_ = self.folder / "venv/bin"
        alone = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR")}
        alone["PATH"] = str(bin_)
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
        printed = run(bin_ / "python", "-c", "\n".join(blocks), cwd=self.folder, environment=alone)
        if "1449" not in printed:
            fail(f"the README's example works out 482 + 967 as {printed!r}")
        self.say(f"the README's Python: {' '.join(printed.split())}")
        run(bin_ / "pdkernels", *DEMO, cwd=self.folder, environment=alone)
        if version() not in run(bin_ / "pdkernels", "doctor", cwd=self.folder, environment=alone):
            fail("pdkernels doctor does not name the version")
        self.say("make demo's command and pdkernels doctor: run")
        seconds = min(
            float(run(bin_ / "python", "-c", TIMES_IMPORT, cwd=self.folder, environment=alone)) for _ in range(5)
        )
        helped, bare = (
            min(self.cpu_seconds(bin_ / command[0], *command[1:], environment=alone) for _ in range(5))
            for command in (("pdkernels", "--help"), ("python", "-c", "pass"))
        )
        self.say(f"import: {seconds:.2f} s of CPU beyond torch; pdkernels --help: {helped - bare:.2f} s beyond Python")
        if seconds > IMPORT_SECONDS or helped - bare > HELP_SECONDS:
            fail(f"at most {IMPORT_SECONDS} s and {HELP_SECONDS} s are wanted")

    def cpu_seconds(self, *command: object, environment: dict[str, str]) -> float:
        """Of a command: other processes on the machine hardly change them."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*command, cwd=self.folder, environment=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="such as v0.2.0; by default the version in pdkernels/_version.py without .dev")
    parser.add_argument("--facts", action="store_true", help="check version, changelog and README, and build nothing")
    parser.add_argument("--dist", type=Path, metavar="FOLDER", help="check that this folder holds the whole release")
    parser.add_argument("--notes", action="store_true", help="print the notes of the release")
    arguments = parser.parse_args()
    number = (arguments.tag or re.sub(r"\.dev\d+$", "", version())).removeprefix("v")
    if arguments.notes:
        print(section((ROOT / "CHANGELOG.md").read_text(), number)[1] or fail(f"CHANGELOG.md has no {number}"))
        return
    if arguments.dist:
        faults = list(incomplete(arguments.dist, number))
    else:
        faults = list(to_do(number))
    print("\n".join([f"Before v{number} can be published:", *(f"  - {fault}" for fault in faults)]) if faults else "")
    if arguments.facts or arguments.dist or (faults and arguments.tag):
        sys.exit(1 if faults else 0)
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = Rehearsal(Path(folder))
        for step in (rehearsal.build, rehearsal.check, rehearsal.install, rehearsal.try_it):
            step()
    print(f"Rehearsed. {f'{len(faults)} things are to do before the tag: see above.' if faults else 'Ready to tag.'}")


if __name__ == "__main__":
    main()
