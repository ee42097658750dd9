"""Fetches what the tests and benchmarks need on a machine without network, as wheels into `wheelhouse/`.

    python scripts/wheelhouse.py 3.12 [--without torch triton numpy ...]

3.12: the Python there. `--without`: what is there already, by default torch and triton. Where the folder `wheelhouse/` exists,
`scripts/bootstrap.py` takes packages from it alone.
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
    options = parser.parse_args()
    wanted = [*requirements("test"), *requirements("bench")]
    pins = {r.pin: None for r in wanted if r.applies(options.python) and r.name not in options.without}
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", options.python]
    target += [part for system in SYSTEMS for part in ("--platform", system)]
    folder = ROOT / "wheelhouse"
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", *target, "-d", folder, *pins],
        check=True,
    )
    left_out = tuple(f"{name.replace('-', '_')}-" for name in options.without)
    for wheel in folder.glob("*.whl"):
        if wheel.name.startswith(left_out):  # another package asked for it
            wheel.unlink()
    wheels = sorted(folder.glob("*.whl"))
    print(f"wheelhouse: {len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
