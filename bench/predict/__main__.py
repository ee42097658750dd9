"""``python -m bench.predict``: predicts the times of the kernels on a GPU from their machine code."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from bench.predict.device import DEVICES
from tests.harness.budgets import find_cuobjdump


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.predict",
        description="Predicted times of the kernels on a GPU, from their machine code, and how far they are from those that "
        "were measured. No GPU is needed.",
    )
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200")
    parser.add_argument(
        "--write", action="store_true", help="renew the tables in docs/gpu_proof.md; for the H200 alone"
    )
    options = parser.parse_args(arguments)
    if options.write and options.device != "h200":
        parser.error("--write: docs/gpu_proof.md has the H200's tables")
    if find_cuobjdump() is None:
        return _missing("cuobjdump was not found. It comes with the CUDA toolkit and with triton.")
    if importlib.util.find_spec("triton") is None:
        return _missing("triton was not found, which compiles the kernels. pip install triton")
    from bench.predict import ladder, tables
    from bench.predict.figures import measure

    figures = measure()
    if not figures["statistics"]:
        if options.write:
            return _missing("nvcc was not found, which compiles token statistics. It comes with the CUDA toolkit.")
        print("Token statistics are missing: nvcc was not found. It comes with the CUDA toolkit.", file=sys.stderr)
    table = tables.markdown(DEVICES[options.device], figures)
    if options.write:
        tables.write({"predict": table, "ladder": "\n".join(ladder.lines())})
    else:
        print(table)
    return 0


def _missing(what: str) -> int:
    print(f"bench.predict: {what}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
