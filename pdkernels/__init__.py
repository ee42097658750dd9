"""Kernels for parallel decoding of language models.

``import pdkernels as pd``: ops at the top level, KV caches in `pd.cache`, decoders in `pd.decoding`, continuous
batching by `pd.Engine`, models in `pd.models`, slow and simple references in `pd.reference`.
"""

import pdkernels._early_answers  # noqa: F401  it may answer and end here
from pdkernels import _python as _python
from pdkernels import cache as cache
from pdkernels import decoding as decoding
from pdkernels import masks as masks
from pdkernels import models as models
from pdkernels import ops as ops
from pdkernels import reference as reference
from pdkernels._native import has_native as has_native
from pdkernels.config import __version__ as __version__
from pdkernels.config import show_config as show_config
from pdkernels.engine import Engine as Engine
from pdkernels.ops import *  # noqa: F403

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
