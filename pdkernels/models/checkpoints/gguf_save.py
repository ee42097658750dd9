"""Diffusion models written as GGUF files, as llama.cpp's converter names keys and tensors.

Source: `conversion/base.py`, `llada.py` and `dream.py` of github.com/ggml-org/llama.cpp; the sources of LLaDA2 are those
of `gguf_diffusion`. Blocks: ggml-common.h of github.com/ggml-org/ggml.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels._quantized_formats import BLOCK, Quantized
from pdkernels._validation import check_type, message, sentence
from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.rope import PartialRotation
from pdkernels.models.architectures.transformer import Transformer
from pdkernels.models.checkpoints import gguf, gguf_diffusion
from pdkernels.models.checkpoints.gguf_tokenizer import fields_of_tokenizer
from pdkernels.models.text.tokenizers import JsonTokenizer
from pdkernels.ops.quantized_weight import Part, QuantizedWeight

OP = "models.save_gguf"
_BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
_NUMBERS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class _Tensor(NamedTuple):
    """A tensor of the file before its bytes are made."""

    name: str
    shape: tuple[int, ...]
    kind: str
    rows: slice
    """Of our parameter's outputs."""
    order: Tensor | None
    """Of the rows within them."""


def save_gguf(model: Transformer, path: str | os.PathLike[str]) -> None:
    """Writes a diffusion model as a GGUF file with the names that llama.cpp's converter gives it: `llada`, `dream`,
    `llada-moe` or `llada2`. `pdkernels.models.load` reads the same model from it. An existing file is replaced.

    Args:
        model: LLaDA, Dream, LLaDA-MoE or LLaDA2, of numbers or with matrices packed by `pdkernels.quantize` in q8_0,
            q4_0, q4_1, q5_0 or q5_1, whose codes and scales are stored as they are. Vectors and routers are stored as
            float32. A tokenizer is stored if it is byte-level BPE with a pre-tokenizer that GGUF has a name for; a model
            with tokens of bytes or none is stored without.
        path: of the file.

    Raises:
        TypeError: another kind of model.
        NotImplementedError: a configuration, a packed format or a tokenizer that such a file cannot hold.

    Source: see the module.

    Example:
        >>> import pdkernels as pd, tempfile, pathlib
        >>> model = pd.models.load("tiny-masked")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pd.models.save_gguf(pd.quantize(model, "q8_0"), pathlib.Path(folder) / "m.gguf")
        ...     pd.models.load(pathlib.Path(folder) / "m.gguf").mask_token == model.mask_token
        True
    """
    check_type(isinstance(model, Transformer), OP, "model", "be a Transformer", type(model).__name__)
    kind, target = _kind(model.config), Path(path)
    state = {**dict(model.named_parameters()), **_packed(model)}
    tensors = {name: list(entries) for name, entries in _tensors(model.config, kind, state)}
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.gguf")
    try:
        _write(unfinished, kind, _fields(model, kind), tensors, state)
        _check_same(model.config, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _kind(config: TransformerConfig) -> str:
    sees, predicts, experts = config.attention, config.predicts, config.experts
    if experts is not None and experts.pool:
        fault = "a GGUF file has no key for experts that a block of rows shares"
        raise NotImplementedError(sentence(OP, fault, "Keep the folder that it was loaded from."))
    if experts is None and sees == "bidirectional":
        return gguf_diffusion.DREAM if predicts == "next" else gguf_diffusion.LLADA
    if sees == "bidirectional" and predicts == "own":
        return gguf_diffusion.LLADA_MOE
    if sees == "causal" and predicts == "own" and config.qk_norm:
        return gguf_diffusion.LLADA2
    expectation = "be one of LLaDA, Dream, LLaDA-MoE or LLaDA2"
    raise NotImplementedError(message(OP, "model.config", expectation, f"attention {sees!r}, predicts {predicts!r}"))


def _packed(model: Transformer) -> dict[str, QuantizedWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


def _fields(model: Transformer, kind: str) -> dict[str, Any]:
    config, rope = model.config, model.config.rope_scaling
    rotated = rope.rotated if isinstance(rope, PartialRotation) else config.head_dim
    piece: dict[str, Any] = {
        "block_count": config.layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "attention.causal": False,
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": rotated,
        "vocab_size": config.vocab_size,
    }
    if config.experts is not None:
        piece |= _expert_fields(config, kind)
    entries = {f"{kind}.{name}": value for name, value in piece.items()}
    if kind != gguf_diffusion.DREAM:
        entries["diffusion.shift_logits"] = False
    tokens: dict[str, Any] = {"tokenizer.ggml.model": "none"}
    if isinstance(model.tokenizer, JsonTokenizer):
        tokens = fields_of_tokenizer(model.tokenizer, config.vocab_size)
    ends = zip(("eos", "eot", "eom"), model.end_tokens)
    marks = {**{role: token for role, token in ends}, "mask": model.mask_token}
    named = {f"tokenizer.ggml.{role}_token_id": token for role, token in marks.items() if token is not None}
    return {**entries, **tokens, **named}


def _expert_fields(config: TransformerConfig, kind: str) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    entries: dict[str, Any] = {
        "expert_count": experts.count,
        "expert_used_count": experts.per_token,
        "expert_feed_forward_length": experts.intermediate_size,
    }
    if kind == gguf_diffusion.LLADA2:
        entries |= {
            "leading_dense_block_count": experts.first,
            "expert_shared_count": experts.shared_size // experts.intermediate_size,
            "expert_shared_feed_forward_length": experts.shared_size,
            "expert_weights_scale": float(experts.scale),
            "expert_weights_norm": experts.normalized,
            "expert_gating_func": gguf_diffusion.SIGMOID,
            "expert_group_count": experts.groups,
            "expert_group_used_count": experts.chosen_groups,
        }
    return entries


def _tensors(config: TransformerConfig, kind: str, state: Mapping[str, Any]) -> Iterator[tuple[str, list[_Tensor]]]:
    """Each of our parameters, and the tensors of the file that are its outputs one after the other."""
    for name, sources in gguf.layout_of(config, kind, "GGUF").parts():
        if name not in state:
            raise NotImplementedError(message(OP, "model", f"have a parameter {name}", "none"))
        parameter, first, entries = state[name], 0, []
        stacked = name.rpartition(".")[2] in ("experts_gate_up", "experts_down")
        for source, shape in sources.items():
            count = shape[int(stacked)]
            indices = torch.arange(count, device="cpu")[:, None]
            order = gguf.turned_rows(kind, config, source, indices)
            rows = slice(first, first + count)
            back = None if order is None else order.view(-1).argsort()
            entries.append(_Tensor(source, shape, _format(name, parameter, shape, rows), rows, back))
            first += count
        yield name, entries


def _format(name: str, parameter: Tensor | QuantizedWeight, shape: tuple[int, ...], rows: slice) -> str:
    if isinstance(parameter, QuantizedWeight):
        part, _ = _part(parameter, rows)
        if part.format not in _BLOCK_FORMATS:
            expectation = f"be packed in one of the formats {', '.join(_BLOCK_FORMATS)}"
            remedy = "`pdkernels.models.load(packed=False)` makes numbers of a file's matrices."
            raise NotImplementedError(message(OP, name, expectation, part.format, remedy))
        return part.format.upper()
    exact = len(shape) == 1 or name.endswith((".router", "_bias"))
    return "F32" if exact or parameter.dtype not in _NUMBERS else _NUMBERS[parameter.dtype]


def _part(weight: QuantizedWeight, rows: slice) -> tuple[Part, int]:
    """The part that holds these outputs, and its first."""
    first = 0
    for part in weight.parts():
        if first <= rows.start and rows.stop <= first + part.outputs:
            return part, first
        first += part.outputs
    raise NotImplementedError(message(OP, "model", "have matrices of one format for each tensor", "several"))


def _write(
    path: Path, kind: str, fields: Mapping[str, Any], tensors: Mapping[str, list[_Tensor]], state: Mapping[str, Any]
) -> None:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
    except ImportError as error:
        remedy = "Install it with `pip install gguf`."
        raise ImportError(f"pdkernels.{OP}: {path.name} needs the optional package `gguf`. {remedy}") from error
    import numpy

    writer = GGUFWriter(path, kind)
    for name, value in fields.items():
        _add(writer, name, value)
    for piece in tensors.values():
        for tensor in piece:
            type_of = GGMLQuantizationType[tensor.kind]
            block, width = GGML_QUANT_SIZES[type_of]
            size = torch.Size(tensor.shape).numel() // block * width
            writer.add_tensor_info(tensor.name, tensor.shape, numpy.dtype("float32"), size, type_of)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, piece in tensors.items():
            for tensor in piece:
                writer.write_tensor_data(_bytes(state[name], tensor).view(-1).numpy())
    finally:
        writer.close()


def _add(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _bytes(parameter: Tensor | QuantizedWeight, tensor: _Tensor) -> Tensor:
    """A tensor as it lies in the file, uint8."""
    stacked = len(tensor.shape) == 3
    if isinstance(parameter, QuantizedWeight):
        matrices = [parameter[number] for number in range(len(parameter))] if stacked else [parameter]
        return torch.stack([_rows(matrix, tensor) for matrix in matrices])
    values = parameter.detach().cpu()
    piece = values[:, tensor.rows] if stacked else values[tensor.rows]
    piece = piece if tensor.order is None else piece[tensor.order]
    dtype = next(dtype for dtype, name in _NUMBERS.items() if name == tensor.kind)
    return piece.to(dtype).contiguous().view(-1).view(torch.uint8)


def _rows(weight: QuantizedWeight, tensor: _Tensor) -> Tensor:
    part, first = _part(weight, tensor.rows)
    codes, fields = part.unpacked(weight.width)
    order = torch.arange(tensor.rows.start - first, tensor.rows.stop - first, device="cpu")
    order = order if tensor.order is None else order[tensor.order]
    return _blocks(part.layout.bits, Quantized(codes[order], {name: piece[order] for name, piece in fields.items()}))


def _blocks(bits: int, matrix: Quantized) -> Tensor:
    """Blocks of 32 codes behind their scale, and their minimum if they have one."""
    codes = matrix.codes.unflatten(1, (-1, BLOCK))
    headers = [matrix.fields[name] for name in ("scale", "minimum") if name in matrix.fields]
    entries = [piece.contiguous().view(torch.uint8) for piece in headers]
    if bits == 8:
        return torch.cat((*entries, codes ^ 128), -1)
    if bits == 5:
        fifth = (codes >> 4).unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8, device=codes.device)
        entries.append(fifth.sum(-1).to(torch.uint8))
    low, high = (codes & 15).split(BLOCK // 2, -1)
    return torch.cat((*entries, low | high << 4), -1)


def _check_same(config: TransformerConfig, path: Path) -> None:
    """Refuses a configuration of which the file says something else."""
    try:
        of_file = gguf.read(path, None).config
    except (ValueError, NotImplementedError) as error:
        raise NotImplementedError(message(OP, "model.config", "be one that the file can hold", str(error))) from None
    for field in fields_of(config):
        piece, entries = getattr(config, field.name), getattr(of_file, field.name)
        if piece != entries:
            raise NotImplementedError(message(OP, f"model.config.{field.name}", f"be {entries}, as in the file", piece))
