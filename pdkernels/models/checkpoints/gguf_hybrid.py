"""GGUF files of hybrid models, Qwen3.5 (dense) and LFM2: their fields, and the names of their tensors.

The writer has put the heads of values in another order than the published checkpoint, in which a key head serves every
n-th of them; it has added 1 to the weights of centred norms, and stores the factor of the decay itself. Nothing is
turned back: `HybridConfig` names all three.

Source: `conversion/qwen.py`, `conversion/lfm2.py` and `src/models/qwen35.cpp` of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from pdkernels._validation import check, fail, message
from pdkernels.models.architectures.hybrid import HybridConfig, Mixer
from pdkernels.models.architectures.rope import RopeScaling
from pdkernels.models.checkpoints import hybrid_hf
from pdkernels.models.files.fields import OP, Kept, read_from, shown
from pdkernels.models.files.gguf_file import GgufFile
from pdkernels.models.files.gguf_keys import Keys
from pdkernels.models.files.layout import Layout, Parts

QWEN35, LFM2 = "qwen35", "lfm2"
ARCHITECTURES = (QWEN35, LFM2)
CONVOLUTIONS = ("ssm_conv1d.weight", "shortconv.conv.weight")
_TILED = ("inputs", "conv", "decay_bias", "output")
"""Parameters of a delta rule with values in another order, where there are more value heads than key heads."""
_CENTRED = ("norm", "mixer_norm", "mlp_norm", "q_norm", "k_norm")
PUBLISHED = {QWEN35: hybrid_hf.QWEN35_TEXT, LFM2: hybrid_hf.LFM2}

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}
_INSIDE = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
}

Scaling = Callable[[GgufFile, Keys, int, int], RopeScaling | None]


def config_of(file: GgufFile, fields: Keys, kind: str, scaling_of: Scaling) -> HybridConfig:
    """The configuration, of the fields without the architecture's name."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        fail(OP, file.name, "hold token_embd.weight", "none")
    hidden, heads, layers = (
        fields.integer(name) for name in ("embedding_length", "attention.head_count", "block_count")
    )
    head_dim = fields.integer("attention.key_length")
    width = fields.integer("attention.value_length")
    if width != head_dim:
        _refuse(file, f"{kind}.attention.value_length", f"be the size of a head ({head_dim})", width)
    positions = fields.integer("context_length")
    with read_from(file.name):
        scaling = scaling_of(file, fields, head_dim, positions)
    common: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("feed_forward_length"),
        "rope_theta": fields.number("rope.freq_base", above=0),
        "rope_scaling": scaling,
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon", minimum=0),
        "qk_norm": True,
        "tied_head": "output.weight" not in file.tensors,
        "max_positions": positions if scaling is None else scaling.reach(positions),
        "rotary_dim": fields.integer("rope.dimension_count"),
    }
    with read_from(file.name):
        return HybridConfig(**common, **(_lfm2 if kind == LFM2 else _qwen)(file, fields, layers))


def _qwen(file: GgufFile, fields: Keys, layers: int) -> dict[str, Any]:
    _check_sections(file, fields)
    keys, values, size = (fields.integer(f"ssm.{name}") for name in ("group_count", "time_step_rank", "inner_size"))
    check(size % values == 0, OP, f"{fields.where}.ssm.inner_size", f"be a multiple of time_step_rank ({values})", size)
    interval = fields.integer("full_attention_interval")
    recurrent = fields.get("attention.recurrent_layers")
    if recurrent is None:
        recurrent = [(index + 1) % interval != 0 for index in range(min(layers, 1 << 16))]
    recurrent = list(recurrent)
    check(
        len(recurrent) == layers,
        OP,
        f"{fields.where}.attention.recurrent_layers",
        f"have {layers} entries",
        len(recurrent),
    )
    mixers: tuple[Mixer, ...] = tuple("delta" if there else "attention" for there in recurrent)
    return {
        "kv_heads": fields.integer("attention.head_count_kv"),
        "mixers": mixers,
        "conv_width": fields.integer("ssm.conv_kernel", minimum=2),
        "key_heads": keys,
        "value_heads": values,
        "key_dim": fields.integer("ssm.state_size"),
        "value_dim": size // values,
        "gated_attention": True,
        "tiled_values": values != keys,
        "plain_decay": True,
    }


def _check_sections(file: GgufFile, fields: Keys) -> None:
    """Of text alone, the first three coordinates of a position are equal, and the fourth is 0."""
    sections = fields.get("rope.dimension_sections")
    lengths = list(sections) if isinstance(sections, (list, Kept)) else []
    valid = len(lengths) == 4 and all(type(length) is int and length >= 0 for length in lengths) and any(lengths)
    label = f"{fields.where}.rope.dimension_sections"
    check(valid, OP, label, "be four numbers of pairs, not all 0", shown(sections))
    pairs = (pair % sum(lengths) for pair in range(min(fields.integer("rope.dimension_count") // 2, sum(lengths))))
    if not all(pair < 3 * lengths[pair % 3] for pair in pairs):
        _refuse(file, "rope.dimension_sections", "give every pair one of the first three coordinates", lengths)


def _lfm2(file: GgufFile, fields: Keys, layers: int) -> dict[str, Any]:
    positions, window = fields.integer("context_length"), fields.integer("attention.sliding_window", minimum=0)
    if 0 < window < positions:
        expectation = f"be absent or cover all {positions} positions"
        _refuse(file, f"{LFM2}.attention.sliding_window", expectation, window)
    head_counts = fields.get("attention.head_count_kv")
    counts = list(head_counts) if not isinstance(head_counts, int) else [head_counts] * min(layers, 1 << 16)
    valid = len(counts) == layers and all(type(count) is int and count >= 0 for count in counts)
    check(
        valid,
        OP,
        f"{fields.where}.attention.head_count_kv",
        f"be a number of heads for each of {layers} layers",
        shown(head_counts),
    )
    kinds_of_heads = sorted({count for count in counts if count})
    check(
        len(kinds_of_heads) == 1,
        OP,
        f"{fields.where}.attention.head_count_kv",
        "be one number in all layers with attention",
        kinds_of_heads,
    )
    mixers: tuple[Mixer, ...] = tuple("attention" if count else "conv" for count in counts)
    return {
        "kv_heads": kinds_of_heads[0],
        "mixers": mixers,
        "conv_width": fields.integer("shortconv.l_cache", minimum=2),
    }


def layout_of(config: HybridConfig, kind: str, file: str) -> Layout:
    """The tensors of a file with this configuration."""
    sources = partial(_parts, config, kind)
    return Layout(sources, config.layers, "token_embd.weight", "output.weight", config.tied_head, file)


def published(config: HybridConfig, kind: str) -> Layout:
    """The tensors under their published names. Files of LFM2 store them in that order and with those numbers, files of
    Qwen3.5 some of them."""
    layout = hybrid_hf.layout(config, PUBLISHED[kind])
    return layout._replace(turned=partial(_turned, config), shifted=_plain) if kind == QWEN35 else layout


def _turned(config: HybridConfig, name: str, rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves where a file has those of a published checkpoint."""
    layer, _, parameter = name.rpartition(".")
    is_delta = layer != "" and config.mixers[int(layer.rpartition(".")[2])] == "delta"
    tiled = config.tiled_values and is_delta and parameter in _TILED
    return rows.clone() if tiled or parameter == "decay" else rows


def _plain(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Norms plus 1, as the file has them."""
    return rows.double() + 1 if name.rpartition(".")[2] in _CENTRED else rows


def _parts(config: HybridConfig, kind: str) -> Iterator[tuple[str, Parts]]:
    for prefix, sources in hybrid_hf.layout(config, PUBLISHED[kind]).parts():
        # A convolution is stored without its dimension of 1.
        yield (
            prefix,
            {
                _name(source_prefix): (shape[0], *shape[2:]) if len(shape) == 3 else shape
                for source_prefix, shape in sources.items()
            },
        )


def _name(published: str) -> str:
    if published in _NAMES:
        return _NAMES[published]
    index, _, inside = published.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_INSIDE[inside]}"


def _refuse(file: GgufFile, field: str, expectation: str, actual: object) -> None:
    raise NotImplementedError(message(OP, f"{file.name}: {field}", expectation, shown(actual)))
