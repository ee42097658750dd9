"""Gemma 2: configuration of published folders, and of GGUF files. Its tensors have the names of Gemma 3's.

Layers are those of Gemma 3 without norms over heads of q and k. Every second layer sees the whole text, all have one
rotation, and scores of attention and logits are capped.

Sources: transformers, models/gemma2; github.com/ggml-org/llama.cpp, src/models/gemma2.cpp and convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkernels.models.architectures.config import TransformerConfig
from pdkernels.models.architectures.rope import RopeScaling
from pdkernels.models.checkpoints import gemma3
from pdkernels.models.checkpoints.gguf_windows import check_one_base
from pdkernels.models.checkpoints.gguf_windows import windows_of as windows_of_keys
from pdkernels.models.checkpoints.hf_rope import read_rope
from pdkernels.models.checkpoints.hf_windows import layer_kinds, windows_of
from pdkernels.models.files.fields import Fields, read_from
from pdkernels.models.files.gguf_keys import Keys

MODEL_TYPE = GGUF = "gemma2"
_27B = 46
"""Its layers: its queries are scaled by another size than that of a head, which GGUF files do not say."""
EVERY = 2
"""Each layer of this number sees the whole text, where config.json names no layers."""
ATTENTION_CAP, LOGITS_CAP = 50.0, 30.0


def from_gemma2_config(config: Mapping[str, Any]) -> TransformerConfig:
    """The `TransformerConfig` of a parsed `config.json`, of transformers 4 or 5. Raises as `from_hf_config`.

    >>> sizes = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    >>> config = from_gemma2_config({"model_type": "gemma2", **sizes, "sliding_window": 16})
    >>> [None if window is None else window.size for window in config.windows], config.attention_softcap, config.logits_softcap
    ([16, None, 16], 50.0, 30.0)
    """
    fields = Fields(config)
    gemma3.require(fields)
    kinds = layer_kinds(fields, fields.integer("num_hidden_layers"), EVERY)
    positions = fields.integer("max_position_embeddings", 8192)
    with read_from("config.json"):
        theta, scaling = read_rope(fields, positions, False, None, gemma3.LOCAL_THETA)
        return TransformerConfig(
            **gemma3.sizes_of(fields),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=positions if scaling is None else scaling.reach(positions),
            windows=windows_of(fields, kinds, 4096),
            **gemma3.caps_of(fields, ATTENTION_CAP, LOGITS_CAP),
        )


def from_keys(fields: Keys, vocab_size: int, scaling: RopeScaling | None, tied: bool) -> TransformerConfig:
    """The `TransformerConfig` of a GGUF file's keys."""
    check_one_base(fields)
    given = Fields(fields.given, fields.where)  # keys that are absent have defaults of this architecture
    size = given.integer("attention.sliding_window", 4096)
    return TransformerConfig(
        **gemma3.sizes_of_keys(fields, vocab_size, tied, _27B),
        rope_theta=fields.number("rope.freq_base", above=0),
        rope_scaling=scaling,
        windows=windows_of_keys(fields, size, EVERY),
        **gemma3.caps_of(given, ATTENTION_CAP, LOGITS_CAP),
    )
