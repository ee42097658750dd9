"""What the keys of a GGUF file mean where it lacks them: what they mean to llama.cpp b11549, or an error where that
refuses the file.

Source: `src/llama-model.cpp`, `src/llama-vocab.cpp` and `src/models/*.cpp` of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkernels.models.files.fields import Fields

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0, 0.0),
    "expert_gating_func": (1,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "interleave_moe_layer_step": (1, 0),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "logit_scale": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys and their supported values, of which the first is meant without the key; any other needs a different
computation."""

REQUIRED = object()


def _head_width(keys: Keys) -> int:
    return max(keys.integer("embedding_length") // keys.integer("attention.head_count"), 1)


def _head_dim(keys: Keys) -> int:
    return keys.integer("attention.key_length")


def _eos(keys: Keys) -> int | None:
    """llama.cpp's end token of byte-level BPE, wherever the vocabulary is large enough."""
    return (
        11 if keys.get("tokenizer.ggml.model") == "gpt2" and len(keys.get("tokenizer.ggml.tokens") or ()) > 11 else None
    )


def _begins(keys: Keys) -> bool:
    by_model = keys.get("tokenizer.ggml.model") == "gemma4"
    return by_model or keys.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3", "lfm2")


_MARKS = """
    eot eom unknown seperator padding cls mask fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep prefix suffix middle
""".split()
ABSENT: Mapping[str, Any] = {
    "general.architecture": REQUIRED,
    "general.alignment": 32,
    "diffusion.shift_logits": True,
    "split.count": 0,
    # Of the architecture. Without sizes llama.cpp takes 0, which no tensor fits.
    "context_length": REQUIRED,
    "embedding_length": REQUIRED,
    "embedding_length_per_layer_input": REQUIRED,
    "block_count": REQUIRED,
    "feed_forward_length": REQUIRED,
    "attention.head_count": REQUIRED,
    "attention.head_count_kv": lambda keys: keys.get("attention.head_count"),
    "attention.key_length": _head_width,
    "attention.value_length": _head_width,
    "attention.key_length_swa": REQUIRED,
    "attention.value_length_swa": REQUIRED,
    "attention.shared_kv_layers": 0,
    "attention.layer_norm_rms_epsilon": REQUIRED,
    "attention.sliding_window": 0,
    "attention.sliding_window_pattern": None,  # the architecture has a period
    "rope.dimension_count": _head_dim,
    "rope.dimension_count_swa": lambda keys: keys.integer("attention.key_length_swa"),
    "rope.dimension_sections": REQUIRED,
    "rope.freq_base": 10000.0,
    "rope.freq_base_swa": 10000.0,
    "final_logit_softcapping": 0.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": lambda keys: keys.get("rope.scale_linear"),
    "rope.scale_linear": 0.0,  # which means 1
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.original_context_length": 0,  # which means context_length
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "expert_count": 0,
    "expert_group_used_count": 0,
    "expert_used_count": REQUIRED,
    "expert_feed_forward_length": lambda keys: keys.integer("feed_forward_length") // keys.integer("expert_used_count"),
    "ssm.conv_kernel": REQUIRED,
    "ssm.inner_size": REQUIRED,
    "ssm.state_size": REQUIRED,
    "ssm.time_step_rank": REQUIRED,
    "ssm.group_count": REQUIRED,
    "full_attention_interval": 4,
    "attention.recurrent_layers": None,  # by full_attention_interval
    "shortconv.l_cache": REQUIRED,
    **{name: allowed[0] for name, allowed in UNSUPPORTED.items()},
    # Of the tokenizer. llama.cpp refuses a file without one; here its model takes token ids alone.
    "tokenizer.ggml.tokens": None,
    # A file must name these two: llama.cpp has no default of the first, and one of the second that fits no model here.
    "tokenizer.ggml.model": None,
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.merges": REQUIRED,
    "tokenizer.ggml.scores": REQUIRED,
    "tokenizer.ggml.add_space_prefix": lambda keys: keys.get("tokenizer.ggml.model") == "llama",
    "tokenizer.ggml.token_type": None,  # all are normal
    "tokenizer.ggml.eos_token_id": _eos,
    # To llama.cpp it is 11 too. Here a file whose texts begin with it must name it.
    "tokenizer.ggml.bos_token_id": None,
    **{f"tokenizer.ggml.{mark}_token_id": None for mark in _MARKS},
    "tokenizer.ggml.add_bos_token": _begins,
    "tokenizer.ggml.add_eos_token": False,
    "tokenizer.chat_template": None,
    "tokenizer.chat_templates": (),
}


class Keys(Fields):
    """The keys of a file, or those of its architecture without that name. Every default is one of `ABSENT`.

    >>> Keys({"embedding_length": 64, "attention.head_count": 4}).integer("attention.value_length")
    16
    """

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.values:
            return self.values[name]
        meant = ABSENT[name]
        if meant is REQUIRED:
            self.require([name])
        return meant(self) if callable(meant) else meant

    def token(self, name: str, below: int, default: int | None = None) -> int | None:
        return super().token(name, below, self.get(name))

    def texts(self, name: str) -> list[str]:
        if name not in self.values:
            return list(self.get(name) or ())
        return super().texts(name)

    def _found(self, name: str, default: Any, null: Any) -> Any:
        return self.get(name)
