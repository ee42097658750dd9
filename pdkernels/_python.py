"""Checks that this install serves the running Python: a wheel carries one host module per Python version."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("._host", __package__) is None:
    _there = sorted(path.name.split(".")[1] for path in Path(__file__).parent.glob("_host.*.so"))
    _built = (
        f"for Python {sys.version_info[0]}.{sys.version_info[1]}, only for {', '.join(_there)}" if _there else "yet"
    )
    raise ImportError(
        f"pdkernels: the compiled module _host was not built {_built}. Build it with: pip install . (or: python setup.py build_ext --inplace)"
    )
