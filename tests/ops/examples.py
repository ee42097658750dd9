"""The representative call in every op's definition (`define`), on any device: what the tests of all ops run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pdkernels as pd
from pdkernels.masks import TilePlan
from pdkernels.ops.library import OPS, Draw

PUBLIC = [name for name in OPS if not name.endswith("_backward")]

Arguments = dict[str, Any]


def example(op: str, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Arguments:
    made = OPS[op].example(Draw(seed, dtype))
    return {
        name: x.to(device) if isinstance(x, (Tensor, TilePlan, pd.QuantizedWeight)) else x for name, x in made.items()
    }


def run(op: str, arguments: Arguments, **options: Any) -> Any:
    """The public function; for a backward pass, that of its op and then the gradients."""
    if not op.endswith("_backward"):
        return getattr(pd, op)(**arguments, **options)
    leaves = {name: x.detach().requires_grad_() if is_float(x) else x for name, x in arguments.items()}
    grad = leaves.pop("grad").detach()
    out = getattr(pd, op.removesuffix("_backward"))(**leaves, **options)
    results = tensors_in(out)
    return torch.autograd.grad(results, [x for x in leaves.values() if is_float(x)], [grad] * len(results))


def is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def tensors_in(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [x for x in found or () if isinstance(x, Tensor)]


def floats_of(op: str) -> list[str]:
    return [name for name, x in example(op).items() if is_float(x)]


def written_by(op: str) -> dict[str, Tensor]:
    return {name: x for name, x in example(op).items() if name in OPS[op].mutated}


class _Recorder(TorchDispatchMode):
    def __init__(self, op: torch._ops.OpOverload) -> None:
        super().__init__()
        self.op = op
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is self.op:
            self.calls.append((arguments, options or {}))
        return function(*arguments, **(options or {}))


def raw_arguments(op: str, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the raw op in its example."""
    with _Recorder(OPS[op].overload) as recorder:
        run(op, example(op, dtype=dtype))
    (call,) = recorder.calls
    return call


def dims_to_expand(tensor: Tensor) -> Iterator[int]:
    """The last dimension of rows of numbers is contiguous."""
    yield from (
        dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1 and (tensor.dim() < 3 or dim < tensor.dim() - 1)
    )
