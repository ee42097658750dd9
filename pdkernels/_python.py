"""Checks that this install serves the running Python and its torch: a wheel carries one host module per Python version."""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from pdkernels._early_answers import is_command


def _refuse(sentence: str) -> None:
    """The command line, of which `doctor` is asked just then, says it without a traceback."""
    if is_command(sys.orig_argv):
        sys.exit(f"error: {sentence}")
    raise ImportError(sentence)


if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
    _refuse(
        f"pdkernels: torch 2.11 or newer is needed, but {torch.__version__} is installed. Run: pip install 'torch>=2.11'"
    )
if find_spec("._host", __package__) is None:
    _there = sorted(path.name.split(".")[1] for path in Path(__file__).parent.glob("_host.*.so"))
    _built = (
        f"for Python {sys.version_info[0]}.{sys.version_info[1]}, only for {', '.join(_there)}" if _there else "yet"
    )
    _refuse(
        f"pdkernels: the compiled module _host was not built {_built}. Build it with: pip install . (or: python setup.py build_ext --inplace)"
    )
