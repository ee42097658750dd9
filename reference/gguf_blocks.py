"""The quantised blocks of a GGUF file as codes and scales.

Source: the block structures of ggml-common.h and `dequantize_row_*` of ggml-quants.c in github.com/ggml-org/ggml.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantized_linear import BLOCK, Layout, Quantized

LAYOUTS = {
    "Q8_0": Layout("half", 8, 1),
    "Q4_0": Layout("half", 4, 1),
    "Q4_1": Layout("half_min", 4, 1),
    "Q5_0": Layout("half", 5, 1),
    "Q5_1": Layout("half_min", 5, 1),
    "Q4_K": Layout("super", 4, 8),
    "Q5_K": Layout("super", 5, 8),
    "Q6_K": Layout("super16", 6, 8),
}
"""The formats that stay packed, by their names in GGUF."""


def unpack(format: str, data: Tensor, outputs: int, width: int) -> Quantized:
    """The codes and scales of a tensor `(outputs, width)` from its bytes in the file, uint8."""
    groups = width // (BLOCK * LAYOUTS[format].group_blocks)
    blocks = data.view(outputs, groups, -1)
    codes, fields = _READERS[format](blocks)
    return Quantized(codes.reshape(outputs, width), fields)


def _halves(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)


def _nibbles(data: Tensor) -> Tensor:
    """The low halves of the bytes, then the high ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _q8_0(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return blocks[..., 2:] ^ 128, {"scale": _halves(blocks[..., :2])}


def _q4_0(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return _nibbles(blocks[..., 2:]), {"scale": _halves(blocks[..., :2])}


def _q4_1(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return _nibbles(blocks[..., 4:]), {"scale": _halves(blocks[..., :2]), "minimum": _halves(blocks[..., 2:4])}


def _fifth(bits: Tensor) -> Tensor:
    """Four bytes of bits as 32 times 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((bits[..., None] >> shifts & 1) << 4).flatten(-2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return _nibbles(blocks[..., 6:]) | _fifth(blocks[..., 2:6]), {"scale": _halves(blocks[..., :2])}


def _q5_1(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    fields = {"scale": _halves(blocks[..., :2]), "minimum": _halves(blocks[..., 2:4])}
    return _nibbles(blocks[..., 8:]) | _fifth(blocks[..., 4:8]), fields


def _k_fields(blocks: Tensor) -> dict[str, Tensor]:
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    multiples = torch.stack((scales, minima), -1).flatten(-2)
    return {"scale": _halves(blocks[..., :2]), "minimum": _halves(blocks[..., 2:4]), "multiples": multiples}


def _q4_k(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2), _k_fields(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (blocks[..., 16:48].unsqueeze(-2) >> shifts & 1) << 4
    return (low | high).flatten(-2), _k_fields(blocks)


def _q6_k(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3) << 4
    fields = {"scale": _halves(blocks[..., 208:]), "multiples": blocks[..., 192:208]}
    return (low | high.flatten(-2)).flatten(-2), fields


_READERS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
