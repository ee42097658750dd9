"""Tensor ops, one file a family."""

from pdkernels.ops.block_sparse_attention import block_sparse_attention
from pdkernels.ops.kv_cache import kv_append_, kv_commit_, kv_trim_
from pdkernels.ops.speculative_attention import speculative_attention
from pdkernels.ops.verify_draft import DraftVerdict, verify_draft

__all__ = [
    "DraftVerdict",
    "block_sparse_attention",
    "kv_append_",
    "kv_commit_",
    "kv_trim_",
    "speculative_attention",
    "verify_draft",
]
