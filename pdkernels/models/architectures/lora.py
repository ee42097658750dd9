"""Low-rank adapters of single sequences: what they add to the matrix products of a forward.

Rows are sorted by their adapter, so that each pair of matrices is read once in a forward, however many rows use it. A
row's sum has the same bits alone and in any batch, and rows without an adapter are not touched.

Source: Chen et al., "Punica: Multi-Tenant LoRA Serving" (arXiv 2310.18547), section 4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pdkernels._structures import flat
from pdkernels.backends import resolve
from pdkernels.models.architectures.fused import enabled, linear
from pdkernels.ops.library import LIBRARY, NAMESPACE, counts_writes, run_counted, schema_of

BIND, ADD = "bind_adapter", "add_adapters_"
MATRICES = ("qkv", "output", "gate_up", "down")
"""The matrices of a layer that a pair may be for."""
Added: TypeAlias = Callable[[Tensor, Tensor, str], Tensor]
"""From a product, its input ``(batch, rows, width)`` and the name of its matrix to the product with what is added."""


class LoraPair(NamedTuple):
    """``b.T @ a``, for the outputs of a matrix from `first` on."""

    first: int
    a: Tensor
    """``(rank, width)``."""
    b: Tensor
    """``(rank, outputs)``, transposed and with the scale."""


class AdapterArguments(NamedTuple):
    """The arguments of `BIND`; `AdapterInputs` in python_bindings/lora.h."""

    like: Tensor
    tensors: list[Tensor]
    """The halves of each pair."""
    layers: list[int]
    matrices: list[int]
    """By their places in `MATRICES`."""
    firsts: list[int]
    layer_count: int


class AdaptedArguments(NamedTuple):
    """`AdaptedRows` as ops take them; `AdaptedInputs` in python_bindings/lora.h."""

    adapters: list[Tensor]
    rows: Tensor | None
    ends: list[int]


class AddArguments(NamedTuple):
    """The arguments of `ADD`; `AddAdaptersInputs` in python_bindings/lora.h."""

    product: Tensor
    x: Tensor
    adapted: AdaptedArguments
    layers: int
    layer: int
    matrix: int


# Not among the public ops: they serve the models on the CPU, and their reference is `AdaptedRows`.
LIBRARY.define(f"{BIND}({schema_of(AdapterArguments)}) -> Tensor bound")
LIBRARY.define(f"{ADD}({schema_of(AddArguments, mutated=['product'])}) -> ()")
_bind = getattr(getattr(torch.ops, NAMESPACE), BIND).default
_add = getattr(getattr(torch.ops, NAMESPACE), ADD).default
_WRITES = counts_writes(_add)


class LoraAdapter:
    """The pairs of an adapter, by layer and matrix.

    Attributes:
        name: as requests name it.
        layers: of each layer, the pairs of its matrices by `MATRICES`.
        digest: a hash of its tensors and their places, the same in every program: rows of equal adapters are equal.
            Made with the adapter, so that no step of an engine waits for it.
    """

    def __init__(self, name: str, layers: Sequence[dict[str, list[LoraPair]]]) -> None:
        self.name, self.layers, self.digest = name, list(layers), _digest(layers)
        self._bound: Tensor | None = None

    def __repr__(self) -> str:
        return f"LoraAdapter({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_bound": None}

    def bound(self, like: Tensor) -> Tensor:
        """Its tensors as ops take them, for rows of this dtype. RuntimeError: they do not fit."""
        if self._bound is None:
            arguments = AdapterArguments(like, [], [], [], [], len(self.layers))
            for number, layer in enumerate(self.layers):
                for matrix, pairs in layer.items():
                    for first, a, b in pairs:
                        arguments.tensors.extend((a, b))
                        arguments.layers.append(number)
                        arguments.matrices.append(MATRICES.index(matrix))
                        arguments.firsts.append(first)
            self._bound = _bind(*arguments)
        return self._bound

    def apply_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces its tensors, as ``Module._apply`` does those of a module."""
        self._bound = None
        for layer in self.layers:
            for pairs in layer.values():
                pairs[:] = [pair._replace(a=fn(pair.a), b=fn(pair.b)) for pair in pairs]
        self.digest = _digest(self.layers)


def _digest(layers: Sequence[dict[str, list[LoraPair]]]) -> str:
    digest = hashlib.sha256()
    for layer in layers:
        for matrix, pairs in sorted(layer.items()):
            for first, *halves in pairs:
                digest.update(repr((matrix, first, [(half.dtype, half.shape) for half in halves])).encode())
                for half in halves:
                    digest.update(half.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digest.update(b"layer")
    return digest.hexdigest()


class AdaptedRows(NamedTuple):
    """The rows of a forward that have an adapter, sorted by it."""

    adapters: list[LoraAdapter]
    rows: Tensor
    """int64, in the flat ``(batch * rows,)``: numbers of the rows of each adapter, ascending, one after the other."""
    ends: list[int]
    """Where those of each adapter end."""

    @classmethod
    def of(
        cls, adapters: Sequence[LoraAdapter | None] | None, rows: int, ends: Sequence[int] | None, device: torch.device
    ) -> AdaptedRows | None:
        """For sequences with these `adapters`, of `rows` rows each, or packed ones that end at `ends`; None: no row has
        any."""
        if adapters is None:
            return None
        places: dict[LoraAdapter, list[int]] = {}
        for sequence, adapter in enumerate(adapters):
            begin = sequence * rows if ends is None else ends[sequence]
            end = begin + rows if ends is None else ends[sequence + 1]
            if adapter is not None and begin < end:
                places.setdefault(adapter, []).extend(range(begin, end))
        numbers = torch.tensor([number for own in places.values() for number in own], dtype=torch.int64, device="cpu")
        return cls([*places], numbers.to(device), [*accumulate(map(len, places.values()))]) if places else None

    def arguments(self, like: Tensor) -> AdaptedArguments:
        """As ops take them, for rows of this dtype."""
        return AdaptedArguments([adapter.bound(like) for adapter in self.adapters], self.rows, self.ends)

    def add(self, product: Tensor, x: Tensor, matrix: str, layer: int) -> Tensor:
        """`product` with what the pairs of a layer's matrix add to it, in place."""
        out, inputs = product.view(-1, product.shape[-1]), x.flatten(0, -2).contiguous()
        if enabled(x) and x.device.type == "cpu" and resolve("linear", "auto", x.device) == "native":
            places = len(self.adapters[0].layers), layer, MATRICES.index(matrix)
            run_counted(_add, flat(AddArguments(out, inputs, self.arguments(x), *places)), _WRITES)
        else:
            self._add(out, inputs, matrix, layer)
        return product

    def _add(self, out: Tensor, x: Tensor, matrix: str, layer: int) -> None:
        begin = 0
        for adapter, end in zip(self.adapters, self.ends, strict=True):
            rows, begin = self.rows[begin:end], end
            if pairs := adapter.layers[layer].get(matrix):
                for first, a, b in pairs:
                    outputs = slice(first, first + b.shape[1])
                    out[rows, outputs] = out[rows, outputs] + linear(linear(x[rows], a), b.T)
