"""Many devices: models, statistics and attention on the ranks of a `torch.distributed` group."""

from __future__ import annotations

from pdkernels.distributed.loading import load as load
from pdkernels.distributed.logits import ShardedLogits
from pdkernels.distributed.tensor_parallel import parallelize
from pdkernels.ops._collectives import Traffic, count_communication

__all__ = ["ShardedLogits", "Traffic", "count_communication", "load", "parallelize"]
