"""Kernels for parallel decoding of language models.

``import pdkernels as pd``: ops at the top level, KV caches in `pd.cache`, decoders in `pd.decoding`, models in `pd.models`,
slow and obvious references in `pd.reference`.
"""

from pdkernels import cache, decoding, masks, models, ops, reference
from pdkernels._native import has_native
from pdkernels.config import __version__, show_config
from pdkernels.ops import (
    DraftVerdict,
    LogitDrift,
    RecurrenceExit,
    TokenStatistics,
    add_rms_norm,
    block_sparse_attention,
    kv_append_,
    kv_commit_,
    kv_trim_,
    linear_token_statistics,
    logit_drift,
    recurrence_advance_,
    recurrence_exit,
    recurrence_inject,
    rotate_append_,
    silu_gate,
    speculative_attention,
    token_statistics,
    verify_draft,
)

__all__ = [
    "DraftVerdict",
    "LogitDrift",
    "RecurrenceExit",
    "TokenStatistics",
    "__version__",
    "add_rms_norm",
    "block_sparse_attention",
    "cache",
    "decoding",
    "has_native",
    "kv_append_",
    "kv_commit_",
    "kv_trim_",
    "linear_token_statistics",
    "logit_drift",
    "masks",
    "models",
    "ops",
    "recurrence_advance_",
    "recurrence_exit",
    "recurrence_inject",
    "reference",
    "rotate_append_",
    "show_config",
    "silu_gate",
    "speculative_attention",
    "token_statistics",
    "verify_draft",
]
