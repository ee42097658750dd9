"""RoPE settings of a config.json, with the precedence that transformers gives to the fields.

Source: `RotaryEmbeddingConfigMixin` and `ROPE_INIT_FUNCTIONS` in transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pdkernels.models.architectures.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from pdkernels.models.files.fields import Fields, demand, shown

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MINISTRAL3: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GPT_OSS: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What their classes mean by a config.json without rope_parameters."""


def read_rope(
    fields: Fields, max_positions: int, scaled_queries: bool, default: Mapping[str, Any] | None, base: float = 10000.0
) -> tuple[float, RopeScaling | None]:
    """The base and the scaling rule.

    `rope_scaling` replaces `rope_parameters` as a whole, even its `rope_theta`. Inside, `rope_type` precedes `type`,
    and `rope_theta` the field of that name outside; `original_max_position_embeddings` outside precedes the one inside.
    `default`: what is meant without either. `base`: without a `rope_theta`. `scaled_queries`: the
    model reads `llama_4_scaling_beta`.
    """
    where = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.part(where)
    if default is not None and where not in fields.values:
        rope = Fields(default, rope.where)
    for name, value in rope.values.items():
        # Models with sliding windows have a rule for each type of layer.
        demand(not isinstance(value, Mapping), f"{where}: {shown(name)}", "be one value for all layers", shown(value))
    for share in (rope.number("partial_rotary_factor", 1.0), fields.number("partial_rotary_factor", 1.0, null=1.0)):
        demand(share == 1.0, "partial_rotary_factor", "be 1", share)
    theta = rope.number("rope_theta", fields.number("rope_theta", base, above=0, null=base), above=0)
    original = "original_max_position_embeddings"
    if original in fields.given:
        rope = Fields({**rope.given, original: fields.given[original]}, rope.where)
    return theta, _scaling(rope, max_positions, scaled_queries)


def require_no_rule(fields: Fields, theta: float, share: float = 1.0) -> None:
    """Refuses a rule that says anything but what its class reads outside of one: the base, and the `share` of a head that
    turns. transformers 5 writes both into a rule as well."""
    same = {"rope_theta": theta, "rope_type": "default", "type": "default", "partial_rotary_factor": share}
    for where in ("rope_parameters", "rope_scaling"):
        for name, value in fields.part(where).values.items():
            expectation = f"be {same[name]}, as outside" if name in same else "be absent"
            demand(name in same and value == same[name], f"{where}: {shown(name)}", expectation, shown(value))


def _scaling(rope: Fields, max_positions: int, scaled_queries: bool) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    demand(kind in ROPE_TYPES, "rope_type", f"be one of {', '.join(ROPE_TYPES)}", shown(kind))
    beta = rope.number("llama_4_scaling_beta", 0.0, minimum=0)
    demand(beta == 0 or kind == "yarn", "llama_4_scaling_beta", "be 0 without rope_type 'yarn'", beta)
    demand(beta == 0 or scaled_queries, "llama_4_scaling_beta", "be 0 except in Ministral3 models", beta)
    if kind == "default":
        return None
    rope.require(("factor",))
    factor = rope.number("factor", above=0) if kind == "yarn" else rope.number("factor", minimum=1)
    if kind == "linear":
        return LinearScaling(factor)
    original = rope.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        rope.require(("low_freq_factor", "high_freq_factor"))
        return Llama3Scaling(factor, original, rope.number("low_freq_factor"), rope.number("high_freq_factor"))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(max(factor, 1.0)) + 1.0

    one, scale_all = (rope.number(name, 0.0, minimum=0, null=0.0) for name in ("mscale", "mscale_all_dim"))
    default = magnitude(one) / magnitude(scale_all) if one and scale_all else magnitude(1.0)
    return YarnScaling(
        factor=factor,
        original_positions=original,
        beta_fast=rope.number("beta_fast", 32.0, above=0, null=32.0),
        beta_slow=rope.number("beta_slow", 1.0, above=0, null=1.0),
        attention_factor=rope.number("attention_factor", default, above=0, null=default),
        query_beta=beta,
        truncate=rope.flag("truncate", True, null=False),
    )
