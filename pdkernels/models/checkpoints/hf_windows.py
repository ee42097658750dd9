"""What rows see, as a config.json says: windows of layers that differ by kind, and the rotations of these kinds."""

from __future__ import annotations

from typing import Any

from pdkernels._validation import check
from pdkernels.models.architectures.windows import MAX_LAYERS, Window
from pdkernels.models.files.fields import OP, Fields, demand, shown

SLIDING, FULL = KINDS = ("sliding_attention", "full_attention")


def require_causal(fields: Fields) -> None:
    """Refuses rows that see later ones: transformers computes these in any of its models where `is_causal` is false or
    null, which is a field of no class."""
    causal = fields.get("is_causal", True)
    demand(bool(causal), "is_causal", "be true", shown(causal))


def require_alike(fields: Fields) -> None:
    """Refuses layers with settings of their own."""
    layers = fields.get("per_layer_config")
    demand(not layers, "per_layer_config", "be absent", shown(layers))


def layer_kinds(fields: Fields, layers: int, every: int) -> list[str]:
    """The kind of each layer. Where config.json names none, each layer of the number `every` sees the whole text."""
    check(layers <= MAX_LAYERS, OP, "config.json: num_hidden_layers", f"be at most {MAX_LAYERS}", layers)
    kinds = fields.get("layer_types")
    if kinds is None:
        return [KINDS[(layer + 1) % every == 0] for layer in range(layers)]
    valid = isinstance(kinds, list) and len(kinds) == layers and all(kind in KINDS for kind in kinds)
    check(valid, OP, "config.json: layer_types", f"name {layers} layers of {', '.join(KINDS)}", shown(kinds))
    return list(kinds)


def windows_of(fields: Fields, kinds: list[str], size: int) -> tuple[Window | None, ...]:
    """Of layers of these kinds; `size` where config.json does not say it."""
    if SLIDING not in kinds:
        return ()
    window = Window(fields.integer("sliding_window", size))
    return tuple(window if kind == SLIDING else None for kind in kinds)


def rules_by_kind(fields: Fields, base: float) -> tuple[Fields, float]:
    """The fields with the rule of layers that see the whole text as their only one, and the base of the others (OLMo
    3).

    A rule outside adds to that of full layers, as its class in transformers reads it, whose versions differ in what a
    base outside is for.
    """
    rules = fields.part("rope_parameters")
    field = next((name for name in rules.values if name not in KINDS), None)
    demand(field is None, f"rope_parameters: {shown(field)}", "be absent beside rules of kinds of layers", "there")
    full, local = (rules.part(kind) for kind in KINDS[::-1])
    outside = fields.number("rope_theta", base, above=0, null=base)
    stated = "rope_theta" in full.values and "rope_theta" in local.values
    demand(stated or outside == base, "rope_theta", f"be {base} or inside the rules of both kinds of layers", outside)
    kind = local.get("rope_type", local.get("type", "default"))
    demand(kind == "default", "rope_type", "be 'default' in layers with a window", shown(kind))
    merged: dict[str, Any] = {"rope_theta": base, **full.values, **fields.part("rope_scaling").values}
    if not full:
        merged.setdefault("rope_type", "default")
    truncate = merged.get("truncate", True)
    read = truncate is True or merged.get("rope_type", merged.get("type")) != "yarn"
    demand(read, "truncate", "be true in rules of kinds, where transformers does not read it", shown(truncate))
    # In rules of kinds the original length is the one inside.
    config = {name: value for name, value in fields.given.items() if name != "original_max_position_embeddings"}
    config |= {"rope_parameters": merged, "rope_scaling": None}
    return Fields(config, fields.where), local.number("rope_theta", base, above=0)
