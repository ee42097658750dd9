"""``python -m bench.predict``: predicts the times of the kernels on a GPU from their machine code."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from bench.predict.model import DEVICES, cut_slots, markdown, region_slots
from tests.harness.budgets import find_cuobjdump


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.predict",
        description="Predicted times of the kernels on a GPU, from their machine code. No GPU is needed.",
    )
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200")
    device = DEVICES[parser.parse_args(arguments).device]
    if find_cuobjdump() is None:
        return _missing("cuobjdump was not found. It comes with the CUDA toolkit and with triton.")
    if importlib.util.find_spec("triton") is None:
        return _missing("triton was not found, which compiles the kernels. pip install triton")
    from bench.predict.loop_figures import measure

    slots = region_slots()
    print(f"Predicted for an {device.name}, not measured.\n\n{markdown(device, measure(), slots, cut_slots())}")
    if slots is None:
        print("\nToken statistics are missing: nvcc was not found. It comes with the CUDA toolkit.", file=sys.stderr)
    return 0


def _missing(what: str) -> int:
    print(f"bench.predict: {what}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
