"""Plain PyTorch references that define the results of every op and decoder. They import nothing of pdkernels.

Each is a module of its own, which is loaded when it is first named: `pdkernels.reference.jacobi`.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

_MODULES = sorted(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
