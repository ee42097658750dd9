"""Tensor ops, one file a family."""

from pdkernels.ops.block_sparse_attention import block_sparse_attention
from pdkernels.ops.feature_cache import add_cached_rows_, gather_rows, value_drift_select_
from pdkernels.ops.kv_cache import kv_append_, kv_commit_, kv_trim_
from pdkernels.ops.linear_token_statistics import linear_token_statistics
from pdkernels.ops.logit_drift import LogitDrift, logit_drift
from pdkernels.ops.record_step import record_step_
from pdkernels.ops.recurrence import RecurrenceExit, recurrence_advance_, recurrence_exit, recurrence_inject
from pdkernels.ops.sandwich import add_rms_norm, rotate_, rotate_append_, silu_gate
from pdkernels.ops.speculative_attention import speculative_attention, speculative_attention_append_
from pdkernels.ops.token_statistics import TokenStatistics, token_statistics
from pdkernels.ops.unmask import Unmasked, unmask_
from pdkernels.ops.verify_draft import DraftVerdict, verify_draft

__all__ = [
    "DraftVerdict",
    "LogitDrift",
    "RecurrenceExit",
    "TokenStatistics",
    "Unmasked",
    "add_cached_rows_",
    "add_rms_norm",
    "block_sparse_attention",
    "gather_rows",
    "kv_append_",
    "kv_commit_",
    "kv_trim_",
    "linear_token_statistics",
    "logit_drift",
    "record_step_",
    "recurrence_advance_",
    "recurrence_exit",
    "recurrence_inject",
    "rotate_",
    "rotate_append_",
    "silu_gate",
    "speculative_attention",
    "speculative_attention_append_",
    "token_statistics",
    "unmask_",
    "value_drift_select_",
    "verify_draft",
]
