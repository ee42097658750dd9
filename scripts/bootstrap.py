"""Makes a Python environment ready for this checkout and runs a Python command line in it.

    python scripts/bootstrap.py [ARGUMENTS OF PYTHON ...]

A Python that lies in a virtual environment is used as it is; for any other one `.venv` is made beside the Makefile.
Installs what `requirements.txt` names and the environment lacks, builds the compiled parts, and makes the checkout
importable from everywhere. With everything there it touches no network and takes about a second; where there is a folder
`wheelhouse`, packages come from it alone.
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
VERSION = re.search('"(.+)"', (ROOT / "pdkernels/_version.py").read_text()).group(1)

# Runs in the environment. The folder it runs in is not the checkout, whose own files would look installed.
PROBE = """
import importlib.metadata as metadata, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
own = version("pdkernels") and metadata.distribution("pdkernels").read_text("direct_url.json")
print(json.dumps({
    "python": "%d.%d.%d" % sys.version_info[:3], "pdkernels": version("pdkernels"), "source": json.loads(own or "{}"),
    "packages": {name: version(name) for name in sys.argv[1:]},
}))
"""


def fail(sentence: str) -> None:
    sys.exit(f"pdkernels: {sentence}")


def say(text: str) -> None:
    print(f"pdkernels: {text}", flush=True)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


class Requirement:
    """One line of requirements.txt: `name==pin; marker  # [oldest]`."""

    def __init__(self, pin: str, marker: str, oldest: str) -> None:
        self.pin, self.marker, self.oldest = pin, marker, numbers(oldest)
        self.name = pin.partition("==")[0]

    def applies(self, python: str) -> bool:
        # Markers are Python expressions; as text, "3.10" and up compare rightly.
        facts = {
            "python_version": ".".join(python.split(".")[:2]),
            "sys_platform": sys.platform,
            "platform_machine": os.uname().machine,
        }
        return not self.marker or bool(eval(self.marker, {"__builtins__": {}}, facts))


def requirements() -> list[Requirement]:
    line = re.compile(r"(?P<pin>[\w.-]+==[\w.]+)\s*(?:;(?P<marker>[^#]+))?\s*#\s*\[(?P<oldest>[\d.]+)\]")
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    found = [line.match(text) for text in lines if text and not text.startswith("#")]
    return [Requirement(m["pin"], (m["marker"] or "").strip(), m["oldest"]) for m in found]


def probe(python: Path) -> dict:
    names = [requirement.name for requirement in requirements()]
    answer = subprocess.run([str(python), "-c", PROBE, *names], cwd="/", capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        fail(f"{python} does not run: {answer.stderr.strip()}")
    return json.loads(answer.stdout)


def lacking(facts: dict) -> list[Requirement]:
    def there(requirement: Requirement) -> bool:
        version = facts["packages"][requirement.name]
        return version is not None and numbers(version) >= requirement.oldest

    return [r for r in requirements() if r.applies(facts["python"]) and not there(r)]


def environment() -> Path:
    """The Python to use. Not resolved: the way to it is what makes a virtual environment."""
    here = Path(sys.executable)
    if sys.prefix != sys.base_prefix:
        return here
    python = ROOT / ".venv/bin/python"
    if python.exists():
        version = probe(python)["python"]
        if numbers(version)[:2] != sys.version_info[:2]:
            fail(f".venv holds Python {version}, but PYTHON is {here}. Remove .venv, or leave PYTHON out.")
        return python
    torch = probe(here)["packages"]["torch"]
    shared = torch is not None and numbers(torch) >= (2, 11)
    say(f"making .venv{f', with torch {torch} as installed for {here}' if shared else ''}")
    options = ["--clear", "--system-site-packages"] if shared else ["--clear"]
    made = subprocess.run(
        [str(here), "-m", "venv", *options, str(ROOT / ".venv")], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        shutil.rmtree(ROOT / ".venv", ignore_errors=True)
        fail(
            f"no virtual environment could be made. Debian and Ubuntu need: apt-get install python3-venv\n{made.stdout}{made.stderr}"
        )
    return python


def pip(python: Path, *arguments: str) -> None:
    """Runs pip: on a terminal its current step in one line, in a log nothing; all it said if it fails."""
    if subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=False).returncode != 0:
        subprocess.run([str(python), "-m", "ensurepip"], capture_output=True, check=False)
    offline = ["--no-index", "--find-links", str(WHEELHOUSE)] if WHEELHOUSE.is_dir() else []
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", *offline, *arguments]
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


def install(python: Path) -> None:
    """torch first: its CUDA builds bring their own triton, which then is there already."""
    facts = probe(python)
    for group in ("torch", None):
        missing = [r.pin for r in lacking(facts) if group in (None, r.name)]
        if not missing:
            continue
        say(f"installing {', '.join(missing)}")
        start = time.monotonic()
        pip(python, *missing)
        say(f"installed in {time.monotonic() - start:.0f} s")
        facts = probe(python)


def build(python: Path) -> None:
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


def register(python: Path) -> None:
    """An editable install, unless this checkout in this version is installed so already."""
    facts = probe(python)
    editable = facts["source"].get("dir_info", {}).get("editable", False)
    if editable and facts["source"].get("url") == ROOT.as_uri() and facts["pdkernels"] == VERSION:
        return
    pip(python, "--no-deps", "--no-build-isolation", "--editable", ".")
    say(f"this checkout is what `import pdkernels` finds in {python.parent.parent}")


def main() -> None:
    python = environment()
    install(python)
    build(python)
    register(python)
    if sys.argv[1:]:
        os.execv(python, [str(python), *sys.argv[1:]])


if __name__ == "__main__":
    main()
