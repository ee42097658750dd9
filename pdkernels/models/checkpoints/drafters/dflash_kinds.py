"""What DSpark, DFlash 2 and XPress add to the folder of a DFlash head: fields of config.json, and tensors.

Sources: speculators 0.9 (models/dspark, models/dflash2, models/xpress), and for released DFlash 2 checkpoints Z Lab's code, which has the
same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pdkernels._validation import message
from pdkernels.models.drafters.dflash import DFlashConfig, DFlashHead
from pdkernels.models.drafters.dflash2 import DFlash2Config, DFlash2Head
from pdkernels.models.drafters.dspark import MIXES, DSparkConfig, DSparkHead, MarkovKind
from pdkernels.models.drafters.xpress import XPressConfig, XPressHead
from pdkernels.models.files.fields import OP, Fields, demand, shown
from pdkernels.models.files.layout import Parts

DSPARK, DFLASH2, XPRESS = "dspark", "dflash2", "xpress"
KINDS = ("dflash", DSPARK, DFLASH2, XPRESS)
"""Values of ``speculators_model_type``."""

_DSPARK_FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_DFLASH2_FIELDS = {
    "conv_kernel_size": "conv_taps",
    "conv_group_size": "conv_group",
    "selector_rank": "selector_rank",
    "selector_top_k": "candidates",
}
_XPRESS_FIELDS = {"xpress_rank": "refiner_rank", "xpress_mlp_ratio": "refiner_ratio", "num_jacobi_passes": "passes"}
OWN_FIELDS: dict[str, tuple[str, ...]] = {
    DSPARK: _DSPARK_FIELDS,
    DFLASH2: tuple(_DFLASH2_FIELDS),
    XPRESS: tuple(_XPRESS_FIELDS),
}

_BOOKKEEPING = (
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "speculators_version", "model_type",
    "speculators_model_type", "speculators_config", "transformer_layer_config", "tie_word_embeddings", "use_cache",
    "quantization_config", "compression_config", "_name_or_path", "has_no_defaults_at_init", "is_composition",
    "attribute_map", "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "keys_to_ignore_at_inference",
    "sub_configs", "base_config_key", "_auto_class", "auto_package", "registry_auto_discovery", "schema_discriminator",
    "model_config", "embed_requires_grad", "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type",
)  # fmt: skip
"""Fields that say nothing of the forward: versions, training, how servers verify."""


def refuse_others(fields: Fields, supported: tuple[str, ...]) -> None:
    """Refuses what is neither supported nor bookkeeping: another version of the format may mean anything by it."""
    for name, value in fields.values.items():
        if name not in supported and name not in _BOOKKEEPING:
            expectation = "be absent: what it means is not known here"
            raise NotImplementedError(message(OP, f"{fields.where}: {shown(name)}", expectation, shown(value)))


def config_class(kind: str) -> type[DFlashConfig]:
    return {DSPARK: DSparkConfig, DFLASH2: DFlash2Config, XPRESS: XPressConfig}.get(kind, DFlashConfig)


def new_head(config: DFlashConfig) -> DFlashHead:
    if isinstance(config, DSparkConfig):
        return DSparkHead(config)
    if isinstance(config, XPressConfig):
        return XPressHead(config)
    return DFlash2Head(config) if isinstance(config, DFlash2Config) else DFlashHead(config)


def kind_of(config: DFlashConfig) -> str:
    kinds = {DSparkConfig: DSPARK, DFlash2Config: DFLASH2, XPressConfig: XPRESS}
    return next((kind for own, kind in kinds.items() if isinstance(config, own)), "dflash")


def own_options(kind: str, fields: Fields) -> dict[str, Any]:
    """Arguments of the config's class beside those of `DFlashConfig`. What is absent has speculators' default."""
    if kind == DSPARK:
        markov = fields.get("markov_head_type", "vanilla")
        kinds = get_args(MarkovKind)
        demand(markov in kinds, "markov_head_type", f"be one of {', '.join(kinds)}", shown(markov))
        return {
            "markov_rank": fields.integer("markov_rank", 256, minimum=0),
            "markov_kind": markov,
            "confidence": fields.flag("enable_confidence_head", True),
            "confidence_reads_token": fields.flag("confidence_head_with_markov", True),
        }
    if kind == DFLASH2:
        defaults = {"conv_taps": 2, "conv_group": 16, "selector_rank": 256, "candidates": 16}
        return {option: fields.integer(name, defaults[option]) for name, option in _DFLASH2_FIELDS.items()}
    if kind == XPRESS:
        defaults = {"refiner_rank": 256, "refiner_ratio": 2, "passes": 6}
        return {option: fields.integer(name, defaults[option], minimum=0) for name, option in _XPRESS_FIELDS.items()}
    return {}


def written_options(config: DFlashConfig) -> dict[str, Any]:
    """The inverse of `own_options`."""
    if isinstance(config, DSparkConfig):
        values = (config.markov_rank, config.markov_kind, config.confidence, config.confidence_reads_token)
        return dict(zip(_DSPARK_FIELDS, values, strict=True))
    if isinstance(config, DFlash2Config):
        return {name: getattr(config, option) for name, option in _DFLASH2_FIELDS.items()}
    if isinstance(config, XPressConfig):
        return {name: getattr(config, option) for name, option in _XPRESS_FIELDS.items()}
    return {}


def layer_additions(config: DFlashConfig, prefix: str, source_prefix: str) -> Iterator[tuple[str, Parts]]:
    """Our parameters of a layer beside those of Qwen3's, and their parts."""
    if not isinstance(config, DFlash2Config):
        return
    taps, width = config.conv_taps, config.body.hidden_size
    for sublayer in ("attention", "mlp"):
        source = f"{source_prefix}{sublayer}_conv."
        yield f"{prefix}{sublayer}_taps", {f"{source}base_kernel": (2, taps, width)}
        rows = 2 * taps * (width // config.conv_group)
        yield f"{prefix}{sublayer}_row_taps", {f"{source}kernel_projection.weight": (rows, width)}


def head_additions(config: DFlashConfig) -> Iterator[tuple[str, Parts]]:
    """Our parameters after the layers beside those of DFlash, and their parts."""
    vocabulary, width = config.body.vocab_size, config.body.hidden_size
    if isinstance(config, DFlash2Config):
        source, rank = "candidate_selector.", config.selector_rank
        yield "predecessors", {f"{source}predecessor_codebook": (vocabulary, rank)}
        yield "successors", {f"{source}successor_codebook": (vocabulary, rank)}
        yield "selector_in", {f"{source}hidden_projection.weight": (rank, width)}
    if isinstance(config, XPressConfig):
        source, rank, size = "refiner_head.", config.refiner_rank, config.block_size
        inner = rank * config.refiner_ratio
        yield "refiner_tokens", {f"{source}token_embed.weight": (vocabulary, rank)}
        yield "refiner_row", {f"{source}down_h.weight": (rank, width)}
        yield "refiner_block", {f"{source}down_g.weight": (rank, width)}
        yield "refiner_in", {f"{source}in_proj.weight": (rank, 3 * rank)}
        yield "refiner_mix", {f"{source}mix_l": (rank, size, size)}
        yield "refiner_gate_up", {f"{source}mlp_{name}.weight": (inner, rank) for name in ("gate", "up")}
        yield "refiner_down", {f"{source}mlp_down.weight": (rank, inner)}
        yield "refiner_out", {f"{source}readout.weight": (config.draft_vocab_size, rank)}
    if not isinstance(config, DSparkConfig):
        return
    rank = config.markov_rank
    if rank:
        yield "markov_in", {"markov_head.markov_w1.weight": (vocabulary, rank)}
        yield "markov_out", {"markov_head.markov_w2.weight": (config.draft_vocab_size, rank)}
        reads, mixes = MIXES[config.markov_kind]
        if mixes:
            name = {"gated": "gate_proj", "rnn": "joint_proj"}[config.markov_kind]
            yield "markov_mix", {f"markov_head.{name}.weight": (mixes * rank, width + reads * rank)}
            yield "markov_mix_bias", {f"markov_head.{name}.bias": (mixes * rank,)}
    if config.confidence:
        reads = width + rank * config.confidence_reads_token
        yield "confidence_out", {"confidence_head.proj.weight": (1, reads)}
        yield "confidence_bias", {"confidence_head.proj.bias": (1,)}
