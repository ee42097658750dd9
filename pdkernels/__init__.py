"""Kernels for parallel decoding of language models.

``import pdkernels as pd``: ops at the top level, KV caches in `pd.cache`, decoders in `pd.decoding`, models in `pd.models`,
slow and obvious references in `pd.reference`.
"""

from typing import TYPE_CHECKING

from pdkernels import cache, decoding, masks, models, ops, reference
from pdkernels._native import has_native
from pdkernels._renamed import renamed
from pdkernels.config import __version__, show_config
from pdkernels.ops import (
    DraftVerdict,
    LogitDivergence,
    RecurrenceExit,
    TokenStatistics,
    Unmasked,
    add_cached_rows_,
    add_rms_norm,
    apply_rope_,
    apply_rope_append_,
    block_sparse_attention,
    gather_rows,
    kv_append_,
    kv_commit_,
    kv_trim_,
    linear_token_statistics,
    log_step_,
    logit_divergence,
    recurrence_advance_,
    recurrence_exit,
    recurrence_inject,
    select_stale_rows_,
    silu_and_mul,
    speculative_attention,
    speculative_attention_append_,
    token_statistics,
    unmask_,
    verify_draft,
)

__all__ = [
    "DraftVerdict",
    "LogitDivergence",
    "RecurrenceExit",
    "TokenStatistics",
    "Unmasked",
    "__version__",
    "add_cached_rows_",
    "add_rms_norm",
    "apply_rope_",
    "apply_rope_append_",
    "block_sparse_attention",
    "cache",
    "decoding",
    "gather_rows",
    "has_native",
    "kv_append_",
    "kv_commit_",
    "kv_trim_",
    "linear_token_statistics",
    "log_step_",
    "logit_divergence",
    "masks",
    "models",
    "ops",
    "recurrence_advance_",
    "recurrence_exit",
    "recurrence_inject",
    "reference",
    "select_stale_rows_",
    "show_config",
    "silu_and_mul",
    "speculative_attention",
    "speculative_attention_append_",
    "token_statistics",
    "unmask_",
    "verify_draft",
]

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
