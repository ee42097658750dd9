"""Unwraps models of transformers: PEFT adapters, weights that accelerate keeps elsewhere, and the ids of end tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from pdkernels._validation import message


def without_adapter(op: str, model: Any) -> Any:
    """The model in a `PeftModel`, whose layers apply the active adapter. Adapters that do more than that are
    refused."""
    adapters = getattr(model, "peft_config", None)
    for config in adapters.values() if isinstance(adapters, dict) else ():
        kind, remedy = getattr(config.peft_type, "value", config.peft_type), ""
        if getattr(config, "is_prompt_learning", False):
            fault = "have adapters in its layers"
        elif getattr(config, "alora_invocation_tokens", None):
            fault, kind = "have adapters that apply to all tokens", "activated LoRA"
        else:
            continue
        remedy = "pdkernels.models.from_callable takes any function from tokens to logits."
        raise NotImplementedError(message(op, "model", fault, f"{type(model).__name__} with {kind}", remedy))
    modules = model.modules() if hasattr(model, "modules") else ()
    # Their next forward takes them out of the weights, for all who use these.
    if any(vars(module).get("merged_adapters") and vars(module).get("_disable_adapters") for module in modules):
        expectation, remedy = "have no merged adapters that are switched off", "Call unmerge_adapter() first."
        raise NotImplementedError(message(op, "model", expectation, type(model).__name__, remedy))
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_loaded(op: str, model: Any) -> None:
    """Raises NotImplementedError for a model whose weights are fetched when a module runs."""
    if any(_elsewhere(module) for module in model.modules()):
        actual = f"{type(model).__name__} with some that are offloaded"
        remedy = "Load the model without offloading, onto a device that holds it."
        raise NotImplementedError(message(op, "model", "hold all its weights", actual, remedy))


def _elsewhere(module: Any) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors) or any(
        getattr(hook, "offload", False) for hook in _hooks(getattr(module, "_hf_hook", None))
    )


def _hooks(hook: Any) -> Iterator[Any]:
    yield hook
    for inner in getattr(hook, "hooks", ()):
        yield from _hooks(inner)


def ids_of(value: Any) -> tuple[int, ...]:
    """Token ids as a `GenerationConfig` holds them: None, one or several."""
    if isinstance(value, Tensor):
        value = value.tolist()
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def in_vocabulary(model: Any, ids: Iterable[int]) -> tuple[int, ...]:
    """Those of a model's vocabulary: other end tokens never end a text."""
    size = model.config.get_text_config(decoder=True).vocab_size
    return tuple(token for token in ids if 0 <= token < size)
