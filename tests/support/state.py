"""Everything of a model that could change, as values that compare."""

from __future__ import annotations

from typing import Any

import torch


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """By module and attribute: which object it is, and of tensors and configs what they hold. Hooks that transformers
    adds to itself when a model first runs are there already, if it has run."""
    found: dict[str, Any] = {}
    for where, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            found[f"{where}.{name}"] = _of(value)
    return found


def _of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version, value.detach().clone().flatten().tolist()
    if isinstance(value, dict):
        return id(value), {key: _of(item) for key, item in value.items()}
    if hasattr(value, "to_dict"):
        return id(value), repr(value.to_dict()), getattr(value, "_attn_implementation", None)
    return id(value) if isinstance(value, torch.nn.Module) else (type(value), repr(value))
