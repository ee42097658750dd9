"""Folders of quantised checkpoints: which of their matrices are quantised, what these need, and how they become ours."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch

from pdkernels import _memory
from pdkernels._validation import check, fail, message
from pdkernels.models.architectures.packing import Stated
from pdkernels.models.checkpoints import compressed, gptq
from pdkernels.models.checkpoints.integers import Format, Integers, Scheme, refuse
from pdkernels.models.files.fields import OP, Fields, read_from, some
from pdkernels.models.files.folder import Weights
from pdkernels.models.files.layout import DTYPES, Layout, Parts, Stored
from pdkernels.ops._quantized_weight import QuantizedWeight

METHODS = (*gptq.METHODS, compressed.METHOD)
FIELDS = ("quantization_config", "compression_config")
"""The second is an older name that compressed-tensors had."""
_REMEDY = "Load a GGUF file or a checkpoint of numbers, which pd.quantize packs."


def scheme_of(fields: Fields) -> Scheme | None:
    """What a config.json says of quantised matrices; None: there are none."""
    names = [name for name in FIELDS if name in fields.values]
    check(len(names) < 2, OP, "config.json", "describe quantised matrices once", some(names))
    if not names:
        return None
    config = fields.part(names[0])
    method = config.get("quant_method", compressed.METHOD if names[0] == FIELDS[1] else None)
    if method in gptq.METHODS:
        return gptq.read(config, method)
    if method != compressed.METHOD:
        refuse(config, "quant_method", f"be one of {', '.join(METHODS)}", method, _REMEDY)
    return compressed.read(config)


class QuantizedFolder(NamedTuple):
    """The files of a quantised checkpoint, checked."""

    layout: Layout
    weights: Weights
    formats: dict[str, Format]
    """Of the quantised matrices, by the names that they have as numbers."""
    packed: bool | None
    """As in `models.load`."""

    @classmethod
    def checked(cls, layout: Layout, weights: Weights, scheme: Scheme, packed: bool | None) -> QuantizedFolder:
        """Refuses tensors that are missing, left over or of another shape or dtype, before any is read."""
        left, formats = dict(weights.stored), dict[str, Format]()
        layout.check_count(len(left))
        names = set()
        for ours, parts in layout.parts():
            for part, shape in parts.items():
                names.add(part)
                module = part.removesuffix(".weight")
                form = scheme.format_of(module) if module != part and len(shape) == 2 else None
                # Some modules have no linear layer for the router.
                numbers = part in left and (ours.endswith(".router") or scheme.may_hold_numbers(module))
                if form is None or numbers:
                    continue
                if ours == "embedding":
                    words = message(OP, f"{layout.source}: {module}", "hold numbers", "a quantised embedding", _REMEDY)
                    raise NotImplementedError(words)
                file = _take(left, module, form, shape)
                left[part], formats[part] = Stored(shape, "float32", file), form
        for part in formats:
            bias = f"{part.removesuffix('.weight')}.bias"
            if bias in left and bias not in names:
                _check_zero(weights, bias, left.pop(bias))
        check(bool(formats), OP, f"{layout.source}: {FIELDS[0]}", "be for some of the checkpoint's matrices", "none")
        layout.stored(left)
        return cls(layout, weights, formats, packed)

    def parameters(self, dtype: torch.dtype | None, device: torch.device) -> dict[str, Stated]:
        """Our parameters, one after the other. `dtype` None: numbers as they are stored, or in the dtype of their scales."""
        ours: dict[str, Stated] = {}
        for name, parts in self.layout.parts():
            quantised = [part for part in parts if part in self.formats]
            stated: Stated
            if not quantised:
                stated = self.weights.parameter(self.layout, parts, dtype)
            elif self.packed is not False and len(quantised) == len(parts) and not name.endswith(".router"):
                stated = self._packed(name, parts)
            elif self.packed and not name.endswith(".router"):
                other = next(part for part in parts if part not in self.formats)
                words = f"be quantised like {quantised[0]}, with which it is one matrix"
                raise NotImplementedError(message(OP, other, words, "numbers", "Pass packed=None."))
            else:
                stated = self._numbers(parts, dtype)
            if isinstance(stated, torch.Tensor):
                stated = self.layout.shaped(name, stated)
            ours[name] = stated.to(device)
        self.weights.check_tied(self.layout)
        return ours

    def _packed(self, name: str, parts: Parts) -> QuantizedWeight:
        """One of our parameters. The experts of a layer, whose parts follow each other, become one for each of their matrices."""
        if ".experts_" not in name:
            return QuantizedWeight.join([self._matrix(part, shape)[0] for part, shape in parts.items()])
        each, names = len(parts) // self.layout.experts, list(parts)
        joined = []
        for first in range(each):
            own = names[first::each]
            formats = {self.formats[part] for part in own}
            if len(formats) > 1:
                words = message(OP, own[0], "have the format of the other experts", "another one", "Pass packed=False.")
                raise NotImplementedError(words)
            form = self.formats[own[0]]
            found = [self._integers(part, parts[part]) for part in own]
            codes, scales, zeros = (torch.cat(values) for values in zip(*(one[:3] for one in found)))
            made = QuantizedWeight.from_integers(form.name, codes, scales, zeros, *found[0][3:], matrices=len(own))
            joined.append(made)
        return QuantizedWeight.join(joined)

    def _matrix(self, part: str, shape: tuple[int, ...]) -> tuple[QuantizedWeight, torch.dtype]:
        """The matrix, and the dtype to which its numbers are rounded."""
        found = self._integers(part, shape)
        with read_from(part.removesuffix(".weight")):
            return QuantizedWeight.from_integers(self.formats[part].name, *found), found.scales.dtype

    def _integers(self, part: str, shape: tuple[int, ...]) -> Integers:
        module, form = part.removesuffix(".weight"), self.formats[part]

        def tensor(name: str) -> torch.Tensor | None:
            return self.weights.whole(f"{module}.{name}") if f"{module}.{name}" in self.weights.stored else None

        with read_from(module):
            return form.read(tensor, *shape)

    def _numbers(self, parts: dict[str, tuple[int, ...]], dtype: torch.dtype | None) -> torch.Tensor:
        found = []
        for part, shape in parts.items():
            if part in self.formats:
                weight, kind = self._matrix(part, shape)
                found.append(weight.dequantize(kind))
            else:
                found.append(self.weights.parameter(self.layout, {part: shape}, None))
            found[-1] = found[-1] if dtype is None else found[-1].to(dtype)
        kinds = [part.dtype for part in found]
        whole = _memory.empty((sum(map(len, found)), found[0].shape[1]), reduce(torch.promote_types, kinds))
        return torch.cat(found, out=whole)


def _take(left: dict[str, Stored], module: str, form: Format, shape: tuple[int, ...]) -> str:
    """Removes the tensors of a quantised matrix, and returns the file of one of them."""
    file = ""
    with read_from(module):
        needed = form.tensors(*shape)
    missing = [name for name, one in needed.items() if not one.optional and f"{module}.{name}" not in left]
    if missing:
        held = "numbers" if f"{module}.weight" in left and "weight" not in needed else "none"
        words = f"hold {some(f'{module}.{name}' for name in missing)}, as {FIELDS[0]} says"
        fail(OP, "checkpoint", words, held)
    for name, (expected, dtypes, _) in needed.items():
        tensor = left.pop(f"{module}.{name}", None)
        if tensor is None:
            continue
        file, label = tensor.file, f"{tensor.file}: {module}.{name}"
        scalar = tensor.shape == () and expected == (1,)
        check(tensor.shape == expected or scalar, OP, label, f"have shape {expected}", tensor.shape)
        if tensor.dtype not in dtypes:
            raise NotImplementedError(message(OP, label, f"be {', '.join(dtypes)}", tensor.dtype))
    return file


def _check_zero(weights: Weights, name: str, known: Stored) -> None:
    """Some writers store a bias for every quantised matrix, zeros where the model has none."""
    fits = len(known.shape) == 1 and known.dtype in DTYPES and not bool(weights.whole(name).any())
    check(fits, OP, f"{known.file}: {name}", "be zeros, since the model has no such bias", "others")
