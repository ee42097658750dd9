"""Folders of quantised checkpoints: which of their matrices are quantised, what these need, and how they become
ours."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch

from pdkernels import _memory
from pdkernels._validation import check, fail, message
from pdkernels.models.architectures.packing import Stated
from pdkernels.models.checkpoints import compressed, gptq
from pdkernels.models.checkpoints.hf_language import language_fields
from pdkernels.models.checkpoints.integers import CONFIG_FIELDS, Format, Integers, Role, Scheme, refuse
from pdkernels.models.files.fields import OP, Fields, read_from, some
from pdkernels.models.files.folder import Weights
from pdkernels.models.files.layout import DTYPES, Layout, Parts, Stored
from pdkernels.ops.quantized_weight import QuantizedWeight

METHODS = (*gptq.METHODS, compressed.METHOD)
_ROLES: dict[str, Role] = {"embedding": "embedding", "layer_embedding": "embedding", "head": "head"}
_REMEDY = "Load a GGUF file or a checkpoint of numbers, which pd.quantize packs."


def scheme_of(fields: Fields) -> Scheme | None:
    """What a config.json says of quantised matrices; None: there are none."""
    text = language_fields(fields)
    inner = next((name for name in CONFIG_FIELDS if text is not fields and name in text.values), None)
    if inner is not None:
        refuse(text, inner, "be absent: the outer config says what is quantised", text.get(inner))
    names = [name for name in CONFIG_FIELDS if name in fields.values]
    check(len(names) < 2, OP, "config.json", "describe quantised matrices once", some(names))
    if not names:
        return None
    config = fields.part(names[0])
    method = config.get("quant_method", compressed.METHOD if names[0] == CONFIG_FIELDS[1] else None)
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
        unread, formats = dict(weights.stored), dict[str, Format]()
        layout.check_count(len(unread))
        names = set()
        for parameter, sources in layout.parts():
            for source, shape in sources.items():
                names.add(source)
                module = source.removesuffix(".weight")
                role = _ROLES.get(parameter, "linear")
                form = scheme.format_of(module, role) if module != source and len(shape) == 2 else None
                # Some modules have no linear layer for the router.
                numbers = source in unread and (parameter.endswith(".router") or scheme.may_hold_numbers(module))
                if form is None or numbers:
                    continue
                if role == "embedding":
                    fault = message(OP, f"{layout.source}: {module}", "hold numbers", "a quantised embedding", _REMEDY)
                    raise NotImplementedError(fault)
                file = _take(unread, module, form, shape)
                unread[source], formats[source] = Stored(shape, "float32", file), form
        for source in formats:
            bias = f"{source.removesuffix('.weight')}.bias"
            if bias in unread and bias not in names:
                _check_zero(weights, bias, unread.pop(bias))
        check(
            bool(formats),
            OP,
            f"{layout.source}: {CONFIG_FIELDS[0]}",
            "be for some of the checkpoint's matrices",
            "none",
        )
        layout.stored(unread)
        return cls(layout, weights, formats, packed)

    def parameters(self, dtype: torch.dtype | None, device: torch.device) -> dict[str, Stated]:
        """Our parameters, one after the other. `dtype` None: numbers as they are stored, or in the dtype of their
        scales."""
        parameters: dict[str, Stated] = {}
        for name, sources in self.layout.parts():
            quantised = [source for source in sources if source in self.formats]
            stated: Stated
            if not quantised:
                stated = self.weights.parameter(self.layout, sources, dtype)
            elif self.packed is not False and len(quantised) == len(sources) and not name.endswith(".router"):
                stated = self._packed(name, sources)
            elif self.packed and not name.endswith(".router"):
                other = next(source for source in sources if source not in self.formats)
                expectation = f"be quantised like {quantised[0]}, with which it is one matrix"
                raise NotImplementedError(message(OP, other, expectation, "numbers", "Pass packed=None."))
            else:
                stated = self._numbers(sources, dtype)
            if isinstance(stated, torch.Tensor):
                stated = self.layout.shaped(name, stated)
            parameters[name] = stated.to(device)
        self.weights.check_tied(self.layout)
        return parameters

    def _packed(self, name: str, sources: Parts) -> QuantizedWeight:
        """One of our parameters. The experts of a layer, whose parts follow each other, become one for each of their
        matrices."""
        if ".experts_" not in name:
            return QuantizedWeight.join([self._matrix(source, shape)[0] for source, shape in sources.items()])
        each, names = len(sources) // self.layout.experts, list(sources)
        joined = []
        for first in range(each):
            half = names[first::each]
            formats = {self.formats[source] for source in half}
            if len(formats) > 1:
                fault = message(
                    OP, half[0], "have the format of the other experts", "another one", "Pass packed=False."
                )
                raise NotImplementedError(fault)
            form = self.formats[half[0]]
            matrices = [self._integers(source, sources[source]) for source in half]
            codes, scales, zeros = (torch.cat(values) for values in zip(*(integers[:3] for integers in matrices)))
            weight = QuantizedWeight.from_integers(
                form.name, codes, scales, zeros, *matrices[0][3:], matrices=len(half)
            )
            joined.append(weight)
        return QuantizedWeight.join(joined)

    def _matrix(self, source: str, shape: tuple[int, ...]) -> tuple[QuantizedWeight, torch.dtype]:
        """The matrix, and the dtype to which its numbers are rounded."""
        integers = self._integers(source, shape)
        with read_from(source.removesuffix(".weight")):
            return QuantizedWeight.from_integers(self.formats[source].name, *integers), integers.scales.dtype

    def _integers(self, source: str, shape: tuple[int, ...]) -> Integers:
        module, form = source.removesuffix(".weight"), self.formats[source]

        def tensor(name: str) -> torch.Tensor | None:
            return self.weights.whole(f"{module}.{name}") if f"{module}.{name}" in self.weights.stored else None

        with read_from(module):
            return form.read(tensor, *shape)

    def _numbers(self, sources: dict[str, tuple[int, ...]], dtype: torch.dtype | None) -> torch.Tensor:
        matrices = []
        for source, shape in sources.items():
            if source in self.formats:
                weight, kind = self._matrix(source, shape)
                matrices.append(weight.dequantize(kind))
            else:
                matrices.append(self.weights.parameter(self.layout, {source: shape}, None))
            matrices[-1] = matrices[-1] if dtype is None else matrices[-1].to(dtype)
        kinds = [source.dtype for source in matrices]
        joined = _memory.empty((sum(map(len, matrices)), matrices[0].shape[1]), reduce(torch.promote_types, kinds))
        return torch.cat(matrices, out=joined)


def _take(unread: dict[str, Stored], module: str, form: Format, shape: tuple[int, ...]) -> str:
    """Removes the tensors of a quantised matrix, and returns the file of one of them."""
    file = ""
    with read_from(module):
        needed = form.tensors(*shape)
    absent_names = [
        name for name, tensor_need in needed.items() if not tensor_need.optional and f"{module}.{name}" not in unread
    ]
    if absent_names:
        actual = "numbers" if f"{module}.weight" in unread and "weight" not in needed else "none"
        expectation = f"hold {some(f'{module}.{name}' for name in absent_names)}, as {CONFIG_FIELDS[0]} says"
        fail(OP, "checkpoint", expectation, actual)
    for name, (expected, dtypes, _) in needed.items():
        tensor = unread.pop(f"{module}.{name}", None)
        if tensor is None:
            continue
        file, label = tensor.file, f"{tensor.file}: {module}.{name}"
        scalar = tensor.shape == () and expected == (1,)
        check(tensor.shape == expected or scalar, OP, label, f"have shape {expected}", tensor.shape)
        if tensor.dtype not in dtypes:
            raise NotImplementedError(message(OP, label, f"be {', '.join(dtypes)}", tensor.dtype))
    return file


def _check_zero(weights: Weights, name: str, stored: Stored) -> None:
    """Some writers store a bias for every quantised matrix, zeros where the model has none."""
    is_zero = len(stored.shape) == 1 and stored.dtype in DTYPES and not bool(weights.whole(name).any())
    check(is_zero, OP, f"{stored.file}: {name}", "be zeros, since the model has no such bias", "others")
