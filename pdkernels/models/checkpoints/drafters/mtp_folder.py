"""The layers for multi-token prediction in the folder of a model: MiMo (dense) and Qwen3.5 (dense).

Sources: the released code and checkpoints of MiMo (``model.mtp_layers.0.*``, hidden state first) and of Qwen3.5
(``mtp.*``, embedding first). Neither stores an embedding or a head for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from pdkernels._validation import check, check_type
from pdkernels.models.architectures.hybrid import HybridConfig
from pdkernels.models.checkpoints import hybrid_hf
from pdkernels.models.checkpoints.hf import MIMO, MTP_LAYERS, from_hf_config
from pdkernels.models.checkpoints.hf_language import language_fields
from pdkernels.models.drafters.mtp import MtpConfig
from pdkernels.models.drafters.parts import layer_parts
from pdkernels.models.files.fields import OP, Fields, demand, shown
from pdkernels.models.files.layout import Layout, Parts, Stored

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Names of the number of layers, in the config.json of a model."""
_KINDS = (MIMO, hybrid_hf.QWEN35, hybrid_hf.QWEN35_TEXT)


def describes(fields: Fields) -> bool:
    """Whether a config.json is that of a model with such layers."""
    return any(name in language_fields(fields).values for name in _COUNTS)


def config_of(fields: Fields, target: Any) -> MtpConfig:
    """The sizes of a head, checked against its target."""
    kind, inner = fields.get("model_type"), language_fields(fields)
    demand(kind in _KINDS, "model_type", f"be one of {', '.join(_KINDS)}, with layers that draft", shown(kind))
    for name in _COUNTS:
        count = inner.integer(name, 1, minimum=0, null=1)
        demand(count == 1, name, "be 1", count)
    demand(not inner.flag("mtp_use_dedicated_embeddings", False), "mtp_use_dedicated_embeddings", "be false", True)
    if kind == MIMO:
        config = MtpConfig(from_hf_config(fields.given), hidden_first=True)
    else:
        config = MtpConfig(hybrid_hf.from_hybrid_config(fields.given))
    body, target_config = config.body, target.config
    holds = hasattr(target, "norm") and hasattr(target, "embed")
    remedy = "Load the folder with pdkernels.models.load."
    check_type(holds, OP, "target", "have a last `norm` and an embedding", type(target).__name__, remedy)
    for name, form in (("hidden_size", "a hidden size of {}"), ("vocab_size", "{} tokens"), ("layers", "{} layers")):
        expected, actual = getattr(target_config, name), getattr(body, name)
        check(actual == expected, OP, "drafter", f"be for {form.format(expected)}, the target's", actual)
    return config


def layout(config: MtpConfig) -> Layout:
    return Layout(partial(_parts, config), 1, "", "", False)


def own(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Those of a model's tensors that belong to the layers."""
    return {name: tensor for name, tensor in stored.items() if name.startswith((MTP_LAYERS, "mtp."))}


def _parts(config: MtpConfig) -> Iterator[tuple[str, Parts]]:
    body, hidden = config.body, config.body.hidden_size
    if isinstance(body, HybridConfig):
        names, inner = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp."
        layer = hybrid_hf.layer_parts(body, "attention", "layers.0.", "mtp.layers.0.")
    else:
        names, inner = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), f"{MTP_LAYERS}0."
        layer = layer_parts(body, "layers.0.", inner, hidden)
    shapes = (hidden,), (hidden,), (hidden, 2 * hidden), (hidden,)
    for name, source_prefix, shape in zip(("embedding_norm", "hidden_norm", "fc", "norm"), names, shapes, strict=True):
        yield name, {f"{inner}{source_prefix}.weight": shape}
    yield from layer
