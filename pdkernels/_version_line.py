"""``pdkernels --version`` and ``python -m pdkernels --version`` answer without loading torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pdkernels._version import __version__

LINE = f"pdkernels {__version__}"


def asks_for_version(command: Sequence[str]) -> bool:
    """Whether a command line asks for the version and nothing else.

    >>> asks_for_version(["python", "-m", "pdkernels", "--version"])
    True
    >>> asks_for_version(["python", "/bin/pdkernels", "--version"])
    True
    >>> asks_for_version(["python", "my.py", "pdkernels", "--version"])
    False
    """
    script = len(command) == 3 and os.path.basename(command[1]).removesuffix(".exe") == "pdkernels"
    return command[-1:] == ["--version"] and (script or command[-3:-1] == ["-m", "pdkernels"])


if asks_for_version(sys.orig_argv):
    print(LINE)
    sys.exit(0)
