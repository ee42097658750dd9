"""Folders of EAGLE-3 heads, both ways: the format of the speculators library, and that of EAGLE's own checkpoints.

Packed matrices are stored in the format of compressed-tensors. Sources: speculators 0.9 (models/eagle3, convert/eagle); the released
EAGLE-3 checkpoints (``midlayer``, offsets in ``d2t``).
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
from pdkernels.models.config import TransformerConfig
from pdkernels.models.drafters.eagle import EagleConfig, EagleHead
from pdkernels.models.drafters.packed import packed_tensors, quantization_config
from pdkernels.models.fields import OP, Fields, demand, read_from, shown, some
from pdkernels.models.folder import Weights, member, read_fields
from pdkernels.models.hf import from_hf_config
from pdkernels.models.layout import Layout, Parts
from pdkernels.models.packing import adopt_
from pdkernels.models.quantized_folder import FIELDS, QuantizedFolder, scheme_of
from pdkernels.models.rope import LinearScaling, Llama3Scaling
from pdkernels.ops._quantized_weight import QuantizedWeight

PACKAGED = Path(__file__).parents[1] / "weights" / "drafters"

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
# speculators stores what differs from the defaults of these classes of transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22016,
    },
}
_IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's, which only training reads."""


def available_drafters() -> tuple[str, ...]:
    """Names of the heads in the package."""
    return tuple(sorted(path.parent.name for path in PACKAGED.glob(f"*/{_CONFIG}")))


def drafter_folder(name_or_path: str | Path) -> Path:
    """The folder of a drafter. A string may name one of the package; a path is always a folder."""
    packaged = isinstance(name_or_path, str) and name_or_path in available_drafters()
    return PACKAGED / name_or_path if packaged else Path(name_or_path)


def load_drafter(
    path: str | Path, target: Any, *, dtype: torch.dtype | None = None, packed: bool | None = None
) -> EagleHead:
    """An EAGLE-3 head for a target, from a folder with ``config.json`` and ``*.safetensors``.

    Args:
        path: of a folder in the format of the speculators library (``"speculators_model_type": "eagle3"``), or of an EAGLE-3
            checkpoint as EAGLE's authors and others publish them (``midlayer.*``); or the name of a head in the package.
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
    folder = drafter_folder(path)
    fields = read_fields(folder, _CONFIG)
    if fields is None:
        fail(OP, "drafter", f"be a folder with {_CONFIG}", folder)
    weights = _weights(folder)
    config, prefix = _config(fields, weights, target)
    maps, scheme = weights.stored, scheme_of(fields)
    weights.stored = {name: known for name, known in maps.items() if name not in (*_IGNORED, "d2t", "t2d")}
    layout = _layout(config, prefix, "embed_tokens.weight" in weights.stored)
    kind = target.dtype if dtype is None else dtype
    refuse(packed is True and kind == torch.float64, OP, "packed matrices have no product in fp64")
    numbers = packed is True and scheme is None
    refuse(numbers, OP, f"packed must not be True for {folder}, whose matrices are not quantised")
    state: dict[str, Tensor | QuantizedWeight]
    if scheme is None:
        layout.stored(weights.stored)
        state = {name: weights.parameter(layout, parts, kind).to(target.device) for name, parts in layout.parts()}
    else:
        if packed is None and (kind == torch.float64 or target.device.type != "cpu"):
            packed = False
        state = QuantizedFolder.checked(layout, weights, scheme, packed).parameters(kind, target.device)
    weights.stored = maps
    vocabulary = _vocabulary(weights, config)
    if isinstance(norms := state.get("fc_norm"), Tensor):
        state["fc_norm"] = norms.flatten()  # those of the taps are kept as one
    with torch.device("meta"):
        head = EagleHead(config)
    adopt_(head, {**state, "vocabulary": vocabulary.to(target.device)})
    return head.requires_grad_(False).eval()


def is_drafter_folder(path: str | Path) -> bool:
    """Whether a name or path is that of a folder with a drafter, of any kind, not with a model."""
    try:
        found = json.loads((drafter_folder(path) / _CONFIG).read_text())
    except (OSError, ValueError):
        return False
    names = found.get("architectures") if isinstance(found, dict) else None
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return isinstance(found, dict) and ("speculators_model_type" in found or any("Eagle" in name for name in listed))


def save_drafter(head: EagleHead, path: str | Path, *, target: str = "", tokens: int = 5) -> None:
    """Writes a head as a folder in the format of the speculators library, which also vLLM reads. An existing folder is replaced.

    Args:
        head: in any dtype, with matrices of numbers or packed ones (`pdkernels.quantize`), which are stored as compressed-tensors does.
        path: of the folder.
        target: name or path of the target, which readers look up there.
        tokens: how many tokens to draft, which servers take as their default.

    Raises:
        NotImplementedError: packed matrices in other formats than int8, int4, q8_0 and q4_0, or a scaling of positions that this does
            not write.
    """
    check_type(isinstance(head, EagleHead), "models.save_drafter", "head", "be an EagleHead", type(head).__name__)
    config, folder = head.config, Path(path)
    packed = {name: part for name, part in head.named_modules() if isinstance(part, QuantizedWeight)}
    layout = _layout(config, "layers.0.", config.own_embedding)
    parts = dict(layout.parts())
    numbers = layout._replace(parts=lambda: ((name, own) for name, own in parts.items() if name not in packed))
    state = {name: tensor.detach() for name, tensor in head.named_parameters()}
    tensors = {name: tensor.contiguous() for name, tensor in numbers.scatter(state).items()}
    others = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dim() == 2]
    kinds: dict[str, tuple[int, int]] = {}
    for name, weight in packed.items():
        found, own = packed_tensors(weight, parts[name])
        tensors |= found
        kinds |= own
    size = config.body.vocab_size
    if config.draft_vocab_size < size:
        ids = head.vocabulary
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    fields = {**_written(config, str(head.dtype).removeprefix("torch."), target, tokens)}
    if kinds:
        fields[FIELDS[0]] = quantization_config(kinds, others)
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
        remedy = "Load it with torch.load(weights_only=True) and write it with safetensors.torch.save_file."
        raise NotImplementedError(
            f"pdkernels.{OP}: drafter must hold *.safetensors files, got {binary[0]}, which can run code. {remedy}"
        )
    return Weights(folder)


def _config(fields: Fields, weights: Weights, target: Any) -> tuple[EagleConfig, str]:
    """The sizes of a head, checked against its target, and the published name of its first layer."""
    kind, published = fields.get("speculators_model_type"), "midlayer.input_layernorm.weight" in weights.stored
    if kind is not None:
        demand(kind == "eagle3", "speculators_model_type", "be 'eagle3'", shown(kind))
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
        inner, family = fields, fields.get("model_type", "llama")
    demand(family in _DEFAULTS, "model_type", f"be one of {', '.join(_DEFAULTS)}", shown(family))
    # A head has no embedding to tie: where it has none, it reads the target's.
    given = {**_DEFAULTS[str(family)], **inner.values, "model_type": family, "tie_word_embeddings": False}
    if kind is None:
        given["vocab_size"] = fields.integer("vocab_size")
    body = from_hf_config(given)
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
        )
    return config, "midlayer." if published else "layers.0."


def _taps(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers of the target, whose inputs are read; by default those of EAGLE's code."""
    name = "eagle_aux_hidden_state_layer_ids"
    holder = fields if name in fields.values else fields.part("eagle_config")
    given = holder.get(name, [2, layers // 2, layers - 3])
    fits = isinstance(given, list) and given and all(type(tap) is int and 0 <= tap <= layers for tap in given)
    check(bool(fits), OP, f"{holder.where}: {name}", f"be layers in 0 .. {layers}, the target's", shown(given))
    return tuple(given)


def _vocabulary(weights: Weights, config: EagleConfig) -> Tensor:
    """The target's ids of the tokens that are drafted, from their offsets."""
    size, whole = config.draft_vocab_size, config.body.vocab_size
    ids = torch.arange(size)
    if "d2t" not in weights.stored:
        check(size == whole, OP, "drafter", f"hold d2t, the map of its {size} tokens to the target's {whole}", "none")
        return ids
    offsets = weights.whole("d2t")
    check(offsets.shape == (size,), OP, "d2t", f"have shape ({size},)", tuple(offsets.shape))
    check(not offsets.is_floating_point(), OP, "d2t", "hold integers", offsets.dtype)
    ids = ids + offsets.long()
    low, high = (int(end) for end in ids.aminmax())
    check(low >= 0 and high < whole, OP, "d2t", f"lead to ids in 0 .. {whole - 1}", f"{low}..{high}")
    check(len(ids.unique()) == size, OP, "d2t", "lead to different ids", "the same one twice")
    if "t2d" in weights.stored:
        flags = weights.whole("t2d")
        check(flags.shape == (whole,), OP, "t2d", f"have shape ({whole},)", tuple(flags.shape))
        same = torch.equal(flags.bool().nonzero()[:, 0], ids.sort().values)
        check(same, OP, "t2d", "name the tokens of d2t", "others")
    return ids


def _layout(config: EagleConfig, first: str, embedding: bool) -> Layout:
    def parts() -> Iterator[tuple[str, Parts]]:
        return _parts(config, first, embedding)

    return Layout(parts, config.body.layers, "embed_tokens.weight", "lm_head.weight", False)


def _parts(config: EagleConfig, first: str, embedding: bool) -> Iterator[tuple[str, Parts]]:
    """Our parameters and their parts; `first` is the published name of the first layer."""
    body, hidden = config.body, config.body.hidden_size
    wide = config.target_hidden_size
    query, key_value = body.heads * body.head_dim, body.kv_heads * body.head_dim
    if embedding:
        yield "embedding", {"embed_tokens.weight": (body.vocab_size, hidden)}
    yield "fc", {"fc.weight": (hidden, len(config.taps) * wide)}
    if config.norm_before_fc:
        yield "fc_norm", {"input_norm.weight": (len(config.taps) * wide,)}
    if config.fc_norm:
        yield "fc_norm", {f"fc_norm.{index}.weight": (wide,) for index in range(len(config.taps))}
    for index in range(body.layers):
        ours, theirs = f"layers.{index}.", f"layers.{index}." if index else first
        widths, width = {"q": query, "k": key_value, "v": key_value}, hidden if index else 2 * hidden
        yield f"{ours}attention_norm", {f"{theirs}input_layernorm.weight": (hidden,)}
        if index == 0:
            yield f"{ours}hidden_norm", {f"{theirs}hidden_norm.weight": (hidden,)}
        yield f"{ours}qkv", {f"{theirs}self_attn.{name}_proj.weight": (size, width) for name, size in widths.items()}
        if body.qkv_bias:
            yield f"{ours}qkv_bias", {f"{theirs}self_attn.{name}_proj.bias": (size,) for name, size in widths.items()}
        if body.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield f"{ours}{name}", {f"{theirs}self_attn.{name}.weight": (body.head_dim,)}
        yield f"{ours}output", {f"{theirs}self_attn.o_proj.weight": (hidden, query)}
        if body.output_bias:
            yield f"{ours}output_bias", {f"{theirs}self_attn.o_proj.bias": (hidden,)}
        yield f"{ours}mlp_norm", {f"{theirs}post_attention_layernorm.weight": (hidden,)}
        inner = body.intermediate_size
        yield f"{ours}gate_up", {f"{theirs}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        yield f"{ours}down", {f"{theirs}mlp.down_proj.weight": (hidden, inner)}
        if body.mlp_bias:
            yield f"{ours}gate_up_bias", {f"{theirs}mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")}
            yield f"{ours}down_bias", {f"{theirs}mlp.down_proj.bias": (hidden,)}
    yield "norm", {"norm.weight": (hidden,)}
    yield "head", {"lm_head.weight": (config.draft_vocab_size, hidden)}


def _written(config: EagleConfig, dtype: str, target: str, tokens: int) -> Mapping[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "torch_dtype": dtype,
        "transformer_layer_config": _layer_config(config.body),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target or None, "architectures": []},
        },
    }


def _layer_config(body: TransformerConfig) -> dict[str, Any]:
    """The sizes of layers as a config.json of Llama or Qwen3 has them."""
    family = "qwen3" if body.qk_norm else "llama"
    fits = body.qkv_bias == body.output_bias and not (body.mlp_bias and body.qk_norm) and body.rope_style == "half"
    demand(fits, "biases", "be those of Llama or Qwen3", body)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": body.rope_theta}
    scaling = body.rope_scaling
    if isinstance(scaling, LinearScaling):
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_positions,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    else:
        demand(scaling is None, "rope_scaling", "be linear, of Llama 3, or absent", scaling)
    found: dict[str, Any] = {
        "model_type": family,
        "vocab_size": body.vocab_size,
        "hidden_size": body.hidden_size,
        "num_hidden_layers": body.layers,
        "num_attention_heads": body.heads,
        "num_key_value_heads": body.kv_heads,
        "head_dim": body.head_dim,
        "intermediate_size": body.intermediate_size,
        "hidden_act": "silu",
        "max_position_embeddings": body.max_positions,
        "rms_norm_eps": body.norm_eps,
        "attention_bias": body.qkv_bias,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
    }
    return found | ({"mlp_bias": body.mlp_bias} if family == "llama" else {})
