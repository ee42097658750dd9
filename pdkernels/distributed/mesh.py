"""The process group of a mesh or a group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pdkernels._validation import check, check_type


def group_of(op: str, mesh: Any) -> Any:
    """The process group of a mesh of one dimension, or the given group itself."""
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    expectation = "be a DeviceMesh of one dimension or a ProcessGroup"
    check_type(hasattr(mesh, "get_group"), op, "mesh", expectation, type(mesh).__name__)
    remedy = 'Pass one of its dimensions, as in mesh["tp"].'
    check(mesh.ndim == 1, op, "mesh", "have one dimension", mesh.ndim, remedy)
    return mesh.get_group()
