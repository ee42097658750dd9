"""Packed matrices of a drafter in a file: whole numbers with scales, in the format of compressed-tensors.

`pdkernels.models.checkpoints.compressed` reads it, as does vLLM. Codes and scales stay as they are, so nothing is
rounded again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import message
from pdkernels.models.checkpoints.compressed import METHOD
from pdkernels.models.checkpoints.integers import words_for
from pdkernels.models.files.layout import Parts
from pdkernels.ops.quantized_weight import GROUP, Part, QuantizedWeight

_OP = "models.save_drafter"


def packed_tensors(weight: QuantizedWeight, sources: Parts) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """The published tensors of a packed matrix, and the bits and the columns of a group (0: all) of each of its
    modules."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, tuple[int, int]] = {}
    first = 0
    for name, (outputs, width) in sources.items():
        module = name.removesuffix(".weight")
        piece, at = _covering(weight, first, outputs, module)
        bits, group = piece.layout.bits, piece.layout.group_blocks * GROUP
        codes, fields = piece.unpacked(width)
        rows = slice(first - at, first - at + outputs)
        zeros = fields.get("zero")
        symmetric = piece.layout.zero if zeros is None else 2 ** (bits - 1)
        expressible = "minimum" not in fields and "multiples" not in fields and bits in (4, 8) and symmetric > 0
        expressible = (
            expressible
            and (zeros is None or bool((zeros[rows] == symmetric).all()))
            and (not group or width % group == 0)
        )
        if not expressible:
            raise NotImplementedError(
                message(_OP, module, "be of symmetric codes of 4 or 8 bits in whole groups", piece.format, _REMEDY)
            )
        tensors[f"{module}.weight_packed"] = _words(codes[rows, :width], bits)
        tensors[f"{module}.weight_scale"] = fields["scale"][rows, :, 0].contiguous()
        tensors[f"{module}.weight_shape"] = torch.tensor([outputs, width], device="cpu")
        kinds[module] = bits, group
        first += outputs
    return tensors, kinds


_REMEDY = "int8, int4, q8_0 and q4_0 of pd.quantize are."


def quantization_config(kinds: dict[str, tuple[int, int]], unquantised: list[str]) -> dict[str, Any]:
    """What config.json says of these modules, and of the `others`, which hold numbers."""
    groups = {}
    for number, (bits, group) in enumerate(sorted(set(kinds.values()))):
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        targets = [module for module, kind in kinds.items() if kind == (bits, group)]
        groups[f"group_{number}"] = {"targets": targets, "weights": weights}
    return {
        "quant_method": METHOD,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": unquantised,
    }


def _covering(weight: QuantizedWeight, first: int, outputs: int, module: str) -> tuple[Part, int]:
    """The part of a matrix that holds these outputs, and where it begins."""
    at = 0
    for piece in weight.parts():
        if at <= first and first + outputs <= at + piece.outputs:
            return piece, at
        at += piece.outputs
    raise NotImplementedError(message(_OP, module, "be of one format", weight.format))


def _words(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as int32 words, the lowest bits first: the inverse of `integers.fields_of_words`."""
    count = words_for(codes.shape[1], bits)
    padded = torch.nn.functional.pad(codes, (0, count * 32 // bits - codes.shape[1]))
    if bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << 4
    return padded.contiguous().view(torch.int32)
