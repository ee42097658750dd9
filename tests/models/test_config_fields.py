"""Every field of transformers' config classes, and two spellings of one setting: its logits, or the field is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels import models

transformers = pytest.importorskip(
    "transformers", reason="compares with the configs of transformers 5", minversion="5.15"
)

MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
GEMMAS, HYBRIDS = ("gemma2", "gemma3_text", "gemma4_text"), ("qwen3_5_text", "lfm2")
KINDS = ("llama", "qwen2", "qwen3", "mistral", "ministral3", "olmo2", "olmo3", *MIXTURES, *GEMMAS, *HYBRIDS)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
BETA = {"llama_4_scaling_beta": 0.1}


def base(kind: str) -> dict[str, Any]:
    fields: dict[str, Any] = dict(
        model_type=kind,
        architectures=[f"{kind.capitalize()}ForCausalLM"],
        vocab_size=23,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=20,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    if kind == "ministral3":
        fields["rope_parameters"] = {**YARN, "rope_theta": 100.0, **BETA}
    if kind == "qwen3_moe":
        fields |= {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}
    if kind == "olmoe":
        fields |= {"num_experts": 5, "num_experts_per_tok": 2}
    if kind in ("mixtral", "gpt_oss"):
        fields |= {"num_local_experts": 5, "num_experts_per_tok": 2}
    if kind.startswith("olmo"):
        fields["eos_token_id"] = 5
    if kind == "olmo3":
        rule = fields["rope_parameters"]
        fields |= {"rope_parameters": {"full_attention": rule, "sliding_attention": dict(rule)}, "sliding_window": 4}
    if kind in GEMMAS:
        fields |= {
            "sliding_window": 4,
            "query_pre_attn_scalar": 12,
            "eos_token_id": 5,
            "pad_token_id": 0,
            "bos_token_id": 2,
        }
    if kind in ("olmo3", *GEMMAS):
        fields["layer_types"] = ["sliding_attention", "full_attention"]
    if kind in ("gemma3_text", "gemma4_text"):
        rule = fields["rope_parameters"]
        fields["rope_parameters"] = {"full_attention": dict(rule), "sliding_attention": {**rule, "rope_theta": 30.0}}
    if kind == "gemma4_text":
        fields |= {
            "head_dim": 16,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 23,
        }
    if kind == "qwen3_5_text":
        fields["layer_types"] = ["linear_attention", "full_attention"]
        fields["rope_parameters"] = {**fields["rope_parameters"], "partial_rotary_factor": 0.5}
        fields |= {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
    if kind == "lfm2":
        fields |= {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, "intermediate_size": 40}
        del fields["head_dim"]
    return fields


def written(fields: dict[str, Any], folder: Path) -> torch.Tensor | None:
    """Writes a random checkpoint whose config.json holds these fields; the logits, None if transformers refuses it."""
    text = json.dumps(fields)
    (folder / "config.json").write_text(text)
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(text)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            model.config.return_dict = True  # models of transformers 5.15 to 5.24 fail without it
            logits: torch.Tensor = model(TOKENS).logits
            return logits
    except Exception:
        return None


def check(fields: dict[str, Any], named: tuple[str, ...], folder: Path) -> str:
    """ "equal", or "refused" if the error names one of these fields."""
    expected = written(fields, folder)
    try:
        ours = models.load(folder, dtype=torch.float32)
    except (ValueError, NotImplementedError) as error:
        assert str(error).startswith("pdkernels.models.load: ")
        assert expected is None or any(name in str(error) for name in named), error
        return "refused"
    if expected is None:  # its class fails without this number, which is then 0
        rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        assert fields["model_type"] == "ministral3" and "llama_4_scaling_beta" not in rope
        return "equal"
    torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-4, atol=2e-4)
    return "equal"


VALUES: dict[str, list[Any]] = {
    "vocab_size": [29],
    "hidden_size": [24],
    "intermediate_size": [36],
    "num_hidden_layers": [3],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4, None],
    "head_dim": [16, None],
    "hidden_act": ["gelu", "relu", "swish"],
    "max_position_embeddings": [16, 4096],
    "rms_norm_eps": [0.1],
    "tie_word_embeddings": [True],
    "attention_bias": [True],
    "mlp_bias": [True],
    "sliding_window": [4, 64, 4096, None],
    "use_sliding_window": [True],
    "max_window_layers": [0, 1],
    "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"], ["sliding_attention"] * 2, ["chunked_attention"] * 2],
    "rope_parameters": [None, {}, YARN, {**YARN, "rope_theta": 50.0}, LLAMA3, {"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "linear", "type": "yarn", "factor": 2.0}, {**YARN, "attention_factor": 1.3, "beta_fast": 4, "beta_slow": 2},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, {**YARN, "truncate": False}, {**YARN, **BETA}, {"full_attention": {"rope_type": "linear", "factor": 2.0}}],
    "attention_dropout": [0.5],
    "initializer_range": [0.5],
    "use_cache": [False],
    "is_causal": [False, None, True],  # of no class
    "pretraining_tp": [2],
    "pad_token_id": [3],
    "bos_token_id": [4],
    "eos_token_id": [5, [5, 6]],
    "dtype": ["bfloat16"],
    "chunk_size_feed_forward": [2],
    "return_dict": [False],
    "output_hidden_states": [True],
    "is_encoder_decoder": [True],
    "problem_type": ["regression"],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "architectures": [["SomethingElse"]],
    "transformers_version": ["4.40.0"],
}  # fmt: skip

EXPERTS: dict[str, list[Any]] = {
    "num_experts": [4, 0],
    "num_local_experts": [4],
    "num_experts_per_tok": [1, 9],
    "moe_intermediate_size": [12],
    "norm_topk_prob": [False],
    "decoder_sparse_step": [2, 3],
    "mlp_only_layers": [[0], [0, 1], [5], [-1], None],
    "output_router_logits": [True],
    "router_aux_loss_coef": [0.5],
    "router_jitter_noise": [0.5],
    "swiglu_alpha": [1.0],
    "swiglu_limit": [0.5],
    "shared_expert_intermediate_size": [0],
    "clip_qkv": [0.1, None],
}
"""Of the classes in `MIXTURES` alone."""

S, F = "sliding_attention", "full_attention"
_NORMED: dict[str, list[Any]] = {
    "hidden_activation": ["silu", "gelu", None],
    "query_pre_attn_scalar": [8, 0.5],
    "final_logit_softcapping": [None, 2.5, 0.5],
    "attn_logit_softcapping": [None, 1.5],
    "use_bidirectional_attention": [True, False, None],
}
_RULES: list[Any] = [
    None,
    {},
    {F: {"rope_type": "default", "rope_theta": 50.0}, S: {"rope_type": "default"}},
    {F: {"rope_type": "linear", "factor": 2.0}, S: {"rope_type": "default", "rope_theta": 30.0}},
    {F: {"rope_type": "default", "rope_theta": 50.0}, S: {"rope_type": "linear", "factor": 2.0}},
    {F: {**YARN, "rope_theta": 50.0}, S: {"rope_type": "default", "rope_theta": 30.0}},
    {F: {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}, S: {"rope_type": "default", "rope_theta": 30.0}},
    {F: {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.5}, S: {"rope_type": "default", "rope_theta": 30.0}},
    {F: {"rope_type": "proportional", "rope_theta": 50.0, "factor": 2.0}, S: {"rope_type": "default", "rope_theta": 30.0}},
    {F: {"rope_type": "default", "rope_theta": 50.0}},
    {S: {"rope_type": "default", "rope_theta": 50.0}},
]  # fmt: skip
FAMILIES: dict[str, dict[str, list[Any]]] = {
    **dict.fromkeys(MIXTURES, EXPERTS),
    "gemma2": _NORMED,
    "gemma3_text": {**_NORMED, "sliding_window_pattern": [1, 2], "rope_parameters": _RULES, "rope_local_base_freq": [7.0]},
    "gemma4_text": {
        **_NORMED,
        "use_bidirectional_attention": ["all", "vision", None],
        "rope_parameters": _RULES,
        "global_head_dim": [32, None],
        "num_global_key_value_heads": [1, 4],
        "vocab_size_per_layer_input": [40],
        "hidden_size_per_layer_input": [0, 12],
        "attention_k_eq_v": [True],
        "num_kv_shared_layers": [1, 2],
        "enable_moe_block": [True],
        "use_double_wide_mlp": [True],
        "num_experts": [4],
        "top_k_experts": [2],
        "moe_intermediate_size": [12],
        "per_layer_config": [{}, {"1": {"head_dim": 32}}, {"1": {"num_key_value_heads": 1}}, {"0": {"head_dim": 32}}],
    },
    "qwen3_5_text": {
        "layer_types": [["linear_attention"] * 2, [F] * 2, [S, F], None],
        "linear_conv_kernel_dim": [1, 2, 3],
        "linear_key_head_dim": [8, 32],
        "linear_value_head_dim": [8, 32],
        "linear_num_key_heads": [1, 4],
        "linear_num_value_heads": [2, 6],
        "full_attention_interval": [1, 2],
        "attn_output_gate": [False],
        "partial_rotary_factor": [0.25, 1.0],
        "mtp_num_hidden_layers": [1],
        "mlp_only_layers": [[0]],
    },
    "lfm2": {
        "norm_eps": [0.1],
        "layer_types": [["conv"] * 2, [F] * 2, [F, "conv"], None],
        "conv_bias": [True],
        "conv_L_cache": [1, 2, 4, 5],
        "block_multiple_of": [16, 7],
        "block_ffn_dim_multiplier": [0.5, 1.3],
        "block_auto_adjust_ff_dim": [False],
        "full_attn_idxs": [[0], []],
        "block_ff_dim": [60],
        "tie_embedding": [False],
    },
}  # fmt: skip

PAIRS: dict[str, dict[str, Any]] = {
    "a recipe beside rope_parameters": {"rope_scaling": YARN},
    "a recipe with its base": {"rope_scaling": {**YARN, "rope_theta": 100.0}},
    "a recipe of old": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None, "rope_theta": 50.0},
    "two rules": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": YARN},
    "an empty rule": {"rope_scaling": {}},
    "no rule": {"rope_scaling": None},
    "a base outside": {"rope_theta": 7.0, "rope_parameters": None},
    "a base in both places": {"rope_theta": 7.0},
    "a base outside a rule": {"rope_theta": 7.0, "rope_scaling": YARN},
    "a base outside rope_parameters without one": {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}},
    "the original length outside": {"original_max_position_embeddings": 4, "rope_scaling": YARN},
    "the original length outside alone": {"original_max_position_embeddings": 4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "the original length nowhere": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "the original length outside, llama3": {"original_max_position_embeddings": 4, "rope_scaling": LLAMA3},
    "two types": {"rope_scaling": {**YARN, "type": "linear"}},
    "a share outside": {"partial_rotary_factor": 0.5, "rope_scaling": YARN},
    "a share inside": {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
    "two dtypes": {"dtype": "float32", "torch_dtype": "bfloat16"},
    "no window in use": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "a window in one layer": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "types against max_window_layers": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": ["full_attention"] * 2},
    "types of other layers": {"layer_types": ["full_attention"] * 3},
    "types without a switch": {"use_sliding_window": False, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
    "other names": {"num_kv_heads": 1, "n_positions": 9, "n_layer": 5, "n_head": 2},
    "one layer with settings of its own": {"per_layer_config": {"1": {"sliding_window": 4}}},
    "heads of another size": {"per_layer_config": {"1": {"intermediate_size": 12}}},
}  # fmt: skip
MISSING = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings")  # fmt: skip


def cases() -> list[Any]:
    found = []
    for kind in KINDS:
        fast = kind in ("qwen2", "ministral3")
        every = [(f"{field}={value}"[:60], {field: value}) for field, values in VALUES.items() for value in values]
        more = [
            (f"{field}={value}"[:60], {field: value})
            for field, values in FAMILIES.get(kind, {}).items()
            for value in values
        ]
        found += [pytest.param(kind, changes, id=f"{kind}-{name}") for name, changes in more]
        for name, changes in [*every, *PAIRS.items(), *((f"no {field}", {field: ...}) for field in MISSING)]:
            touchy = any(part in name for part in ("rope", "window", "heads", "head_dim", "layer_types", "length", "no ", "base", "bias", "causal"))  # fmt: skip
            marks = [] if fast and touchy else [pytest.mark.slow]
            found.append(pytest.param(kind, changes, id=f"{kind}-{name}", marks=marks))
    return found


@pytest.mark.covering
@pytest.mark.parametrize(("kind", "changes"), cases())
@pytest.mark.filterwarnings("ignore")
def test_logits_are_those_of_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    fields = {name: value for name, value in {**base(kind), **changes}.items() if value is not ...}
    parts = [value for value in changes.values() if isinstance(value, dict)]
    parts += [inner for part in parts for inner in part.values() if isinstance(inner, dict)]
    inside = [key for part in parts for key in part]
    named = (*changes, *inside, *(f"{name}_" for name in changes), "sliding_window", "kv_heads")
    check(fields, named, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "size"), [("qwen3", 128), ("qwen3_moe", 8), ("llama", 8)])
def test_an_absent_width_of_heads_is_that_of_the_class(kind: str, size: int, tmp_path: Path) -> None:
    """transformers itself writes Qwen3-MoE folders without one."""
    fields = base(kind)
    del fields["head_dim"]
    assert check(fields, (), tmp_path) == "equal"
    config = models.load(tmp_path, dtype=torch.float32).config
    assert config.head_dim == size


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_is_left_out(kind: str) -> None:
    config = type(transformers.AutoConfig.for_model(kind))
    known = {*VALUES, *FAMILIES.get(kind, ())}
    assert {field.name for field in dataclasses.fields(config)} <= known, {
        field.name for field in dataclasses.fields(config)
    } - known


NAMED = ["deepseek_v3", "opt", "falcon", "bloom", "mpt", "rwkv", "cohere", "cohere2", "gpt2"]


@pytest.mark.parametrize("kinds", [NAMED, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_no_model_of_transformers_ends_in_a_foreign_error(kinds: list[str] | None, tmp_path: Path) -> None:
    """Every model type, with the config.json that its class writes."""
    refused, every = 0, list(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    for kind in kinds or every:
        try:
            fields = transformers.AutoConfig.for_model(kind).to_dict()
        except Exception:
            fields = {}
        (tmp_path / "config.json").write_text(json.dumps({**fields, "model_type": kind}, default=str))
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            models.load(tmp_path)
        assert str(caught.value).startswith("pdkernels.models.load: ") and "\n" not in str(caught.value)
        refused += "model_type must be one of" in str(caught.value) or "quantization_config" in str(caught.value)
    assert refused > (200 if kinds is None else len(kinds) - 1)


def test_the_limit_of_yarn(tmp_path: Path) -> None:
    """The factor times the original length, as in vLLM, but no less than max_position_embeddings, which some files extend."""
    for scaling, expected in (
        ({**YARN, "factor": 16.0}, 128),
        (YARN, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({**YARN, "factor": 1.0}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 64),
    ):
        assert models.from_hf_config({**base("qwen2"), "rope_scaling": scaling}).max_positions == expected
