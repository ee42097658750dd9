"""LoRA adapters that a model holds beside its weights, for requests that name them.

Source: github.com/huggingface/peft, `tuners/lora`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from pdkernels._validation import check, check_type, did_you_mean, message
from pdkernels.models.architectures.lora import MATRICES, LoraAdapter, LoraPair
from pdkernels.models.architectures.transformer import Transformer
from pdkernels.models.checkpoints import hf
from pdkernels.models.checkpoints.adapters import Adapter, Pair, read_adapter
from pdkernels.models.checkpoints.lora_config import CONFIG, PLAIN
from pdkernels.models.checkpoints.packaged import weight_folder
from pdkernels.models.files.fields import some
from pdkernels.models.files.layout import Layout

_OP, _UNLOAD = "models.load_adapter", "models.unload_adapter"
_MERGE = "Merge it with pdkernels.models.load(adapter=)."


def load_adapter(model: Any, name: str, folder: str | Path) -> None:
    """Gives a model a LoRA adapter in a folder of PEFT, for generations that name it: `SamplingParams.adapter`.

    The weights stay as they are, packed ones too. Sequences of one batch may have different adapters, or none; a
    sequence has the same bits in any batch, and one without an adapter those of the model alone. Pairs have the
    model's dtype and device, but on a CPU a file of 16 bits stays one under float32.

    Args:
        model: a `Transformer`.
        name: not that of another of its adapters.
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``, or a name from an installed package.

    Raises:
        ValueError: a name that is taken, a folder without an adapter, one that does not fit the model's matrices.
        TypeError: a name that is no string.
        NotImplementedError: another kind of model; an adapter of anything but the matrices of attention and of a dense
            MLP, or that changes base weights (`load` can merge both); and what `load` refuses.

    Example:
        >>> import json, tempfile, torch, pdkernels as pd
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.mkdtemp()
        >>> module = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        >>> model = pd.models.load("tiny-code")
        >>> width = model.config.hidden_size
        >>> pair = {f"{module}A.weight": torch.ones(4, width), f"{module}B.weight": torch.ones(len(model.layers[0].output), 4)}
        >>> save_file(pair, f"{folder}/adapter_model.safetensors")
        >>> config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
        >>> with open(f"{folder}/adapter_config.json", "w") as file:
        ...     json.dump(config, file)
        >>> pd.models.load_adapter(model, "mine", folder)
        >>> texts = pd.decoding.generate(model, ["import "] * 2, adapter=[None, "mine"], max_new_tokens=4).text
        >>> texts[0] == pd.decoding.generate(model, "import ", max_new_tokens=4).text, list(model.adapters)
        (True, ['mine'])
    """
    add_adapter(model, new_adapter(model, name, folder))


def new_adapter(model: Any, name: str, folder: str | Path) -> LoraAdapter:
    """Reads an adapter for a model, which does not have it yet. Raises as `load_adapter`."""
    check_type(isinstance(name, str), _OP, "name", "be a string", type(name).__name__)
    if not isinstance(model, Transformer) or hasattr(model, "ranks"):
        raise NotImplementedError(message(_OP, "model", "be a Transformer on one device", type(model).__name__))
    check(name != "", _OP, "name", "not be empty", repr(name))
    _check_free(model, name)
    layout = model.layout or hf.layout(model.config)
    read = read_adapter(weight_folder(folder), layout)
    return LoraAdapter(name, _layers(read, layout, model))


def add_adapter(model: Any, adapter: LoraAdapter) -> None:
    """Gives a model an adapter that has been read for it. ValueError: its name is taken."""
    _check_free(model, adapter.name)
    model.adapters[adapter.name] = adapter


def _check_free(model: Any, name: str) -> None:
    taken = name in model.adapters
    check(not taken, _OP, "name", "not be that of another adapter", repr(name), "Unload that one first.")


def unload_adapter(model: Any, name: str) -> None:
    """Takes an adapter from a model. Generations that run keep it until they end; an engine refuses that
    (`Engine.unload_adapter`).

    Raises:
        ValueError: no adapter has this name.
    """
    checked_name(_UNLOAD, "name", model, name)
    del model.adapters[name]


def checked_name(op: str, argument: str, model: Any, name: str) -> LoraAdapter:
    """The adapter of this name. ValueError: there is none; NotImplementedError: the model takes none."""
    adapters = getattr(model, "adapters", None)
    if adapters is None:
        remedy = "A Transformer of pdkernels.models takes them."
        raise NotImplementedError(message(op, argument, "be None for this model", repr(name), remedy))
    names = ", ".join(map(repr, adapters)) or "none is loaded"
    remedy = f"{did_you_mean(name, tuple(adapters))}Load it with pdkernels.models.load_adapter."
    check(name in adapters, op, argument, f"name a loaded adapter ({names})", repr(name), remedy)
    adapter: LoraAdapter = adapters[name]
    return adapter


def _layers(read: Adapter, layout: Layout, model: Transformer) -> list[dict[str, list[LoraPair]]]:
    """The pairs of each layer, by the names of our matrices."""
    label = f"adapter {read.name}"
    layers: list[dict[str, list[LoraPair]]] = [{} for _ in range(layout.layers)]
    unused = dict(read.pairs)
    for parameter, sources in layout.parts():
        match = re.fullmatch(rf"layers\.(\d+)\.({'|'.join(MATRICES)})", parameter)
        first = 0
        for source, shape in sources.items() if match else ():
            if source in unused:
                pair = _pair(unused.pop(source), first, label, model)
                assert match is not None
                layers[int(match[1])].setdefault(match[2], []).append(pair)
            first += shape[0]
    if others := sorted({*unused, *read.whole}):
        expectation = "hold pairs for the matrices of attention and of dense MLPs alone"
        raise NotImplementedError(message(_OP, label, expectation, f"also {some(others)}", _MERGE))
    return layers


def _pair(pair: Pair, first: int, label: str, model: Transformer) -> LoraPair:
    if pair.start != PLAIN:
        expectation, name = "leave the model's own weights alone", f"{label}: {CONFIG}: init_lora_weights"
        raise NotImplementedError(message(_OP, name, expectation, repr(pair.start), _MERGE))
    a, b, dtype = pair.a, pair.b.double().T * pair.scale, model.dtype
    # The CPU's product takes 16 bits under float32, which hold the scale too if it is a power of two.
    if dtype == torch.float32 and model.device.type == "cpu" and a.dtype in (torch.bfloat16, torch.float16):
        dtype = a.dtype if torch.equal(b.to(a.dtype).double(), b) else dtype
    # Copies: the file may be written again while requests run.
    return LoraPair(first, *(half.to(model.device, dtype, copy=True).contiguous() for half in (a, b)))
