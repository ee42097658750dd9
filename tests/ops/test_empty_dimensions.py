"""Sizes of 0: no CUDA kernel is launched on a grid of 0, which a GPU refuses. Triton's: tests/ops/test_triton_specialisations.py."""

from __future__ import annotations

import pytest
from torch import Tensor

from pdkernels import backends
from tests.ops.examples import PUBLIC, Arguments, example
from tests.ops.implementations import implementation

NATIVE = [op for op in PUBLIC if backends.ON_CUDA[op] == "native"]


def emptied(arguments: Arguments, size: int) -> Arguments:
    """Every dimension of this size is 0."""

    def one(x: Tensor) -> Tensor:
        for dim, own in enumerate(x.shape):
            x = x.narrow(dim, 0, 0) if own == size else x
        return x.clone()

    return {name: one(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("op", NATIVE)
def test_no_grid_is_empty(op: str) -> None:
    arguments = example(op)
    sizes = {size for x in arguments.values() if isinstance(x, Tensor) for size in x.shape}
    assert sizes
    ran = 0
    for size in sizes:
        try:
            getattr(implementation("cudasim"), op)(**emptied(arguments, size))
            ran += 1
        except (ValueError, RuntimeError) as error:  # refused, but not by a launch
            assert "launch failed" not in str(error), f"size {size}: {error}"
    assert ran > 0
