"""Matrices in MXFP4: blocks of 32 numbers of four bits (E2M1) with a power of two in common, as gpt-oss stores its
experts.

Twice such a number is whole and at most 12, so a matrix stays packed with exactly its numbers in a format of five bits
and a float16 scale, 5.5 bits each in place of 4.25. Where float16 does not hold a power it has eight bits and float32.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", sections 5.2.1 and 5.3.3;
`integrations/mxfp4.py` in transformers; `block_mxfp4` of ggml-common.h in github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Buffer

from pdkernels._quantized_formats import BLOCK, Layout, Quantized
from pdkernels._validation import check, fail, message
from pdkernels.models.architectures.packing import Stated
from pdkernels.models.checkpoints.integers import CONFIG_FIELDS, refuse_others
from pdkernels.models.files.fields import OP, Fields, read_from, some
from pdkernels.models.files.folder import Weights
from pdkernels.models.files.layout import Layout as Tensors
from pdkernels.models.files.layout import Stored
from pdkernels.ops.quantized_weight import QuantizedWeight

METHOD = "mxfp4"
GGUF = METHOD.upper()
GGUF_BYTES = 17
"""Of a block in a GGUF file: its exponent, and 16 bytes."""
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], device="cpu")
_BIAS = 128  # of an exponent, with the factor 2 of `_DOUBLED`
_HALF, _WIDE = Layout("half", 5, 1), Layout("float", 8, 1)
_HALF_POWERS = (-24, 15)


class Blocks(NamedTuple):
    """A matrix as it is stored."""

    numbers: Tensor
    """``(outputs, width)`` uint8 below 16."""
    exponents: Tensor
    """``(outputs, width / 32)`` uint8."""


def packed(matrices: Sequence[Callable[[], Blocks]]) -> QuantizedWeight:
    """Matrices of one shape, each made when it is needed, as one with exactly their numbers. ValueError: not finite."""
    layout = _HALF if all(_powers(matrix())[1] for matrix in matrices) else _WIDE
    return QuantizedWeight.stack([_weight(matrix(), layout) for matrix in matrices])


def _powers(blocks: Blocks) -> tuple[Tensor, bool]:
    """The scale of each block, 0 where all of it is, and whether float16 holds all."""
    if bool((blocks.exponents == 255).any()):
        fail("QuantizedWeight", "scales", "be finite", f"{int((blocks.exponents == 255).sum())} others")
    nothing = (blocks.numbers & 7).unflatten(1, (-1, BLOCK)).amax(-1) == 0
    power = blocks.exponents.int() - _BIAS
    in_range = (power >= _HALF_POWERS[0]) & (power <= _HALF_POWERS[1]) | nothing
    return torch.ldexp(torch.ones(power.shape, dtype=torch.float32, device=power.device), power).masked_fill(
        nothing, 0
    ), bool(in_range.all())


def _weight(blocks: Blocks, layout: Layout) -> QuantizedWeight:
    codes = (_DOUBLED + layout.zero).to(torch.uint8)[blocks.numbers.int()]
    scales = _powers(blocks)[0]
    return QuantizedWeight.pack(METHOD, layout, Quantized(codes, {"scale": scales[..., None]}), codes.shape[1])


def from_gguf(
    source: Buffer, outputs: int, width: int, order: Sequence[int] | None = None, matrices: int | None = None
) -> QuantizedWeight:
    """From the bytes of a tensor in a GGUF file, as `QuantizedWeight.from_gguf`. A block's first half lies in the low
    halves of its bytes."""
    count = 1 if matrices is None else matrices
    blocks = torch.frombuffer(bytearray(source), dtype=torch.uint8).view(count, outputs, width // BLOCK, GGUF_BYTES)
    if order is not None:
        blocks = blocks[:, order]

    def matrix(number: int) -> Blocks:
        exponents, pairs = blocks[number].split([1, GGUF_BYTES - 1], -1)
        return Blocks(torch.cat((pairs & 15, pairs >> 4), -1).flatten(1), exponents[..., 0])

    weight = packed([partial(matrix, number) for number in range(count)])
    return weight[0] if matrices is None else weight


def describes(fields: Fields) -> bool:
    """Whether a config.json says that experts are stored so. What it says beside that must change nothing."""
    config = fields.part(CONFIG_FIELDS[0])
    if config.get("quant_method") != METHOD:
        return False
    refuse_others(config, ("quant_method", "modules_to_not_convert", "dequantize"))
    check(
        CONFIG_FIELDS[1] not in fields.values,
        OP,
        "config.json",
        "describe quantised matrices once",
        some(CONFIG_FIELDS),
    )
    return True


class Mxfp4Folder(NamedTuple):
    """The files of gpt-oss as it is published, checked."""

    layout: Tensors
    weights: Weights
    packed: bool | None
    """As in `models.load`."""

    @classmethod
    def checked(cls, layout: Tensors, weights: Weights, packed: bool | None) -> Mxfp4Folder:
        """Refuses tensors that are missing, left over or of another shape or dtype, before any is read."""
        unread = dict(weights.stored)
        layout.check_count(len(unread))
        for name, sources in layout.parts():
            if not _is_packed(name):
                continue
            ((source, (count, width, outputs)),) = sources.items()
            check(width % BLOCK == 0, OP, source, f"have a multiple of {BLOCK} inputs in MXFP4", width)
            groups, file = width // BLOCK, ""
            shapes = {"blocks": (count, outputs, groups, BLOCK // 2), "scales": (count, outputs, groups)}
            for suffix, shape in shapes.items():
                tensor = unread.pop(f"{source}_{suffix}", None)
                if tensor is None:
                    expectation = f"hold {source}_{suffix}, as quantization_config says"
                    fail(OP, "checkpoint", expectation, "numbers" if source in unread else "none")
                file, label = tensor.file, f"{tensor.file}: {source}_{suffix}"
                check(tensor.shape == shape, OP, label, f"have shape {shape}", tensor.shape)
                if tensor.dtype != "U8":
                    raise NotImplementedError(message(OP, label, "be U8", tensor.dtype))
            unread[source] = Stored((count, width, outputs), "float32", file)
        layout.stored(unread)
        return cls(layout, weights, packed)

    def parameters(self, dtype: torch.dtype | None, device: torch.device) -> dict[str, Stated]:
        """Our parameters, one after the other. `dtype` None: numbers as they are stored."""
        parameters: dict[str, Stated] = {}
        for name, sources in self.layout.parts():
            stated: Stated
            if _is_packed(name):
                stated = self._matrix(name, next(iter(sources)))
                if self.packed is False:
                    stated = stated.dequantize(dtype or torch.bfloat16)
            else:
                stated = self.layout.shaped(name, self.weights.parameter(self.layout, sources, dtype))
            parameters[name] = stated.to(device)
        self.weights.check_tied(self.layout)
        return parameters

    def _matrix(self, name: str, source: str) -> QuantizedWeight:
        """The experts of a layer. Gates lie between what they multiply, and become the first half of the outputs."""
        blocks, scales = (self.weights.whole(f"{source}_{suffix}") for suffix in ("blocks", "scales"))
        in_turns = name.endswith("gate_up")

        def matrix(number: int) -> Blocks:
            pairs = torch.stack((blocks[number] & 15, blocks[number] >> 4), -1).flatten(1)
            stored = Blocks(pairs, scales[number])
            return Blocks(*(torch.cat((x[0::2], x[1::2])) for x in stored)) if in_turns else stored

        with read_from(source):
            return packed([partial(matrix, number) for number in range(len(blocks))])


def _is_packed(name: str) -> bool:
    return name.endswith((".experts_gate_up", ".experts_down"))
