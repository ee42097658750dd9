"""Runs every causal language model of the installed transformers through `wrap`: it works, or is refused with a reason.

    python scripts/architectures.py                     # all, a few minutes
    python scripts/architectures.py --types llama gpt2  # these anew
    python scripts/architectures.py --types             # the table alone

A model of each type has a small configuration, windows of 8 if it has any, and random weights that are large enough for wrong context to
change its tokens.
Greedy decoding of three prompts at once, token by token and with `jacobi`, is compared with the model's own `generate`. The results
are kept in bench/results/transformers_architectures.json, from which the table in docs/transformers.md is made.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/transformers_architectures.json"
PAGE = ROOT / "docs/transformers.md"
BEGIN, END = "<!-- architectures -->", "<!-- /architectures -->"
V = 128
WHOLE = ("gemma4_assistant", "gemma4_unified_assistant")  # whose default configurations are not valid
PROMPTS = [[5, 9, 33, 17, 70], [3, 4, 50, 61, 7, 8, 90, 11, 12, 77, 14], [41, 42, 43]]
LAYERS = 4
# The small value of a field, wherever a configuration has it.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "embedding_size_per_layer", "vocab_size_per_layer_input"), V),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_heads", "swa_num_key_value_heads"), 2),
    "swa_num_attention_heads": 4,
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "global_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "dim_ff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length", "max_target_positions"), 128),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 16),
    "q_lora_rank": 32, "v_head_dim": 32,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8), "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_state": 16, "ssm_state_size": 16,
    **dict.fromkeys(("state_size",), 16), "mamba_d_ssm": 128, "mamba_n_groups": 1, "n_groups": 1, "conv_dim": 64,
    **dict.fromkeys(("pad_token_id",), 0), "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": 8, "attention_chunk_size": 8, "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"), 0.0),
    "is_decoder": True, "first_k_dense_replace": 1, "image_size": 32, "patch_size": 8, "num_channels": 3,
}  # fmt: skip
# What a type needs beside or instead: fields that have to fit each other, and layers of every kind that it is known for.
_CONV = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ASSISTANT = {
    "vocab_size": V,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_INDEXED = {
    "indexer_budget": 32,
    "indexer_compress_ratio": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
}
_IMAGES = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}}
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"),
        _IMAGES,
    ),
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
    },
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
    "apertus1p5": {
        "vision_config": {"codebook_size": 16},
        "audio_config": {"codebook_size": 16, "codebook_dim": 64},
        "image_token_offset": 64,
        "audio_token_offset": 80,
    },
    # These hide rows in their own code, so that texts end at their windows.
    "moshi": {"sliding_window": 64},
    "unlimited_ocr": {"text_config": {"sliding_window": 64}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "qwen2_5_omni_thinker": {**_IMAGES, "vision_start_token_id": 5},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 5},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 9}},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots3_note": {"text_config": {"num_key_value_heads": 4, "per_layer_config": {}, "head_dim": 32}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "qk_rope_head_dim": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma4_assistant": {"text_config": {**_ASSISTANT, "num_kv_shared_layers": LAYERS}, "backbone_hidden_size": 64},
    "gemma4_unified_assistant": {"text_config": _ASSISTANT, "backbone_hidden_size": 64},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "gptj": {"rotary_dim": 8},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}}},
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "4/8"},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"] * 2}},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 64}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "lfm2_vl": {"text_config": _CONV},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl": {"text_config": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2}},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "mistral4": {"head_dim": 32},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16]},
}


def named() -> dict[str, str]:
    """Class names by model type: language models, and vision models, whose prompts are text here."""
    from transformers.models.auto import modeling_auto

    both = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    return dict(sorted(both.items()))


def small(config: Any, more: dict[str, Any]) -> dict[str, Any]:
    """The small fields of a default configuration, of the configurations inside it as well."""
    fields: dict[str, Any] = {}
    back = {new: old for old, new in getattr(config, "attribute_map", {}).items()}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            fields[name] = {"model_type": value.model_type, **small(value, {}), **more.pop(name, {})}
            continue
        common = name if name in SMALL else back.get(name)
        if common not in SMALL or (value is None and common in ("sliding_window", "attention_chunk_size")):
            continue
        minimum = SMALL[common]
        if isinstance(value, (list, tuple)):
            fields[name] = [minimum] * len(value)
        else:
            fields[name] = type(value)(minimum) if isinstance(value, (int, float)) else minimum
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "layer_types" in vars(config):
        fields["layer_types"] = _kinds(kinds)
    rules = getattr(config, "rope_parameters", None)
    if isinstance(rules, dict) and rules.get("mrope_section"):
        half = int(fields.get("head_dim", 16) * rules.get("partial_rotary_factor", 1)) // 2
        fields["rope_parameters"] = {**rules, "mrope_section": [half - 2 * (half * 3 // 8), *[half * 3 // 8] * 2]}
    return {**fields, **more}


def _kinds(kinds: list[str]) -> list[str]:
    """Some of every kind."""
    first = list(dict.fromkeys(kinds))[:LAYERS]
    return (first * LAYERS)[:LAYERS]


def build(model_type: str, std: float = 0.15, seed: int = 0) -> Any:
    """A model of the type with random weights."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(seed)
    kind, made = CONFIG_MAPPING[model_type], getattr(transformers, named()[model_type])
    more = copy.deepcopy(MORE.get(model_type, {}))
    config = kind(**(more if model_type in WHOLE else small(kind(), more)))
    wanted = getattr(made, "config_class", None)
    text = config.get_text_config(decoder=True)
    if wanted is not None and not isinstance(config, wanted) and isinstance(text, wanted):
        config = text
    model = made(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=std)
    return model


def verdict(model_type: str) -> tuple[str, str]:
    """ "works"; or "refused", "not built" or "fails" with the reason."""
    result, words = "", ""
    for std in (0.15, 0.4, 1.0):
        try:
            model = build(model_type, std)
        except Exception as error:  # of a library that is not there, or of sizes that do not fit each other
            return "not built", " ".join(str(error).split())[:120]
        result, words = _tried(model)
        if result != "works" or int(words) >= 8:
            break
    return result, "" if result == "works" else words


def _tried(model: Any) -> tuple[str, str]:
    """For one that works, how many different tokens it wrote."""
    import pdkernels as pd
    from pdkernels.integrations.transformers import wrap

    try:
        wrapped = wrap(model)
    except (NotImplementedError, TypeError) as error:
        return ("refused" if str(error).startswith("pdkernels.wrap: ") else "fails"), " ".join(str(error).split())
    settings = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = [model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    for method in ("autoregressive", "jacobi"):
        ours = pd.decoding.generate(wrapped, PROMPTS, method, max_new_tokens=14, end_tokens=()).tokens
        # Some classes end where their configuration says, whatever they are told.
        if [mine.tolist()[: len(text)] for mine, text in zip(ours, theirs)] != theirs or len(min(theirs, key=len)) < 8:
            return "fails", f"{method} writes other tokens than generate"
    return "works", str(len({token for text in theirs for token in text}))


def row(model_type: str) -> dict[str, str]:
    """A model type's class, result and reason."""
    try:
        result, words = verdict(model_type)
    except Exception as error:
        result, words = "fails", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return {"class": named()[model_type], "result": result, "reason": words}


def table(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = found["types"]
    works = sum(item["result"] == "works" for item in rows.values())
    lines = [f"{works} of {len(rows)} types work.", "", "| model type | class | result |", "|---|---|---|"]
    for name, item in sorted(rows.items()):
        reason = item["reason"].removeprefix("pdkernels.wrap: model ").split(" pdkernels.models.from_callable")[0]
        reason = reason.replace(f", got {item['class']},", ":").replace(f", got {item['class']}", ":").rstrip(".: ")
        lines.append(f"| {name} | {item['class']} | {item['result']}{': ' * bool(reason)}{reason.replace('|', '/')} |")
    return "\n".join([*lines, "", f"transformers {found['transformers']}, torch {found['torch']}"])


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--types", nargs="*")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"types": {}}
    for model_type in named() if given.types is None else given.types:
        found |= {"transformers": transformers.__version__, "torch": torch.__version__}
        found["types"][model_type] = row(model_type)
        print(model_type, *found["types"][model_type].values(), flush=True)
        found["types"] = dict(sorted(found["types"].items()))
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}\n{table(found)}\n{after}")


if __name__ == "__main__":
    main()
