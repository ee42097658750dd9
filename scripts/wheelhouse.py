"""Downloads the packages that a proof on a GPU needs on a machine without network, as wheels, into `wheelhouse/`.

    python scripts/wheelhouse.py 3.12 [--without torch triton numpy ...] [--only hypothesis ...] [--limit 64]

3.12: the Python version of the target. `--without`: packages that the target has, by default torch and triton. `--only`: the packages
that the target lacks, without their dependencies. `--limit`: maximum size of wheels and sources, in MiB. If the folder `wheelhouse/`
exists, `scripts/bootstrap.py` takes packages only from there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scripts.bootstrap import requirements  # noqa: E402

# pip takes a tag as it is: a wheel for an older system has to be named too.
SYSTEMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
SYSTEMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="version of Python on that machine, such as 3.12")
    parser.add_argument("--without", nargs="*", default=["torch", "triton"], metavar="NAME")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--limit", type=float, metavar="MIB")
    options = parser.parse_args()
    needed = {r.name: r.pin for r in requirements("gpu") if r.applies(options.python)}
    if unknown := [name for name in options.only if name not in needed]:
        sys.exit(f"wheelhouse: {', '.join(unknown)} is nothing that requirements.txt needs for a proof on a GPU.")
    pins = [
        pin for name, pin in needed.items() if (name in options.only if options.only else name not in options.without)
    ]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", options.python]
    target += [part for system in SYSTEMS for part in ("--platform", system)]
    target += ["--no-deps"] if options.only else []
    folder = ROOT / "wheelhouse"
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", *target, "-d", folder, *pins],
        check=True,
    )
    left_out = tuple(f"{name.replace('-', '_')}-" for name in options.without)
    for wheel in folder.glob("*.whl"):
        if wheel.name.startswith(left_out):  # another package asked for it
            wheel.unlink()
    report(sorted(folder.glob("*.whl"), key=size, reverse=True), options.limit)


def size(file: Path) -> int:
    return file.stat().st_size


def tracked() -> list[Path]:
    """The sources, as far as git knows or would take them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def report(wheels: list[Path], limit: float | None) -> None:
    """Prints their sizes, largest first, and ends the program if they are too large together with the sources."""
    own, all_sources = sum(map(size, wheels)) / 2**20, sum(map(size, tracked())) / 2**20
    print(
        f"wheelhouse: {len(wheels)} wheel{'s' * (len(wheels) != 1)}, {own:.1f} MiB; with the sources {own + all_sources:.1f} MiB"
    )
    if limit is not None and own + all_sources > limit:
        largest = ", ".join(f"{wheel.name.partition('-')[0]} {size(wheel) / 2**20:.1f}" for wheel in wheels[:5])
        sys.exit(
            f"wheelhouse: over the {limit:g} MiB of --limit. The largest wheels: {largest}. Name what is there: --without"
        )


if __name__ == "__main__":
    main()
