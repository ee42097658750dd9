"""Models whose matrices are quantised ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from pdkernels._validation import KERNEL_DTYPES, check, check_type, did_you_mean, message
from pdkernels.ops.quantize import quantize
from pdkernels.ops.quantized_weight import QuantizedWeight

OP = "quantize"
_EXPERTS = ("experts_gate_up", "experts_down", "shared_gate_up", "shared_down")
MATRICES = ("embedding", "head", "qkv", "output", "gate_up", "down", *_EXPERTS)

Stated: TypeAlias = torch.Tensor | QuantizedWeight
"""A parameter as a checkpoint has it."""
_Model = TypeVar("_Model", bound=nn.Module)
_ATTRIBUTES = ("tokenizer", "end_tokens", "mask_token", "plan_tokens")


def quantized(model: _Model, format: str, group: int | None, skip: str | Collection[str]) -> _Model:
    """A model of the same class with its `matrices` quantised; what stays is shared, and so is an adapter."""
    old: Any = model
    state = quantized_state(model, format, group, skip, old.config.tied_head, matrices=old.matrices)
    attributes = {name: value for name in _ATTRIBUTES if (value := getattr(old, name)) is not None}
    with torch.device("meta"):
        new: Any = type(model)(old.config, **attributes)
        if old.has_adapter:
            pairs = [(layer.adapter_in, layer.adapter_out) for layer in old.layers]
            new.attach_adapter_([(a.detach().to("meta"), b.detach().to("meta")) for a, b in pairs])
    adopt_(new, state)
    new.cache_dtype, new.generation_config = old.cache_dtype, dict(old.generation_config)
    copy: _Model = new.requires_grad_(False).eval()
    return copy


def adopt_(model: nn.Module, state: Mapping[str, Stated]) -> None:
    """Makes these its parameters, without copies. A quantised matrix takes the place of a parameter."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, QuantizedWeight):
            path, _, parameter = name.rpartition(".")
            module = model.get_submodule(path)
            delattr(module, parameter)
            setattr(module, parameter, value)
            tensors |= {f"{name}.{buffer}": data for buffer, data in value.named_buffers()}
        else:
            tensors[name] = value
    model.load_state_dict(tensors, assign=True)


def packed_rows_(model: _Model, rows: str) -> _Model:
    """Makes products with all packed matrices of a model take rows of `x` in another way, in place.

    Args:
        model: of `load` or `quantize`, with the drafters that it has; or any other module with a `QuantizedWeight` in it,
            such as one of transformers before it is wrapped.
        rows: "int8" or "numbers", see `QuantizedWeight.with_rows`.

    Returns:
        `model`. Its matrices share the memory of those before.

    Raises:
        ValueError: other rows, or a model without packed matrices.
        TypeError: no module, such as a wrapped model.

    Example:
        >>> import pdkernels as pd
        >>> model = pd.quantize(pd.models.load("tiny-code"), "int8")
        >>> pd.models.packed_rows_(model, "numbers").embedding.rows
        'numbers'
    """
    op = "packed_rows_"
    remedy = "A model of transformers is changed before it is wrapped."
    check_type(isinstance(model, nn.Module), op, "model", "be a module", type(model).__name__, remedy)
    heads = [head for head in getattr(model, "drafters", {}).values() if isinstance(head, nn.Module)]
    changed: dict[int, QuantizedWeight] = {}
    trees: list[nn.Module] = [model, *heads]
    for module in [module for tree in trees for module in tree.modules()]:
        for name, child in list(module._modules.items()):  # a matrix with two names has both
            if isinstance(child, QuantizedWeight):
                if id(child) not in changed:
                    changed[id(child)] = child.with_rows(rows)
                setattr(module, name, changed[id(child)])
    check(bool(changed), op, "model", "have packed matrices", "none", "Load it with packed=True.")
    return model


def quantized_state(
    model: nn.Module,
    format: str,
    group: int | None,
    skip: str | Collection[str],
    tied: bool,
    *,
    matrices: tuple[str, ...] = MATRICES,
) -> dict[str, Stated]:
    """The parameters of a `Transformer` or a drafter, its `matrices` quantised but for those to `skip`; what stays is
    shared."""
    skip = (skip,) if isinstance(skip, str) else skip
    for name in skip:
        remedy = did_you_mean(str(name), matrices)
        check(name in matrices, OP, "skip", f"hold names of {', '.join(matrices)}", repr(name), remedy)
    head_alone = tied and "head" in skip and "embedding" not in skip
    check(not head_alone, OP, "skip", "name the embedding, which is the head of this model", "'head' alone")
    if any(isinstance(module, QuantizedWeight) for module in model.modules()):
        remedy = "Load it with packed=False."
        raise NotImplementedError(message(OP, "model", "have no packed matrices yet", "some", remedy))
    state: dict[str, Stated] = {}
    for name, tensor in model.named_parameters():
        parameter = name.rpartition(".")[2]
        state[name] = tensor.detach()
        if parameter in matrices and parameter not in skip:
            check_type(tensor.dtype in KERNEL_DTYPES, OP, "model", "be float32, float16 or bfloat16", tensor.dtype)
            state[name] = quantize_named(name, tensor, format, group).to(tensor.device)
    return state


def quantize_named(name: str, matrix: torch.Tensor, format: str, group: int | None) -> QuantizedWeight:
    """`quantize`, whose errors about the matrix then name it."""
    try:
        return quantize(matrix, format, group=group)
    except (ValueError, TypeError) as error:
        error_text = str(error)
        if not error_text.startswith(f"pdkernels.{OP}: weight "):
            raise
        skipped = f"{error_text.replace(f'{OP}: weight ', f'{OP}: {name} ')} Name it in skip=."
        raise type(error)(skipped) from None
