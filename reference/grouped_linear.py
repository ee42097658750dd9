"""Products of rows sorted by group, each group with a matrix of its own, as plain PyTorch.

Source: the loop over experts of a mixture (Shazeer et al., "Outrageously Large Neural Networks", 2017), with rows sorted by expert as in
Gale et al., "MegaBlocks" (2022).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .linear import linear
from .quantized_linear import quantized_linear


def rows_of(op: str, ends: Tensor, rows: int) -> Iterator[slice]:
    """The rows of each group. Raises ValueError unless the ends ascend to the number of rows."""
    first = 0
    for group, end in enumerate(ends.tolist()):
        if not first <= end <= rows:
            raise ValueError(
                f"pdkernels.{op}: ends must ascend from 0 to the number of rows ({rows}), got {end} after {first} "
                f"for group {group}."
            )
        yield slice(first, end)
        first = end
    if first != rows:
        raise ValueError(
            f"pdkernels.{op}: ends must ascend to the number of rows ({rows}), got {first} for the last group."
        )


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x[r] @ weight[g]^T + bias[g]`` for the rows r of group g, ``(rows, outputs)``.

    >>> weight = torch.tensor([[[1.0]], [[10.0]]])
    >>> grouped_linear(torch.tensor([[1.0], [2.0], [3.0]]), weight, torch.tensor([1, 3]))
    tensor([[ 1.],
            [20.],
            [30.]])
    """
    found = [x.new_empty(0, weight.shape[1])]
    for group, rows in enumerate(rows_of("grouped_linear", ends, len(x))):
        found.append(linear(x[rows], weight[group], None if bias is None else bias[group]))
    return torch.cat(found)


def quantized_grouped_linear(
    x: Tensor, weights: list[Tensor], layouts: list[int], outputs: list[int], ends: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The same with quantised matrices; those of a part follow each other."""
    found = [x.new_empty(0, sum(outputs))]
    for group, rows in enumerate(rows_of("quantized_grouped_linear", ends, len(x))):
        if rows.start < rows.stop:
            own = [data.view(len(ends), -1)[group] for data in weights]
            added = None if bias is None else bias[group]
            found.append(quantized_linear(x[rows], own, layouts, outputs, added))
    return torch.cat(found)
