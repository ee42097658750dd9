"""Folders of EAGLE-3, DFlash, DSpark, DFlash 2 and XPress heads, both ways: the format of the speculators library, and those of the authors' own
checkpoints; and layers for multi-token prediction, which are in the folder of their model.

Packed matrices are stored in the format of compressed-tensors. Sources: speculators 0.9 (models/eagle3, convert/eagle);
the released EAGLE-3 checkpoints (``midlayer``, offsets in ``d2t``).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialized
from torch import Tensor

from pdkernels._validation import check, check_type, fail, refuse
from pdkernels.models.architectures.packing import adopt_
from pdkernels.models.checkpoints.drafters import dflash_folder, mtp_folder
from pdkernels.models.checkpoints.drafters.dflash_kinds import KINDS, new_head, refuse_others
from pdkernels.models.checkpoints.drafters.packed import packed_tensors, quantization_config
from pdkernels.models.checkpoints.hf import from_hf_config
from pdkernels.models.checkpoints.integers import CONFIG_FIELDS
from pdkernels.models.checkpoints.packaged import weight_folder, weight_folders
from pdkernels.models.checkpoints.quantized_folder import QuantizedFolder, scheme_of
from pdkernels.models.drafters.dflash import DFlashConfig, DFlashHead
from pdkernels.models.drafters.eagle import EagleConfig, EagleHead
from pdkernels.models.drafters.mtp import MtpConfig, MtpHead
from pdkernels.models.drafters.parts import DEFAULTS, layer_config, layer_parts, proposals, vocabulary_of
from pdkernels.models.files.fields import OP, Fields, demand, read_from, shown, some
from pdkernels.models.files.folder import Weights, member, read_fields
from pdkernels.models.files.layout import Layout, Parts
from pdkernels.models.files.mistaken import FROM_TORCH
from pdkernels.models.text.same_tokens import same_tokens
from pdkernels.models.text.tokenizers import JsonTokenizer
from pdkernels.ops.quantized_weight import QuantizedWeight

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_FIRST_NORM = "midlayer.input_layernorm.weight"
_TAPS, _EAGLE_CONFIG = "eagle_aux_hidden_state_layer_ids", "eagle_config"
_FIELDS = (
    "draft_vocab_size",
    "norm_before_residual",
    "target_hidden_size",
    _TAPS,
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
_NEUTRAL = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Of eagle_config: the heads that are computed here."""
_IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's, which only training reads."""


def available_drafters() -> tuple[str, ...]:
    """Names of the heads in installed packages of weights, such as pdkernels-smollm2."""
    return tuple(sorted(weight_folders(_CONFIG)))


def load_drafter(
    path: str | Path, target: Any, *, dtype: torch.dtype | None = None, packed: bool | None = None
) -> EagleHead | DFlashHead | MtpHead:
    """A drafter for a target, from a folder with ``config.json`` and ``*.safetensors``.

    Args:
        path: of a folder in the format of the speculators library (``"speculators_model_type"`` "eagle3", "peagle",
            "dflash", "dspark", "dflash2" or "xpress"), or of a checkpoint as the authors of EAGLE-3 (``midlayer.*``) or DFlash (``dflash_config``)
            publish them; the target's own folder, if it has a layer for multi-token prediction (MiMo, Qwen3.5); or a
            name of `available_drafters`.
        target: the model that it drafts for, one of `load` or of `pdkernels.integrations.transformers.wrap`.
        dtype: of the weights; None: the target's.
        packed: whether quantised matrices stay as they are stored, as in `load`. None: on the CPU.

    Returns:
        The head, without gradients, on the target's device.

    Raises:
        ValueError: a folder that is broken, or made for a target of other sizes: the message names what differs.
        NotImplementedError: another kind of drafter, or a variant that the head does not compute.

    Example:
        >>> import tempfile
        >>> from pdkernels.models import Transformer, TransformerConfig
        >>> model = Transformer(TransformerConfig(vocab_size=11, hidden_size=16, layers=4, heads=2, kv_heads=1, head_dim=16,
        ...                                       intermediate_size=24))
        >>> head = EagleHead(EagleConfig(model.config, (1, 2, 3), draft_vocab_size=5, target_hidden_size=16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_drafter(head, folder)
        ...     load_drafter(folder, model).config.taps
        (1, 2, 3)
    """
    check_type(isinstance(path, (str, os.PathLike)), OP, "drafter", "be a path", type(path).__name__)
    check_type(packed is None or isinstance(packed, bool), OP, "packed", "be a bool or None", type(packed).__name__)
    folder = weight_folder(path)
    fields = read_fields(folder, _CONFIG)
    if fields is None:
        fail(OP, "drafter", f"be a folder with {_CONFIG}", folder)
    weights = _weights(folder)
    config: EagleConfig | DFlashConfig | MtpConfig
    maps, scheme = weights.stored, scheme_of(fields)
    of_speculators = fields.get("speculators_model_type") is not None
    if mtp_folder.describes(fields) and not of_speculators and not {_FIRST_NORM, "fc.weight"} & maps.keys():
        demand(
            scheme is None, CONFIG_FIELDS[0], "be absent, for layers that draft", shown(fields.get(CONFIG_FIELDS[0]))
        )
        refuse(packed is True, OP, f"packed must not be True for {folder}, whose matrices are not quantised")
        return _mtp_head(mtp_folder.config_of(fields, target), weights, target, dtype)
    _check_tokenizer(folder, target)
    if dflash_folder.describes(fields):
        config = dflash_folder.config_of(fields, weights, target)
        layout = dflash_folder.layout(config)
    else:
        config, prefix = _config(fields, weights, target)
        layout = _layout(config, prefix, config.own_embedding)
    weights.stored = {name: stored for name, stored in maps.items() if name not in (*_IGNORED, "d2t", "t2d")}
    kind = target.dtype if dtype is None else dtype
    refuse(packed is True and kind == torch.float64, OP, "packed matrices have no product in fp64")
    numbers = packed is True and scheme is None
    refuse(numbers, OP, f"packed must not be True for {folder}, whose matrices are not quantised")
    state: dict[str, Tensor | QuantizedWeight]
    if scheme is None:
        layout.stored(weights.stored)
        state = {name: weights.parameter(layout, sources, kind).to(target.device) for name, sources in layout.parts()}
    else:
        if packed is None and (kind == torch.float64 or target.device.type != "cpu"):
            packed = False
        state = QuantizedFolder.checked(layout, weights, scheme, packed).parameters(kind, target.device)
    weights.stored = maps
    vocabulary = vocabulary_of(weights, config.draft_vocab_size, config.body.vocab_size)
    if isinstance(norms := state.get("fc_norm"), Tensor):
        state["fc_norm"] = norms.flatten()  # those of the taps are kept as one
    if isinstance(masked := state.get("mask_hidden"), Tensor):
        state["mask_hidden"] = masked.view(1, 1, -1)
    with torch.device("meta"):
        head: EagleHead | DFlashHead = EagleHead(config) if isinstance(config, EagleConfig) else new_head(config)
    adopt_(head, {**state, "vocabulary": vocabulary.to(target.device)})
    return head.requires_grad_(False).eval()


def _check_tokenizer(folder: Path, target: Any) -> None:
    """Refuses a drafter that brings another tokenizer than the target's."""
    text = member(folder, "tokenizer.json")
    if text is not None and isinstance(tokenizer := getattr(target, "tokenizer", None), JsonTokenizer):
        alike = same_tokens(tokenizer, JsonTokenizer(text, end_tokens=()))
        check(alike, OP, "drafter", "have the target's tokenizer", "another one in its tokenizer.json")


def _mtp_head(config: MtpConfig, weights: Weights, target: Any, dtype: torch.dtype | None) -> MtpHead:
    kind = target.dtype if dtype is None else dtype
    layout = mtp_folder.layout(config)
    weights.stored = mtp_folder.own(weights.stored)
    layout.stored(weights.stored)
    state = {name: weights.parameter(layout, sources, kind).to(target.device) for name, sources in layout.parts()}
    ours = getattr(config.body, "centred_norms", False)
    theirs = getattr(target.config, "centred_norms", ours)  # a target from a GGUF file of Qwen3.5 has norms plus 1
    state["target_norm"] = (target.norm.detach() + (float(theirs) - float(ours))).to(kind)
    with torch.device("meta"):
        head = MtpHead(config)
    adopt_(head, {**state, "vocabulary": torch.arange(config.body.vocab_size, device=target.device)})
    return head.requires_grad_(False).eval()


def drafter_method(path: str | Path) -> str | None:
    """The decoding method of the drafter in a folder, or of that name; None: no folder, or one of a model."""
    try:
        config = json.loads((weight_folder(path) / _CONFIG).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    kind, names = config.get("speculators_model_type"), config.get("architectures")
    class_names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if kind in KINDS or "dflash_config" in config:
        return "dflash"
    # Other kinds are refused by `load_drafter`, by name.
    return "eagle" if kind is not None or any("Eagle" in name for name in class_names) else None


def is_own_folder(model: str | Path, drafter: str | Path) -> bool:
    """Whether a drafter is to be read from the folder of its model, which has layers for multi-token prediction."""
    try:
        if not Path(drafter).is_dir() or Path(model).resolve() != Path(drafter).resolve():
            return False
    except (OSError, ValueError, TypeError):
        return False
    fields = read_fields(Path(drafter), _CONFIG)
    return fields is not None and mtp_folder.describes(fields)


def save_drafter(
    head: EagleHead | DFlashHead, path: str | Path, *, target: str = "", tokens: int | None = None
) -> None:
    """Writes a head as a folder in the format of the speculators library, which also vLLM reads. An existing folder is
    replaced.

    Args:
        head: in any dtype, with matrices of numbers or packed ones (`pdkernels.quantize`), which are stored as
            compressed-tensors does.
        path: of the folder.
        target: name or path of the target, which readers look up there.
        tokens: how many tokens to draft, which servers take as their default. None: 5 of EAGLE-3, the whole block of
            DFlash.

    Raises:
        NotImplementedError: packed matrices in other formats than int8, int4, q8_0 and q4_0, or a scaling of positions
            that this does not write.
    """
    supported = isinstance(head, (EagleHead, DFlashHead))
    check_type(supported, "models.save_drafter", "head", "be an EagleHead or a DFlashHead", type(head).__name__)
    config, folder = head.config, Path(path)
    packed = {name: module for name, module in head.named_modules() if isinstance(module, QuantizedWeight)}
    if isinstance(config, EagleConfig):
        layout = _layout(config, "layers.0.", config.own_embedding)
    else:
        layout = dflash_folder.layout(config)
    sources = dict(layout.parts())
    numbers = layout._replace(parts=lambda: ((name, source) for name, source in sources.items() if name not in packed))
    state = {name: tensor.detach() for name, tensor in head.named_parameters()}
    tensors = {name: tensor.contiguous() for name, tensor in numbers.scatter(state).items()}
    unquantised = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dim() == 2]
    kinds: dict[str, tuple[int, int]] = {}
    for name, weight in packed.items():
        packed_weights, kinds_of_weight = packed_tensors(weight, sources[name])
        tensors |= packed_weights
        kinds |= kinds_of_weight
    size = config.body.vocab_size
    if config.draft_vocab_size < size:
        ids = head.vocabulary
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    dtype = str(head.dtype).removeprefix("torch.")
    if isinstance(config, EagleConfig):
        fields = {**_written(config, dtype, target, 5 if tokens is None else tokens)}
    else:
        fields = {**dflash_folder.written(config, dtype, target, tokens)}
    if kinds:
        fields[CONFIG_FIELDS[0]] = quantization_config(kinds, unquantised)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        (unfinished / _CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
        (unfinished / _WEIGHTS).write_bytes(serialized({**tensors}, metadata={"format": "pt"}))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _weights(folder: Path) -> Weights:
    binary = [name for name in ("pytorch_model.bin", "model.bin") if member(folder, name) is not None]
    if binary and not any(folder.glob("*.safetensors")):
        raise NotImplementedError(
            f"pdkernels.{OP}: drafter must hold *.safetensors files, got {binary[0]}, which can run code. {FROM_TORCH}"
        )
    return Weights(folder)


def _config(fields: Fields, weights: Weights, target: Any) -> tuple[EagleConfig, str]:
    """The sizes of a head, checked against its target, and the published name of its first layer."""
    kind, published = fields.get("speculators_model_type"), _FIRST_NORM in weights.stored
    if kind is not None:
        kinds = ", ".join(("eagle3", "peagle", *KINDS))
        demand(kind in ("eagle3", "peagle"), "speculators_model_type", f"be one of {kinds}", shown(kind))
        refuse_others(fields, (*_FIELDS, *(("mask_token_id",) if kind == "peagle" else ())))
        inner = fields.part("transformer_layer_config")
        family = inner.get("model_type", "qwen3")
    else:
        names = fields.texts("architectures")
        if not published and "fc.weight" in weights.stored and "lm_head.weight" not in weights.stored:
            raise NotImplementedError(
                f"pdkernels.{OP}: drafter must be an EAGLE-3 head, got {some(names) or 'a head without lm_head.weight'}, "
                "an EAGLE-1 or EAGLE-2 head."
            )
        demand(published, "architectures", "be those of an EAGLE-3 head (midlayer.*)", shown(names))
        _check_published(fields)
        inner, family = fields, fields.get("model_type", "llama")
    demand(
        isinstance(family, str) and family in DEFAULTS, "model_type", f"be one of {', '.join(DEFAULTS)}", shown(family)
    )
    # A head has no embedding to tie: where it has none, it reads the target's.
    body_fields = {**DEFAULTS[str(family)], **inner.given, "model_type": family, "tie_word_embeddings": False}
    if kind is None:
        body_fields["vocab_size"] = fields.integer("vocab_size")
    body = from_hf_config(body_fields)
    demand(not any(body.windows), "sliding_window", "be absent, or longer than all texts", shown(body.windows))
    demand(kind is not None or body.layers == 1, "num_hidden_layers", "be 1", body.layers)
    sizes, layers = target.config, target.config.layers
    width = fields.maybe_integer("target_hidden_size") or body.hidden_size
    check(
        width == sizes.hidden_size, OP, "drafter", f"be for a hidden size of {sizes.hidden_size}, the target's", width
    )
    vocabulary = body.vocab_size
    check(vocabulary == sizes.vocab_size, OP, "drafter", f"be for {sizes.vocab_size} tokens, the target's", vocabulary)
    taps = _taps(fields, layers)
    with read_from(_CONFIG):
        config = EagleConfig(
            body=body,
            taps=taps,
            draft_vocab_size=fields.integer("draft_vocab_size", vocabulary),
            target_hidden_size=width,
            norm_before_residual=fields.flag("norm_before_residual", False),
            norm_before_fc=fields.flag("norm_before_fc", False),
            fc_norm=fields.flag("fc_norm", False),
            norm_output=fields.flag("norm_output", False),
            own_embedding="embed_tokens.weight" in weights.stored,
            mask_token=fields.integer("mask_token_id", minimum=0) if kind == "peagle" else None,
        )
    return config, "midlayer." if published else "layers.0."


def _check_published(fields: Fields) -> None:
    """Refuses what other programs read in the config.json of a head without a speculators_model_type, but for values
    that change nothing."""
    inner = fields.part(_EAGLE_CONFIG)
    for name, value in inner.values.items():
        if name not in (_TAPS, "parallel_draft_heads_num_layers"):
            neutral = _NEUTRAL.get(name)
            expectation = "be absent: what it means is not known here" if neutral is None else f"be absent or {neutral}"
            demand(
                neutral is not None and value == neutral, f"{_EAGLE_CONFIG}: {shown(name)}", expectation, shown(value)
            )
    demand(fields.number("logit_scale", 1, null=1) == 1, "logit_scale", "be absent or 1", fields.get("logit_scale"))


def _taps(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers of the target, whose inputs are read; by default those of EAGLE's code."""
    name = _TAPS
    holder = fields if name in fields.values else fields.part(_EAGLE_CONFIG)
    layers_read = holder.values.get(name, [2, layers // 2, layers - 3])
    valid = (
        isinstance(layers_read, list)
        and layers_read
        and all(type(tap) is int and 0 <= tap <= layers for tap in layers_read)
    )
    check(bool(valid), OP, f"{holder.where}: {name}", f"be layers in 0 .. {layers}, the target's", shown(layers_read))
    return tuple(layers_read)


def _layout(config: EagleConfig, first: str, embedding: bool) -> Layout:
    def parts() -> Iterator[tuple[str, Parts]]:
        return _parts(config, first, embedding)

    return Layout(parts, config.body.layers, "embed_tokens.weight", "lm_head.weight", False)


def _parts(config: EagleConfig, first: str, embedding: bool) -> Iterator[tuple[str, Parts]]:
    """Our parameters and their parts; `first` is the published name of the first layer."""
    body, hidden = config.body, config.body.hidden_size
    wide = config.target_hidden_size
    if embedding:
        yield "embedding", {"embed_tokens.weight": (body.vocab_size, hidden)}
    yield "fc", {"fc.weight": (hidden, len(config.taps) * wide)}
    if config.norm_before_fc:
        yield "fc_norm", {"input_norm.weight": (len(config.taps) * wide,)}
    if config.fc_norm:
        yield "fc_norm", {f"fc_norm.{index}.weight": (wide,) for index in range(len(config.taps))}
    if config.mask_token is not None:
        yield "mask_hidden", {"mask_hidden": (1, 1, len(config.taps) * wide)}
    for index in range(body.layers):
        prefix, source_prefix = f"layers.{index}.", f"layers.{index}." if index else first
        if index == 0:
            yield f"{prefix}hidden_norm", {f"{source_prefix}hidden_norm.weight": (hidden,)}
        yield from layer_parts(body, prefix, source_prefix, hidden if index else 2 * hidden)
    yield "norm", {"norm.weight": (hidden,)}
    yield "head", {"lm_head.weight": (config.draft_vocab_size, hidden)}


def _written(config: EagleConfig, dtype: str, target: str, tokens: int) -> Mapping[str, Any]:
    together = config.mask_token is not None
    kind = "peagle" if together else "eagle3"
    return {
        "architectures": ["PEagleSpeculator" if together else "Eagle3Speculator"],
        "speculators_model_type": kind,
        **({"mask_token_id": config.mask_token} if together else {}),
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        _TAPS: list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "torch_dtype": dtype,
        "transformer_layer_config": layer_config(config.body),
        "speculators_config": proposals(kind, target, tokens),
    }
