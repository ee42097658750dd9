"""Models, statistics and attention on the ranks of a `torch.distributed` group."""

from __future__ import annotations

from pdkernels.distributed.context import ContextSlices, context_parallel_attention, slice_context
from pdkernels.distributed.dtensor import register_dtensor
from pdkernels.distributed.launch import init_process_group
from pdkernels.distributed.loading import load as load
from pdkernels.distributed.logits import ShardedLogits
from pdkernels.distributed.tensor_parallel import parallelize
from pdkernels.ops.collectives import Traffic, count_communication

__all__ = [
    "ContextSlices",
    "ShardedLogits",
    "Traffic",
    "context_parallel_attention",
    "count_communication",
    "init_process_group",
    "load",
    "parallelize",
    "register_dtensor",
    "slice_context",
]
