"""Tensor ops, one file a family."""

from typing import TYPE_CHECKING

from pdkernels._renamed import renamed
from pdkernels.ops.block_sparse_attention import block_sparse_attention
from pdkernels.ops.feature_cache import add_cached_rows_, gather_rows, select_stale_rows_
from pdkernels.ops.kv_cache import kv_append_, kv_commit_, kv_trim_
from pdkernels.ops.linear_token_statistics import linear_token_statistics
from pdkernels.ops.log_step import log_step_
from pdkernels.ops.logit_divergence import LogitDivergence, logit_divergence
from pdkernels.ops.recurrence import RecurrenceExit, recurrence_advance_, recurrence_exit, recurrence_inject
from pdkernels.ops.speculative_attention import speculative_attention, speculative_attention_append_
from pdkernels.ops.token_statistics import TokenStatistics, token_statistics
from pdkernels.ops.transformer_ops import add_rms_norm, apply_rope_, apply_rope_append_, silu_and_mul
from pdkernels.ops.unmask import Unmasked, unmask_
from pdkernels.ops.verify_draft import DraftVerdict, verify_draft

__all__ = [
    "DraftVerdict",
    "LogitDivergence",
    "RecurrenceExit",
    "TokenStatistics",
    "Unmasked",
    "add_cached_rows_",
    "add_rms_norm",
    "apply_rope_",
    "apply_rope_append_",
    "block_sparse_attention",
    "gather_rows",
    "kv_append_",
    "kv_commit_",
    "kv_trim_",
    "linear_token_statistics",
    "log_step_",
    "logit_divergence",
    "recurrence_advance_",
    "recurrence_exit",
    "recurrence_inject",
    "select_stale_rows_",
    "silu_and_mul",
    "speculative_attention",
    "speculative_attention_append_",
    "token_statistics",
    "unmask_",
    "verify_draft",
]

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
