"""GGUF files: configuration and tensors of Llama, Qwen2, Qwen3, Qwen3-MoE, OLMo 2, OLMo 3, gpt-oss, Gemma 2 and Gemma 3 models,
and of diffusion models with `gguf_diffusion`.

Sources: the writers and loaders of github.com/ggml-org/llama.cpp (gguf-py, convert_hf_to_gguf.py, src/llama-model.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pdkernels import _memory
from pdkernels._validation import check, fail, message
from pdkernels.models.architectures.config import ExpertsConfig, TransformerConfig
from pdkernels.models.architectures.gemma4_config import Gemma4Config
from pdkernels.models.architectures.packing import Stated
from pdkernels.models.architectures.rope import FactorScaling, LinearScaling, RopeScaling, YarnScaling
from pdkernels.models.architectures.windows import Window
from pdkernels.models.checkpoints import (
    gemma2,
    gemma3,
    gemma4,
    gemma4_gguf,
    gguf_diffusion,
    gguf_hybrid,
    hf,
    hf_experts,
    mxfp4,
)
from pdkernels.models.checkpoints.checkpoint import Checkpoint
from pdkernels.models.checkpoints.gguf_ends import marks_of
from pdkernels.models.checkpoints.gguf_tokenizer import tokenizer
from pdkernels.models.checkpoints.gguf_windows import check_one_base, check_one_width, windows_of
from pdkernels.models.checkpoints.missing import refuse_missing
from pdkernels.models.files.fields import OP, Kept, read_from, shown
from pdkernels.models.files.gguf_file import GgufFile, GgufTensor
from pdkernels.models.files.gguf_keys import UNSUPPORTED, Keys
from pdkernels.models.files.layout import Layout, Parts, Stored
from pdkernels.ops.quantized_weight import GGUF_FORMATS, QuantizedWeight

_MOE, _OLMO, _GPT_OSS = "qwen3moe", "olmo2", "gpt-oss"
_LLADA_MOE = gguf_diffusion.LLADA_MOE
_MIXTURES = (_MOE, _GPT_OSS, _LLADA_MOE, gguf_diffusion.LLADA2, gemma4_gguf.GGUF)
"""Architectures with experts."""
ARCHITECTURES = ("llama", "qwen2", "qwen3", _MOE, _OLMO, _GPT_OSS, *gguf_diffusion.ARCHITECTURES)
_GEMMA = {gemma2.GGUF: gemma2.from_keys, gemma3.GGUF: gemma3.from_keys}
_PERIODS = {_OLMO: 4, _GPT_OSS: 2}
"""With a window, each layer of this number sees the whole text."""
_INTERLEAVED = ("llama", gguf_diffusion.LLADA)
"""Their RoPE pairs adjacent components."""
_PUBLISHED = {_GPT_OSS: hf_experts.GPT_OSS}

_EMBEDDING, _HEAD, _FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_OUTSIDE = {"model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output."}
_INSIDE = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ROUTER = "ffn_gate_inp.weight"
_EXPERT_BIASES = "_exps.bias"
_PACKED = (*GGUF_FORMATS, mxfp4.GGUF)


def read(path: Path, dtype: torch.dtype | None, packed: bool | None = None) -> Checkpoint:
    """The model of a file. `dtype` None: bf16 or fp16 if its matrices are stored so, else fp32.

    `packed`: whether quantised matrices stay so. True refuses matrices of other formats, None leaves those as numbers.
    """
    file = GgufFile(path)
    kind = file.fields.get("general.architecture")
    config: TransformerConfig
    if kind in gguf_hybrid.ARCHITECTURES:
        config = gguf_hybrid.config_of(file, _fields(file, str(kind)), str(kind), _scaling)
        layout = gguf_hybrid.layout_of(config, str(kind), file.name)
        published = gguf_hybrid.published(config, str(kind))
    elif kind in _GEMMA:
        config = _gemma(file, str(kind))
        layout, published = gemma3.gguf_layout(config, file.name), gemma3.layout(config)
    elif kind == gemma4_gguf.GGUF:
        config = _gemma(file, str(kind))
        assert isinstance(config, Gemma4Config)
        layout, published = gemma4_gguf.layout(config, file), gemma4.layout(config, gemma4.TEXT)
    elif kind in gguf_diffusion.ARCHITECTURES:
        blocks = kind == gguf_diffusion.LLADA2
        config = gguf_diffusion.llada2_config(file, _fields(file, str(kind))) if blocks else _config(file)
        layout = layout_of(config, str(kind), file.name)
        published = gguf_diffusion.published(config, str(kind))
    else:
        config = _config(file)
        layout, published = layout_of(config, str(kind), file.name), hf.layout(config, _PUBLISHED.get(str(kind), ""))
    stored = {
        name: Stored(tensor.shape, _stored(file, name, tensor), file.name) for name, tensor in file.tensors.items()
    }
    if kind != gguf_diffusion.LLADA2:  # the only one whose configuration is not made of them
        stored.pop(_FACTORS, None)
    layout.stored(stored)
    fields = Keys(file.fields, file.name)
    # Refuse it before all tokens become Python strings.
    tokens = fields.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, (list, Kept)) else 0
    rows = f"be as many as the embedding has rows ({config.vocab_size}), or fewer"
    check(count <= config.vocab_size, OP, f"{file.name}: tokenizer.ggml.tokens", rows, count)
    marks = marks_of(fields, config.vocab_size)
    text_tokenizer = tokenizer(fields, config.vocab_size, marks)
    chosen = dtype or _usual_dtype(file)
    mask = gguf_diffusion.mask_token(fields, kind, config.vocab_size)
    state = partial(_gather, file, layout, config, chosen, packed)
    # Adapters use the published names.
    return Checkpoint(config, published, chosen, state, text_tokenizer, marks.ends, mask)


def _stored(file: GgufFile, name: str, tensor: GgufTensor) -> str:
    if not file.is_number(tensor):
        kind = file.type_name(tensor)
        raise NotImplementedError(
            message(OP, f"{file.name}: {shown(name)}", "be of a type that gguf makes numbers of", kind)
        )
    return "float32"


def _usual_dtype(file: GgufFile) -> torch.dtype:
    # Routers and convolutions are stored as float32, whatever the other matrices are.
    exact = (_ROUTER, _EXPERT_BIASES, *gguf_hybrid.CONVOLUTIONS)
    matrices = (tensor for name, tensor in file.tensors.items() if not name.endswith(exact))
    kinds = {file.type_name(tensor) for tensor in matrices if len(tensor.shape) >= 2}
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get("".join(kinds), torch.float32)


def _fields(file: GgufFile, kind: str) -> Keys:
    """The fields of the architecture, without its name; those that would need another computation are refused."""
    all_keys = Keys(file.fields, file.name).values
    model_keys = {key.removeprefix(f"{kind}."): _decimal(value) for key, value in all_keys.items()}
    fields = Keys(model_keys, f"{file.name}: {kind}")
    for name, allowed in UNSUPPORTED.items():
        if name in gguf_diffusion.READ.get(kind, ()):
            continue
        value = fields.get(name)
        if value not in allowed:
            _refuse(file.name, f"{kind}.{name}", f"be {allowed[0]}", value)
    if kind not in _MIXTURES:
        for name in ("expert_count", "expert_used_count"):
            if fields.values.get(name, 0) != 0:
                _refuse(file.name, f"{kind}.{name}", "be 0", fields.get(name))
    if kind != gemma4_gguf.GGUF:
        check_one_width(fields)
    return fields


def _gemma(file: GgufFile, kind: str) -> TransformerConfig:
    fields = _fields(file, kind)
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None:
        fail(OP, file.name, f"hold {_EMBEDDING}", "none")
    head_dim, positions = fields.integer("attention.key_length"), fields.integer("context_length")
    with read_from(file.name):
        scaling = _scaling(file, fields, head_dim, positions)
        if kind == gemma4_gguf.GGUF:
            return gemma4_gguf.config_of(file, fields, scaling)
        return _GEMMA[kind](fields, embedding.shape[0], scaling, _HEAD not in file.tensors)


def _config(file: GgufFile) -> TransformerConfig:
    everything = Keys(file.fields, file.name)
    kind = everything.get("general.architecture")
    refuse_missing(kind, file.name)
    if kind not in ARCHITECTURES:
        supported = ", ".join((*ARCHITECTURES, *gguf_hybrid.ARCHITECTURES, *_GEMMA, gemma4_gguf.GGUF))
        _refuse(file.name, "general.architecture", f"be one of {supported}", kind)
    fields = _fields(file, kind)
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None:
        fail(OP, file.name, f"hold {_EMBEDDING}", "none")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length")
    for name in ("attention.value_length", "rope.dimension_count"):
        width = fields.integer(name)
        if width != head_dim:
            _refuse(file.name, f"{kind}.{name}", f"be the size of a head ({head_dim})", width)
    positions = fields.integer("context_length")
    with read_from(file.name):
        scaling = _scaling(file, fields, head_dim, positions)
    positions = positions if scaling is None else scaling.reach(positions)
    base = fields.number("rope.freq_base", above=0)
    window = fields.integer("attention.sliding_window", minimum=int(kind == _GPT_OSS))
    windows: tuple[Window | None, ...] = ()
    if kind in _PERIODS and window:
        windows = windows_of(fields, window, _PERIODS[kind])
        check_one_base(fields)
    if 0 < window < positions and kind not in _PERIODS:
        _refuse(file.name, f"{kind}.attention.sliding_window", f"be absent or cover all {positions} positions", window)

    def held(*names: str) -> bool:
        return any(f"blk.0.{name}.bias" in file.tensors for name in names)

    with read_from(file.name):
        mixture = _experts(fields, kind) if kind in _MIXTURES else None
        # A file of experts alone need not name the size of an MLP.
        inner = None if mixture is None else mixture.intermediate_size
        if inner is None or "feed_forward_length" in fields.values:
            inner = fields.integer("feed_forward_length")
        return TransformerConfig(
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            layers=fields.integer("block_count"),
            heads=heads,
            kv_heads=fields.integer("attention.head_count_kv"),
            head_dim=head_dim,
            intermediate_size=inner,
            rope_theta=base,
            rope_scaling=scaling,
            norm_eps=fields.number("attention.layer_norm_rms_epsilon", minimum=0),
            qkv_bias=held("attn_q", "attn_k", "attn_v"),
            output_bias=held("attn_output"),
            mlp_bias=held("ffn_gate", "ffn_up", "ffn_down"),
            qk_norm=kind in ("qwen3", _MOE, _OLMO, _LLADA_MOE),
            whole_qk_norm=kind == _OLMO,
            tied_head=_HEAD not in file.tensors,
            max_positions=positions,
            experts=mixture,
            windows=windows,
            window_rope_theta=base if kind == _OLMO and any(windows) else None,
            outer_norms=kind == _OLMO,
            inner_norms=kind != _OLMO,
            sinks=kind == _GPT_OSS,
            **gguf_diffusion.direction(file, fields, kind),
        )


def _experts(fields: Keys, kind: str) -> ExpertsConfig:
    """Every layer has them: llama.cpp computes no others of these architectures."""
    count, used, inner = (fields.integer(f"expert_{name}") for name in ("count", "used_count", "feed_forward_length"))
    if kind == _LLADA_MOE:
        return gguf_diffusion.experts(fields, kind, count, used, inner)
    if kind == _MOE:
        return ExpertsConfig(count, used, inner)
    return ExpertsConfig(count, used, inner, biased=True, matrix_biases=True, clamp=7.0)


def _scaling(file: GgufFile, fields: Keys, head_dim: int, positions: int) -> RopeScaling | None:
    rule = fields.get("rope.scaling.type")
    factor = fields.number("rope.scaling.factor", minimum=0) or 1.0
    further = fields.number("rope.scaling.attn_factor", above=0)
    if rule not in ("none", "linear", "yarn"):
        _refuse(file.name, "rope.scaling.type", "be none, linear or yarn", rule)
    usual, stated = 1 + 0.1 * math.log(max(factor, 1.0)), fields.number("rope.scaling.yarn_attn_factor", above=0)
    # llama.cpp does not read it. Its converter writes a rule's `attention_factor` there, or its `attn_factor`, which undoes
    # the usual one in published files and which transformers does not read either.
    if rule == "yarn" and not any(math.isclose(stated, known, rel_tol=1e-4) for known in (1.0, usual, 1 / usual)):
        expectation = f"be 1, {usual:.6g} or {1 / usual:.6g}"
        _refuse(file.name, "rope.scaling.yarn_attn_factor", expectation, stated)
    factors = file.tensors.get(_FACTORS)
    if further != 1 and (rule != "yarn" or factors is not None):
        expectation = f"be 1 with {_FACTORS}" if rule == "yarn" else "be 1 without rope.scaling.type yarn"
        _refuse(file.name, "rope.scaling.attn_factor", expectation, further)
    if factors is not None:
        if rule != "none" and factor != 1:
            _refuse(file.name, "rope.scaling.type", f"be none with {_FACTORS}", rule)
        shape = (head_dim // 2,)
        check(factors.shape == shape, OP, f"{file.name}: {_FACTORS}", f"have shape {shape}", factors.shape)
        _stored(file, _FACTORS, factors)
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        file.read_into_(values, factors)
        return FactorScaling(tuple(values.tolist()))
    if rule == "none" or (rule == "linear" and factor == 1):
        return None
    if rule == "linear":
        return LinearScaling(factor)
    return YarnScaling(
        factor=factor,
        original_positions=fields.integer("rope.scaling.original_context_length", minimum=0) or positions,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", above=0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", above=0),
        attention_factor=further * usual,
    )


def layout_of(config: TransformerConfig, kind: str, name: str) -> Layout:
    """The tensors of a file with this configuration: those of the published checkpoint, under GGUF names."""
    if kind == gguf_diffusion.LLADA2:
        return gguf_diffusion.llada2_layout(config, name)
    count = 0 if config.experts is None else config.experts.count
    sources = partial(_parts, config)
    return Layout(sources, config.layers, _EMBEDDING, _HEAD, config.tied_head, name, count, separate_experts=False)


def _parts(config: TransformerConfig) -> Iterator[tuple[str, Parts]]:
    experts, hidden = config.experts, config.hidden_size
    # Theirs are a tensor each, and are not among those of a model without them.
    dense = config if experts is None else replace(config, experts=None)
    for prefix, sources in hf.layout(dense).parts():
        name = prefix.rpartition(".")[2]
        if experts is None or name not in ("gate_up", "down"):
            late = config.sinks or not config.inner_norms
            yield prefix, {_name(source_prefix, late): shape for source_prefix, shape in sources.items()}
            continue
        block = f"blk.{prefix.split('.')[1]}."
        layer, inner = prefix.removesuffix(name), experts.intermediate_size
        if name == "gate_up":
            yield f"{layer}router", {f"{block}{_ROUTER}": (experts.count, hidden)}
            half_names = (f"{block}ffn_{half}_exps.weight" for half in ("gate", "up"))
            yield f"{layer}experts_gate_up", dict.fromkeys(half_names, (experts.count, inner, hidden))
            if experts.biased:
                yield f"{layer}router_bias", {f"{block}ffn_gate_inp.bias": (experts.count,)}
            if experts.matrix_biases:
                biases = (f"{block}ffn_{half}{_EXPERT_BIASES}" for half in ("gate", "up"))
                yield f"{layer}experts_gate_up_bias", dict.fromkeys(biases, (experts.count, inner))
                yield f"{layer}experts_down_bias", {f"{block}ffn_down{_EXPERT_BIASES}": (experts.count, hidden)}
        else:
            yield f"{layer}experts_down", {f"{block}ffn_down_exps.weight": (experts.count, hidden, inner)}


def _name(published: str, late: bool) -> str:
    """The name in GGUF of a published tensor; `late`: the norm that its name puts after attention is called so
    there."""
    if not published.startswith("model.layers."):
        return next(
            name + published.removeprefix(long) for long, name in _OUTSIDE.items() if published.startswith(long)
        )
    index, _, suffix = published.removeprefix("model.layers.").partition(".")
    if suffix == "self_attn.sinks":
        return f"blk.{index}.attn_sinks.weight"
    module, _, kind = suffix.rpartition(".")
    if late and module == "post_attention_layernorm":
        return f"blk.{index}.post_attention_norm.{kind}"
    return f"blk.{index}.{_INSIDE[module]}.{kind}"


def _gather(
    file: GgufFile,
    layout: Layout,
    config: TransformerConfig,
    default_dtype: torch.dtype,
    packed: bool | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> dict[str, Stated]:
    """Our parameters, tensor by tensor, so that only a few rows are in memory twice."""
    turned = partial(turned_rows, str(file.fields["general.architecture"]), config)
    parameters: dict[str, Stated] = {}
    for name, sources in layout.parts():
        first_shape = next(iter(sources.values()))
        biases = name.endswith("_bias")
        # The dimension of outputs, along which parts follow each other.
        rows = len(first_shape) - 1 if biases else max(len(first_shape) - 2, 0)
        total = sum(source_shape[rows] for source_shape in sources.values())
        shape = (*first_shape[:rows], total, *first_shape[rows + 1 :])
        if packed is not False and len(shape) >= 2 and not biases and not name.endswith((".router", ".conv")):
            formats = {source: file.type_name(file.tensors[source]) for source in sources}
            other = next((source for source, format in formats.items() if format not in _PACKED), None)
            if other is None:
                parameters[name] = QuantizedWeight.join([_packed(file, source, turned) for source in sources]).to(
                    device
                )
                continue
            if packed:
                expectation = f"be of one of the types {', '.join(_PACKED)} to stay packed"
                _refuse(file.name, other, expectation, formats[other])
        parameter = _memory.empty(shape, dtype or default_dtype)
        first = 0
        for source, source_shape in sources.items():
            target = parameter.narrow(rows, first, source_shape[rows])
            if target.is_contiguous():
                file.read_into_(target, file.tensors[source])
            else:
                unturned = _memory.empty(source_shape, parameter.dtype)
                file.read_into_(unturned, file.tensors[source])
                target.copy_(unturned)
            first += source_shape[rows]
            if (rows_in_order := turned(source, target)) is not None:
                target.copy_(rows_in_order)
        parameters[name] = parameter.to(device)
    return parameters


def _packed(file: GgufFile, name: str, in_order: Callable[[str, torch.Tensor], torch.Tensor | None]) -> QuantizedWeight:
    """A matrix as it lies in the file, its blocks in the order in which the products read them."""
    tensor = file.tensors[name]
    *matrices, outputs, width = tensor.shape
    format = file.type_name(tensor)
    turned = in_order(name, torch.arange(outputs, device="cpu")[:, None])
    order = None if turned is None else turned.view(-1).tolist()
    count = matrices[0] if matrices else None
    with read_from(f"{file.name}: {shown(name)}"), file.bytes_of(tensor) as source:
        if format == mxfp4.GGUF:
            return mxfp4.from_gguf(source, outputs, width, order, count)
        return QuantizedWeight.from_gguf(format, source, outputs, width, order, count)


def turned_rows(kind: str, config: TransformerConfig, source: str, rows: torch.Tensor) -> torch.Tensor | None:
    """A tensor of the file in our order of rows; None: it has that order."""
    if kind == gguf_diffusion.LLADA2:
        return gguf_diffusion.turned(config, source, rows)
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(source.split(".")[-2])
    return None if heads is None or kind not in _INTERLEAVED else _halves(rows, heads, config.head_dim)


def _halves(rows: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Rows of heads in our order. Their RoPE pairs adjacent components, so the writer interleaved the halves of each
    head."""
    return rows.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def _decimal(value: Any) -> Any:
    """The shortest decimal that rounds to this fp32 number, which is the value before it was stored."""
    import numpy

    return float(str(numpy.float32(value))) if type(value) is float and abs(value) < 3e38 else value


def _refuse(file: str, field: str, expectation: str, actual: object) -> None:
    raise NotImplementedError(message(OP, f"{file}: {field}", expectation, shown(actual)))
