"""GGUF files of diffusion models: LLaDA, Dream, LLaDA-MoE and LLaDA2.

Source: `conversion/llada.py`, `conversion/dream.py`, `src/models/llada.cpp`, `dream.cpp` and `llada-moe.cpp` of
github.com/ggml-org/llama.cpp. LLaDA2 is not in it (its pull request 17454 is open): keys and names are those that the
converter of github.com/nurl-lang/nurl writes, which are llama.cpp's of its causal relative `bailingmoe2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from pdkernels._validation import check, fail, message
from pdkernels.models.architectures.config import ExpertsConfig, TransformerConfig
from pdkernels.models.architectures.rope import PartialRotation
from pdkernels.models.checkpoints import hf, hf_experts, llada, llada2
from pdkernels.models.files.fields import OP, read_from, shown
from pdkernels.models.files.gguf_file import GgufFile
from pdkernels.models.files.gguf_keys import Keys
from pdkernels.models.files.layout import Layout, Parts

LLADA, DREAM, LLADA_MOE, LLADA2 = "llada", "dream", "llada-moe", "llada2"
ARCHITECTURES = (LLADA, DREAM, LLADA_MOE, LLADA2)
_MASK_TOKENS = {LLADA_MOE: hf.MASK_TOKENS[hf_experts.LLADA_MOE], LLADA2: llada2.MASK_TOKEN}
"""Where a file names none."""
READ: dict[str, tuple[str, ...]] = {
    LLADA: ("attention.causal",),
    DREAM: ("attention.causal",),
    LLADA_MOE: ("attention.causal", "expert_weights_norm"),
    LLADA2: (
        *("attention.causal", "leading_dense_block_count", "expert_gating_func", "expert_group_count"),
        *("expert_weights_norm", "expert_weights_scale", "expert_shared_count", "expert_shared_feed_forward_length"),
    ),
}
"""Keys that other architectures may not use."""

_NAMES = {
    "model.word_embeddings": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.query_layernorm": "attn_q_norm",
    "attention.key_layernorm": "attn_k_norm",
    "attention.dense": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TURNED = {"attn_qkv": "qkv", "attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
SIGMOID = 2
"""Of scores of experts, as `expert_gating_func` numbers them."""


def direction(file: GgufFile, fields: Keys, kind: str) -> dict[str, Any]:
    """What rows see and predict: `attention` and `predicts` of a `TransformerConfig`.

    llama.cpp lets the rows of these architectures see the whole text, whatever a file says, and takes a row's logits
    for the token after it unless `diffusion.shift_logits` is false.
    """
    if kind not in ARCHITECTURES:
        return {}
    causal, blocks = fields.get("attention.causal"), kind == LLADA2
    if "attention.causal" in fields.values and causal is not False and not blocks:
        _refuse(file, f"{kind}.attention.causal", "be false", causal)
    shifted = Keys(file.fields, file.name).flag("diffusion.shift_logits", None)
    if shifted and kind in (LLADA_MOE, LLADA2):
        _refuse(file, "diffusion.shift_logits", f"be false for {kind}", shifted)
    # To llama.cpp a row of LLaDA2 sees the whole text; to its published code, its own block and those before it.
    return {"attention": "causal" if blocks else "bidirectional", "predicts": "next" if shifted else "own"}


def mask_token(fields: Keys, kind: object, vocab_size: int) -> int | None:
    """The id of the mask of a diffusion model."""
    if kind not in ARCHITECTURES:
        return None
    default = _MASK_TOKENS.get(str(kind))
    named = fields.token("tokenizer.ggml.mask_token_id", vocab_size)
    return default if named is None and default is not None and default < vocab_size else named


def experts(fields: Keys, kind: str, count: int, used: int, inner: int) -> ExpertsConfig:
    """Those of LLaDA-MoE, whose weights are not divided by their sum."""
    if fields.values.get("expert_weights_norm"):
        refusal = message(OP, f"{fields.where}.expert_weights_norm", f"be false for {kind}", True)
        raise NotImplementedError(refusal)
    return ExpertsConfig(count, used, inner, normalized=False)


def llada2_config(file: GgufFile, fields: Keys) -> TransformerConfig:
    """The configuration of LLaDA2, of the fields without the architecture's name."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        fail(OP, file.name, "hold token_embd.weight", "none")
    head_dim, rotated = fields.integer("attention.key_length"), fields.integer("rope.dimension_count")
    check(rotated <= head_dim, OP, f"{fields.where}.rope.dimension_count", f"be at most {head_dim}", rotated)
    if fields.integer("attention.value_length") != head_dim:
        _refuse(file, f"{fields.where}.attention.value_length", f"be {head_dim}", fields.get("attention.value_length"))
    rule, factor = fields.get("rope.scaling.type"), fields.number("rope.scaling.factor", minimum=0)
    if rule not in ("none", "linear") or factor not in (0, 1):
        _refuse(file, f"{fields.where}.rope.scaling.type", "be none", rule)
    with read_from(file.name):
        return TransformerConfig(
            vocab_size=embedding.shape[0],
            hidden_size=fields.integer("embedding_length"),
            layers=fields.integer("block_count"),
            heads=fields.integer("attention.head_count"),
            kv_heads=fields.integer("attention.head_count_kv"),
            head_dim=head_dim,
            intermediate_size=fields.integer("feed_forward_length"),
            rope_theta=fields.number("rope.freq_base", above=0),
            rope_scaling=None if rotated == head_dim else PartialRotation(rotated),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon", minimum=0),
            qk_norm=True,
            tied_head="output.weight" not in file.tensors,
            max_positions=fields.integer("context_length"),
            experts=_llada2_experts(file, fields),
            **direction(file, fields, LLADA2),
        )


def _llada2_experts(file: GgufFile, fields: Keys) -> ExpertsConfig | None:
    layers, dense = fields.integer("block_count"), fields.integer("leading_dense_block_count", minimum=0)
    check(dense <= layers, OP, f"{fields.where}.leading_dense_block_count", f"be at most {layers}", dense)
    if dense == layers:
        return None
    computed: dict[str, tuple[Any, ...]] = {"expert_gating_func": (SIGMOID,), "expert_weights_norm": (True,)}
    for name, allowed in computed.items():
        if fields.get(name) not in allowed:
            _refuse(file, f"{fields.where}.{name}", f"be {allowed[0]}", fields.get(name))
    inner = fields.integer("expert_feed_forward_length")
    shared = fields.integer("expert_shared_count", minimum=0) * inner
    if "expert_shared_feed_forward_length" in fields.values:
        shared = fields.integer("expert_shared_feed_forward_length", minimum=0)
    return ExpertsConfig(
        fields.integer("expert_count"),
        fields.integer("expert_used_count"),
        inner,
        first=dense,
        scores="sigmoid",
        biased=True,
        groups=max(fields.integer("expert_group_count", minimum=0), 1),
        chosen_groups=max(fields.integer("expert_group_used_count", minimum=0), 1),
        scale=fields.number("expert_weights_scale", minimum=0) or 1.0,
        shared_size=shared,
    )


def llada2_layout(config: TransformerConfig, source: str) -> Layout:
    """The tensors of a file of LLaDA2 with this configuration."""
    count = 0 if config.experts is None else config.experts.count
    embedding, head = "token_embd.weight", "output.weight"
    parts = partial(_llada2_parts, config)
    return Layout(parts, config.layers, embedding, head, config.tied_head, source, count, separate_experts=False)


def _llada2_parts(config: TransformerConfig) -> Iterator[tuple[str, Parts]]:
    experts = config.experts
    for name, sources in llada2.layout(config).parts():
        if experts is not None and ".experts_" in name:
            block, (outputs, width) = f"blk.{name.split('.')[1]}.", next(iter(sources.values()))
            halves = ("gate", "up") if name.endswith("gate_up") else ("down",)
            names = (f"{block}ffn_{half}_exps.weight" for half in halves)
            yield name, dict.fromkeys(names, (experts.count, outputs, width))
        else:
            yield name, {_name(source): shape for source, shape in sources.items()}


def _name(published: str) -> str:
    before, _, rest = published.removeprefix("model.layers.").partition(".")
    if rest == "mlp.gate.expert_bias":
        return f"blk.{before}.exp_probs_b.bias"
    if not before.isdecimal():
        return f"{_NAMES[published.removesuffix('.weight')]}.weight"
    return f"blk.{before}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def published(config: TransformerConfig, kind: str) -> Layout:
    """The tensors under their published names."""
    if kind == LLADA:
        return llada.layout(config)
    if kind == LLADA2:
        return llada2.layout(config)
    return hf.layout(config, hf_experts.LLADA_MOE if kind == LLADA_MOE else "")


def turned(config: TransformerConfig, source: str, rows: torch.Tensor) -> torch.Tensor | None:
    """A tensor of LLaDA2 in our order of rows; None: it has that order."""
    name = _TURNED.get(source.split(".")[-2])
    if name is None or config.rope_scaling is None:
        return None
    return llada2.turned(config, name, rows)


def _refuse(file: GgufFile, field: str, expectation: str, actual: object) -> None:
    raise NotImplementedError(message(OP, f"{file.name}: {field}", expectation, shown(actual)))
