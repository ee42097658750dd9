"""Kernels for parallel decoding of language models.

``import pdkernels as pd``: ops at the top level, KV caches in `pd.cache`, decoders in `pd.decoding`, continuous
batching by `pd.Engine`, models in `pd.models`, slow and simple references in `pd.reference`.
"""

import typing as _typing

import pdkernels._early_answers  # noqa: F401  it may answer and end here
from pdkernels import _python as _python
from pdkernels import cache as cache
from pdkernels import masks as masks
from pdkernels import ops as ops
from pdkernels import reference as reference
from pdkernels._native import has_native as has_native
from pdkernels.config import __version__ as __version__
from pdkernels.config import show_config as show_config
from pdkernels.ops import *  # noqa: F403

if _typing.TYPE_CHECKING:
    from pdkernels import decoding as decoding
    from pdkernels import models as models
    from pdkernels.engine import Engine as Engine

_OTHERS = (
    "Engine",
    "__version__",
    "cache",
    "decoding",
    "has_native",
    "masks",
    "models",
    "ops",
    "reference",
    "show_config",
)
# As in `pdkernels.ops`: not through its name.
vars()["__all__"] = [*_OTHERS, *vars(ops)["__all__"]]

_ON_DEMAND = {"decoding": "decoding", "models": "models", "Engine": "engine"}
"""Names and their modules, which are imported when they are used: ops alone need a third of the time."""

if not _typing.TYPE_CHECKING:  # a type checker would take it for a module in which every name exists

    def __getattr__(name: str) -> object:
        if name not in _ON_DEMAND:
            raise AttributeError(f"module 'pdkernels' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(f"pdkernels.{_ON_DEMAND[name]}")
        value = module if name == _ON_DEMAND[name] else getattr(module, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_ON_DEMAND})
