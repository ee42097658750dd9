"""Tensor ops, one file per family. What a family's ``__all__`` names is public here and in `pdkernels`."""

# ruff: noqa: F403
import types as _types

from pdkernels.ops.block_sparse_attention import *
from pdkernels.ops.draft_lengths import *
from pdkernels.ops.feature_cache import *
from pdkernels.ops.filter_logits import *
from pdkernels.ops.grouped_linear import *
from pdkernels.ops.kv_cache import *
from pdkernels.ops.linear import *
from pdkernels.ops.linear_token_statistics import *
from pdkernels.ops.log_step import *
from pdkernels.ops.logit_divergence import *
from pdkernels.ops.lookup_draft import *
from pdkernels.ops.quantized_linear import *
from pdkernels.ops.recurrence import *
from pdkernels.ops.recurrent_state import *
from pdkernels.ops.speculative_attention import *
from pdkernels.ops.token_statistics import *
from pdkernels.ops.transformer_ops import *
from pdkernels.ops.unmask import *
from pdkernels.ops.verify_draft import *

# Not through its name: a type checker treats a list that it cannot evaluate as empty.
vars()["__all__"] = sorted(
    name for name, value in vars().items() if name[0] != "_" and not isinstance(value, _types.ModuleType)
)
