"""Models by name (the tiny trained ones, which ship with the package) and by folder (real checkpoints)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pdkernels._validation import check, check_type, message
from pdkernels.models import huginn, llada
from pdkernels.models.hf import ARCHITECTURES, MASK_TOKENS, demand, from_hf_config, from_hf_state_dict
from pdkernels.models.recurrent_depth import RecurrentDepth, RecurrentDepthConfig
from pdkernels.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from pdkernels.models.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer
from pdkernels.models.transformer import Transformer, TransformerConfig

Model: TypeAlias = Transformer | RecurrentDepth
Config: TypeAlias = TransformerConfig | RecurrentDepthConfig

WEIGHTS = Path(__file__).parent / "weights"

_OP = "models.load"
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCALINGS = {rule.__name__: rule for rule in (LinearScaling, Llama3Scaling, YarnScaling)}
_CONFIGS = {Transformer.__name__: TransformerConfig, RecurrentDepth.__name__: RecurrentDepthConfig}


def available() -> tuple[str, ...]:
    """Names of the trained models in the package.

    >>> "tiny-code" in available()
    True
    """
    return tuple(sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))


def load(name_or_path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Model:
    """A model by name, or a checkpoint from a local folder, in evaluation mode and without gradients.

    Args:
        name_or_path: one of `available()`, or a folder with ``config.json`` and ``*.safetensors`` (one file, or several
            with ``model.safetensors.index.json``) of a Qwen2, Qwen3, Llama, Mistral or Ministral3 model, of Huginn, or
            of the diffusion models LLaDA, Dream and Fast-dLLM v2, with the published tensor names. Its ``tokenizer.json``, if there, needs
            the optional library `tokenizers`.
        dtype: fp64, fp32, bf16 or fp16. None: fp32 for the tiny models, whose stored bf16 values it represents exactly,
            and the dtype that its config.json names for a checkpoint.
        device: where the weights go.

    Returns:
        A `Transformer`, or a `RecurrentDepth` of Huginn's and of the tiny models that say so. Models that fill masks in have
        the `mask_token` that their file names.

    Raises:
        ValueError: no such name or folder, or tensors that do not fit the configuration.
        TypeError: a dtype that is none of the four.
        NotImplementedError: a checkpoint that asks for something our models do not compute.
        ImportError: a tokenizer.json without the library that reads it.

    Example:
        >>> import pdkernels as pd
        >>> model = pd.models.load("tiny-code")
        >>> result = pd.decoding.generate(model, "import o", max_new_tokens=2)
        >>> result.text
        's\\n'
    """
    check_type(dtype is None or dtype in _DTYPES.values(), _OP, "dtype", f"be one of {', '.join(_DTYPES)}", dtype)
    if isinstance(name_or_path, str) and name_or_path in available():
        return _load_tiny(WEIGHTS / f"{name_or_path}.safetensors", dtype, device)
    folder = Path(name_or_path)
    check(
        folder.is_dir(),
        _OP,
        "name_or_path",
        "name a model or a local folder",
        repr(str(name_or_path)),
        f"Models: {', '.join(available())}.",
    )
    return _load_folder(folder, dtype, device)


def save_tiny(model: Model, path: Path, **facts: object) -> None:
    """Save a byte-level model in bf16, a Transformer's adapter included; architecture, configuration, mask token and `facts`
    stand in the metadata."""
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    metadata = {name: str(value) for name, value in facts.items()}
    metadata["architecture"] = type(model).__name__
    fields = asdict(model.config)
    if (scaling := getattr(model.config, "rope_scaling", None)) is not None:
        fields["rope_scaling"]["rule"] = type(scaling).__name__
    metadata["config"] = json.dumps(fields)
    if model.mask_token is not None:
        metadata["mask_token"] = str(model.mask_token)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)


def _load_tiny(path: Path, dtype: torch.dtype | None, device: torch.device | str) -> Model:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    fields = json.loads(metadata["config"])
    # While YaRN was the only rule, it stood here by that name.
    scaling = fields.pop("yarn", None) or fields.get("rope_scaling")
    if scaling is not None:
        fields["rope_scaling"] = _SCALINGS[scaling.pop("rule", YarnScaling.__name__)](**scaling)
    mask_token = int(metadata["mask_token"]) if "mask_token" in metadata else None
    # Before there was a second architecture, none was written down.
    config = _CONFIGS[metadata.get("architecture", Transformer.__name__)](**fields)
    tokenizer = ByteTokenizer()
    return _assemble(
        config, load_file(path), dtype or torch.float32, device, tokenizer, tokenizer.end_tokens, mask_token
    )


def _load_folder(folder: Path, dtype: torch.dtype | None, device: torch.device | str) -> Model:
    fields = _read_json(folder / "config.json")
    config = _config(fields)
    if dtype is None:
        stored = fields.get("dtype") or fields.get("torch_dtype") or "float32"
        check(
            stored in _DTYPES,
            _OP,
            "config.json: dtype",
            f"be one of {', '.join(_DTYPES)}",
            repr(stored),
            "Pass dtype=.",
        )
        dtype = _DTYPES[stored]
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        tensors.update(load_file(file))
    generation = folder / "generation_config.json"
    ends = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if ends is None:
        ends = fields.get("eos_token_id")
    end_tokens = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        tokenizer = JsonTokenizer(folder / "tokenizer.json", end_tokens=end_tokens)
    if isinstance(config, RecurrentDepthConfig):
        state = huginn.from_huginn_state_dict(tensors, config)
    elif fields.get("model_type") == llada.MODEL_TYPE:
        state = llada.from_llada_state_dict(tensors, config)
    else:
        state = from_hf_state_dict(tensors, config)
    mask_token = fields.get("mask_token_id", MASK_TOKENS.get(str(fields.get("model_type"))))
    return _assemble(config, state, dtype, device, tokenizer, end_tokens, mask_token)


def _config(fields: Mapping[str, Any]) -> Config:
    """The configuration of a parsed config.json of any architecture that we know."""
    if huginn.is_huginn(fields):
        return huginn.from_huginn_config(fields)
    kinds, kind = (*ARCHITECTURES, llada.MODEL_TYPE, huginn.MODEL_TYPE), fields.get("model_type")
    demand(kind in kinds, "model_type", f"be one of {', '.join(kinds)}", repr(kind))
    return llada.from_llada_config(fields) if kind == llada.MODEL_TYPE else from_hf_config(fields)


def _assemble(
    config: Config,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
    tokenizer: Tokenizer | None,
    end_tokens: Iterable[int],
    mask_token: int | None = None,
) -> Model:
    # On the meta device the model costs no memory until it takes over the loaded tensors.
    model: Model
    with torch.device("meta"):
        if isinstance(config, RecurrentDepthConfig):
            model = RecurrentDepth(config, tokenizer=tokenizer, end_tokens=tuple(end_tokens))
        else:
            model = Transformer(config, tokenizer=tokenizer, end_tokens=tuple(end_tokens), mask_token=mask_token)
    if isinstance(model, Transformer) and "layers.0.adapter_in" in state:
        # Stored pairs hold their scale already.
        pairs = [(state[f"layers.{i}.adapter_in"], state[f"layers.{i}.adapter_out"]) for i in range(config.layers)]
        model.attach_adapter_(pairs)
    for name, parameter in model.named_parameters():
        check(
            state[name].shape == parameter.shape,
            _OP,
            name,
            f"have shape {tuple(parameter.shape)}",
            tuple(state[name].shape),
        )
    model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in state.items()}, assign=True)
    return model.requires_grad_(False).eval()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        check(bool(files), _OP, "name_or_path", "hold *.safetensors files", f"none in {folder}")
        return files
    names = sorted(set(_read_json(index)["weight_map"].values()))
    missing = [name for name in names if not (folder / name).exists()]
    check(not missing, _OP, "name_or_path", f"hold the files of {index.name}", f"none called {', '.join(missing)}")
    return [folder / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    check(path.exists(), _OP, "name_or_path", f"hold {path.name}", f"none in {path.parent}")
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(message(_OP, path.name, "be JSON", f"{path} ({error})")) from None
    return fields
