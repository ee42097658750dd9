"""Loads checkpoints so that each rank reads only its own shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from pdkernels import _memory
from pdkernels._validation import check
from pdkernels.distributed.mesh import group_of
from pdkernels.distributed.shards import Piece, Shards
from pdkernels.distributed.tensor_parallel import ParallelModel, assembled, parallelize
from pdkernels.models.checkpoints.packaged import PACKAGED, packaged
from pdkernels.models.checkpoints.zoo import available, checked_request, checkpoint_of
from pdkernels.models.checkpoints.zoo import load as load_whole
from pdkernels.models.files.folder import Weights
from pdkernels.models.files.layout import Layout, Parts

OP = "distributed.load"


def load(
    name_or_path: str | Path, mesh: Any, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> ParallelModel:
    """Loads and parallelizes a model; a rank reads only its shard of the checkpoint folder.

    Args:
        name_or_path: as for `pdkernels.models.load`. Models in the package, GGUF files, and folders whose rows
            have another order than ours are read whole by each rank.
        mesh: as for `parallelize`.
        dtype, device: as for `pdkernels.models.load`. With one GPU per rank, pass ``f"cuda:{local_rank}"``.

    Returns:
        The rank's part of the model.

    Raises:
        ValueError, TypeError, NotImplementedError, ImportError: as for both.

    Example:
        >>> import pdkernels as pd
        >>> model = pd.distributed.load("/models/llada-8b", mesh, device="cuda:0")   # doctest: +SKIP
    """
    group = group_of(OP, mesh)
    source, usable = checked_request(name_or_path, dtype, device)
    if source in available():
        return parallelize(_known(load_whole(source, dtype=dtype)), group).to(usable)
    if source in PACKAGED:
        source = str(packaged(source))
    checkpoint = checkpoint_of(source, name_or_path is not source, dtype)
    shards = Shards(checkpoint.config, dist.get_rank(group), dist.get_world_size(group))
    layout = checkpoint.layout
    if checkpoint.weights is None or layout.turned is not None or layout.shifted is not None:
        return parallelize(_known(load_whole(source, dtype=dtype, packed=False)), group).to(usable)
    read = _read(layout, checkpoint.weights, shards)
    parameters = ((name, _memory.moved(tensor, checkpoint.dtype, usable)) for name, tensor in read)
    attributes: dict[str, Any] = {"tokenizer": checkpoint.tokenizer, "end_tokens": checkpoint.end_tokens}
    if hasattr(checkpoint.config, "predicts"):  # a Transformer's
        attributes |= {"mask_token": checkpoint.mask_token, "plan_tokens": checkpoint.plan_tokens}
    model = assembled(checkpoint.config, shards, group, parameters, attributes)
    model.generation_config = dict(checkpoint.generation_config)
    return model


def _known(model: Any) -> ParallelModel:
    """The model, of a kind that `parallelize` refuses if it is another."""
    return cast(ParallelModel, model)


def _read(layout: Layout, weights: Weights, shards: Shards) -> Iterator[tuple[str, torch.Tensor]]:
    """The rank's part of each parameter, one by one."""
    for name, components in layout.parts():
        sources = {layout.name_in(weights.stored, component): shape for component, shape in components.items()}
        piece = shards.piece(name)
        tensor = _part(weights, sources, piece)
        if name == "embedding" and layout.tied and layout.head in weights.stored and layout.head not in sources:
            head = _part(weights, {layout.head: weights.stored[layout.head].shape}, piece)
            same = head.dtype == tensor.dtype and torch.equal(head, tensor)
            remedy = f"It is {layout.source} that says whether they are tied."
            check(same, OP, layout.head, "equal the embedding of a tied model", "another matrix", remedy)
        yield name, tensor


def _part(weights: Weights, sources: Parts, piece: Piece | None) -> torch.Tensor:
    """A slice of the concatenation of stored tensors along their rows."""
    if piece is None:
        tensors = [_flat(weights.whole(name)) for name in sources]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if piece.dim == 1:
        ((name, _),) = sources.items()
        ((start, stop),) = piece.ranges
        return weights.part(name, 1, start, stop).contiguous()
    slices = []
    for low, high in piece.ranges:
        first = 0
        for name, shape in sources.items():
            rows = torch.Size(shape[:-1]).numel() if len(shape) > 1 else shape[0]
            start, stop = max(low - first, 0), min(high - first, rows)
            if start < stop:
                few = len(shape) > 2  # biases, which we store as a matrix
                slices.append(_flat(weights.whole(name))[start:stop] if few else weights.part(name, 0, start, stop))
            first += rows
    return torch.cat(slices)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() <= 2 else tensor.flatten(0, -2)
