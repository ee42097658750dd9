"""Folders of quantised checkpoints, written code by code as the formats are defined, and the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from tests.support.checkpoints import State, random_checkpoint

LLAMA = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "eos_token_id": 5,
    "torch_dtype": "float32",
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 32}
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


class Quantised(NamedTuple):
    """A matrix of whole numbers."""

    codes: torch.Tensor
    """``(outputs, width)``, from 0 on."""
    zeros: torch.Tensor
    """``(outputs, groups)``"""
    scales: torch.Tensor
    group: int

    def numbers(self) -> torch.Tensor:
        """Rounded to the dtype of the scales."""
        out = torch.empty(self.codes.shape, dtype=self.scales.dtype)
        for column in range(self.codes.shape[1]):
            at = column // self.group
            out[:, column] = (self.codes[:, column] - self.zeros[:, at]).to(out.dtype) * self.scales[:, at]
        return out


def quantised(
    matrix: torch.Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype = torch.float16
) -> Quantised:
    """Rounded to nearest; `group` 0: one for a row."""
    outputs, width = matrix.shape
    group = group or width
    starts = range(0, width, group)
    low = torch.stack([matrix[:, i : i + group].amin(1).clamp(max=0) for i in starts], 1)
    high = torch.stack([matrix[:, i : i + group].amax(1).clamp(min=0) for i in starts], 1)
    most = 2**bits - 1
    if symmetric:
        scales = (torch.maximum(-low, high) / (most // 2)).to(dtype)
        zeros = torch.full(low.shape, 2 ** (bits - 1))
    else:
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.to(matrix.dtype)).round().clamp(0, most).long()
    columns = torch.arange(width) // group
    codes = (matrix / scales.to(matrix.dtype)[:, columns] + zeros[:, columns]).round().clamp(0, most).long()
    return Quantised(codes, zeros, scales, group)


def words(rows: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Each row's numbers in int32 words, the first in the lowest bits, or number `order[i]` at place i."""
    each = 32 // bits
    out = []
    for row in rows.tolist():
        row = row + [0] * (-len(row) % each)
        packed = []
        for start in range(0, len(row), each):
            word = sum(row[start + (order[i] if order else i)] << (bits * i) for i in range(each))
            packed.append(word - 2**32 if word >= 2**31 else word)
        out.append(packed)
    return torch.tensor(out, dtype=torch.int32)


def gptq(matrix: Quantised, bits: int, *, minus_one: bool = True) -> State:
    zeros = words(matrix.zeros.T, bits)
    if minus_one:  # from the words, so that a zero of 0 borrows from the next
        zeros = zeros - sum(1 << shift for shift in range(0, 32, bits))
    return {
        "qweight": words(matrix.codes, bits).T.contiguous(),
        "qzeros": zeros,
        "scales": matrix.scales.T.contiguous(),
        "g_idx": torch.arange(matrix.codes.shape[1], dtype=torch.int32) // matrix.group,
    }


def awq(matrix: Quantised) -> State:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(matrix.codes.T, 4, order),
        "qzeros": words(matrix.zeros.T, 4, order),
        "scales": matrix.scales.T.contiguous(),
    }


def compressed(matrix: Quantised, bits: int, *, symmetric: bool, whole: bool) -> State:
    if whole:
        state = {"weight": (matrix.codes - 2 ** (bits - 1)).to(torch.int8)}
        zeros = (matrix.zeros - 2 ** (bits - 1)).to(torch.int8)
    else:
        state = {"weight_packed": words(matrix.codes, bits), "weight_shape": torch.tensor(matrix.codes.shape)}
        zeros = words(matrix.zeros.T, bits).T.contiguous()
    return {**state, "weight_scale": matrix.scales} | ({} if symmetric else {"weight_zero_point": zeros})


class Kind(NamedTuple):
    """A way to store a checkpoint."""

    config: dict[str, Any]
    bits: int
    group: int
    symmetric: bool
    pack: Callable[[Quantised], State]
    dtype: torch.dtype = torch.float16


def _gptq(bits: int, group: int, symmetric: bool, version: str = "gptq", **more: Any) -> Kind:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": False}
    config |= {"checkpoint_format": version, "damp_percent": 0.01, **more}
    return Kind(config, bits, group, symmetric, lambda matrix: gptq(matrix, bits, minus_one=version == "gptq"))


def _awq(group: int) -> Kind:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Kind({**config, "modules_to_not_convert": None}, 4, group, False, awq)


def _compressed(
    form: str, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16, rows: bool = False
) -> Kind:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None, **strategy}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"} if rows else None
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}}
    config |= {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}
    whole = form != "pack-quantized"
    pack = lambda matrix: compressed(matrix, bits, symmetric=symmetric, whole=whole)  # noqa: E731
    return Kind(config, bits, group, symmetric, pack, dtype)


KINDS = {
    "awq 32": _awq(32),
    "awq 64": _awq(64),
    "gptq 4 of 32": _gptq(4, 32, False),
    "gptq 4 of 128, symmetric": _gptq(4, 128, True),
    "gptq 4 of rows": _gptq(4, 0, True),
    "gptq 8 of 64": _gptq(8, 64, False),
    "gptq_v2 4 of 32": _gptq(4, 32, False, "gptq_v2"),
    "packed 4 of 32": _compressed("pack-quantized", 4, 32, True),
    "packed 4 of 32, zeros": _compressed("pack-quantized", 4, 32, False),
    "packed 4 of rows, fp32": _compressed("pack-quantized", 4, 0, True, torch.float32),
    "packed 8 of rows, zeros, fp32": _compressed("pack-quantized", 8, 0, False, torch.float32),
    "int8": _compressed("int-quantized", 8, 0, True, rows=True),
    "int8, zeros": _compressed("int-quantized", 8, 0, False, torch.float16, rows=True),
}


def write_folder(
    folder: Path, fields: dict[str, Any], kind: Kind, *, head: bool = False, more: State | None = None
) -> State:
    """Writes a random checkpoint; returns its numbers, in the dtypes in which they are stored."""
    state = random_checkpoint(fields, dtype=torch.float32)
    held, stored = {}, {}
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        if ("proj" in name and name.endswith(".weight")) or (head and module == "lm_head"):
            matrix = quantised(tensor, kind.bits, kind.group, symmetric=kind.symmetric, dtype=kind.dtype)
            stored |= {f"{module}.{part}": value for part, value in kind.pack(matrix).items()}
            held[name] = matrix.numbers()
        else:
            stored[name] = held[name] = tensor
    folder.mkdir(exist_ok=True)
    save_file({**stored, **(more or {})}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": kind.config}))
    return held
