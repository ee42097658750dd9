"""A model of transformers with another attention implementation, while the model itself stays as it is.

transformers looks up the attention implementation in the config of every module, so running a model with another one
would change configs that the owner of the model also uses. A shadow has its own modules and configs, and shares the
weights.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pdkernels.integrations.transformers._experts import NAME, choose_

_KEPT = (str, bytes, int, float, bool, torch.Tensor, torch.dtype, torch.device, type, types.BuiltinFunctionType)
_CONTAINERS = (list, tuple, dict, set)
_DEEPEST = 4  # containers in containers that are searched for modules


class Overlay(dict):  # type: ignore[type-arg]
    """A dict that reads through to another one and keeps its own writes."""

    def __init__(self, below: dict[Any, Any]) -> None:
        super().__init__()
        self._below = below
        self._gone: set[Any] = set()

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or (key not in self._gone and key in self._below)

    def __getitem__(self, key: Any) -> Any:
        if super().__contains__(key):
            return super().__getitem__(key)
        if key in self._gone:
            raise KeyError(key)
        return self._below[key]

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._gone.add(key)
        if super().__contains__(key):
            super().__delitem__(key)

    def __iter__(self) -> Iterator[Any]:
        below = [key for key in tuple(self._below) if key not in self._gone or super(Overlay, self).__contains__(key)]
        return iter(below + [key for key in super().__iter__() if key not in self._below])

    def __bool__(self) -> bool:
        if self._gone:
            return len(self) > 0
        return bool(self._below) or super().__len__() > 0  # modules ask for their hooks in every call

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def keys(self) -> Any:
        return list(self)

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def copy(self) -> dict[Any, Any]:
        return dict(self.items())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


def shadow(model: nn.Module, implementation: str | None = None) -> Any:
    """A copy of the module tree, in evaluation mode, whose configs name `implementation` (None: what they name).

    Parameters are those of `model`: new values, `model.to(...)` and quantized weights appear in both. So do its buffers
    and hooks, until the shadow writes its own. Modules that are replaced later do not appear.
    """
    return _Copier(implementation).module(model)


class Given(nn.Module):
    """Replaces a model's body: it returns its embeddings or tokens as output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["body"], name)
        # Some heads call the decoder in their body.
        return Given(found) if isinstance(found, nn.Module) else found

    def forward(self, *given: Any, **named: Any) -> Any:
        for value in (*given, *named.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return _Output((value,))
        raise TypeError("a model's head does not pass its input to the body")


class _Output(tuple):  # type: ignore[type-arg]
    """What a body returns, in any of the forms that heads read; all but the hidden states is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


def body_of(model: Any) -> Any:
    """The part of a model that ends with the last hidden states; None for a model that has none."""
    body = model.base_model
    body = getattr(model, "model", None) if body is model else body
    return body if isinstance(body, nn.Module) and body is not model else None


@contextmanager
def noting_input(module: nn.Module, found: dict[int, torch.Tensor | None], key: int) -> Iterator[None]:
    """Puts what a module of a shadow reads into ``found[key]``, of forwards of this thread."""
    thread = threading.get_ident()

    def note(_: nn.Module, given: tuple[torch.Tensor, ...], __: Any) -> None:
        if threading.get_ident() == thread:
            found[key] = given[0]

    handle = module.register_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


def head_of(shadowed: Any) -> Callable[[torch.Tensor], Any]:
    """The part of a shadow after its body: from hidden states ``(1, rows, hidden_size)`` to the class's own output."""
    copier, body = _Copier(None), body_of(shadowed)
    for module in shadowed.modules():
        copier.memo[id(module)] = module
        if hasattr(module, "config"):
            copier.configs[id(module.config)] = module.config
    copier.memo[id(body)] = Given(body)
    del copier.memo[id(shadowed)]
    head = copier.module(shadowed)
    embeds = "inputs_embeds" in inspect.signature(type(shadowed).forward).parameters
    return functools.partial(_run_head, head, "inputs_embeds" if embeds else "input_ids")


def _run_head(head: Any, name: str, hidden: torch.Tensor) -> Any:
    return head(**{name: hidden, "use_cache": False})


class _Copier:
    def __init__(self, implementation: str | None) -> None:
        self.implementation = implementation
        self.memo: dict[int, Any] = {}
        self.configs: dict[int, Any] = {}
        self.kept: list[Any] = []  # keeps objects alive, so that ids in the memo stay unique

    def module(self, module: nn.Module) -> nn.Module:
        module = getattr(module, "_orig_mod", module)  # torch.compile has traced the other attention
        if id(module) in self.memo or isinstance(module, torch.jit.ScriptModule):
            found: nn.Module = self.memo.get(id(module), module)
            return found
        made: nn.Module = object.__new__(type(module))
        self.memo[id(module)] = made
        self.kept.append(module)
        for name, value in tuple(vars(module).items()):
            if name == "forward":  # accelerate puts autocast around it, under which caches would have other rows
                value = vars(module).get("_original_forward", value)
            made.__dict__[name] = self._attribute(name, value)
        made.__dict__["training"] = False
        _reset_rotary(made)
        return made

    def _attribute(self, name: str, value: Any) -> Any:
        if name == "_parameters":
            return value
        if name == "_buffers":
            return Overlay(value) if value else {}
        if name == "_forward_hooks":  # transformers adds hooks of its own when it first runs
            return Overlay(value)
        if name.startswith("_") and "_hooks" in name:
            return value
        if name == "_modules":
            return {key: None if child is None else self.module(child) for key, child in tuple(value.items())}
        if name == "_compiled_call_impl":  # of model.compile(): the traced module itself
            return None
        return self.value(value, 0)

    def value(self, value: Any, depth: int) -> Any:
        """The same value, with the shadow's modules and configs in it."""
        if value is None or isinstance(value, _KEPT):
            return value
        if isinstance(value, nn.Module):
            return self.module(value)
        if _is_config(value):
            return self.config(value)
        if isinstance(value, types.MethodType):
            owner = self.value(value.__self__, depth)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            parts = [self.value(part, depth) for part in (value.func, value.args, value.keywords)]
            made = functools.partial(parts[0], *parts[1], **parts[2])
            made.__dict__.update({name: self.value(held, depth) for name, held in vars(value).items()})
            return made
        if isinstance(value, weakref.ref):
            target = value()
            new = self.value(target, depth) if isinstance(target, nn.Module) else target
            return value if new is target else weakref.ref(new)
        traced: Callable[..., Any] | None = getattr(value, "_torchdynamo_orig_callable", None)
        if traced is not None:
            return self.value(traced, depth)
        if isinstance(value, _CONTAINERS) and depth < _DEEPEST:
            return self._container(value, depth + 1)
        return value

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            made = copy.copy(value)
            for key, held in tuple(value.items()):
                made[key] = self.value(held, depth)
            return made
        held = [self.value(item, depth) for item in tuple(value)]
        if isinstance(value, tuple):
            same = all(new is old for new, old in zip(held, value))
            return value if same else type(value)(*held) if hasattr(value, "_fields") else type(value)(held)
        if isinstance(value, set):
            return type(value)(held)
        made = copy.copy(value)
        made[:] = held
        return made

    def config(self, config: Any) -> Any:
        """One copy of every config: those inside another are often modules' own as well."""
        self.kept.append(config)
        made = copy.deepcopy(config, self.configs)
        if self.implementation is not None and made._attn_implementation != self.implementation:
            made._attn_implementation = self.implementation
        if self.implementation == NAME:
            choose_(made)
        return made


def _is_config(value: Any) -> bool:
    return hasattr(value, "_attn_implementation") and hasattr(value, "to_dict") and not isinstance(value, nn.Module)


def _reset_rotary(module: nn.Module) -> None:
    """Frequencies that follow the length of the text start anew, in tensors that the model does not write."""
    kinds = getattr(module, "rope_type", None)
    for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        prefix = "" if layer is None else f"{layer}_"
        original = module.__dict__.get(f"{prefix}original_inv_freq", module._buffers.get(f"{prefix}original_inv_freq"))
        if not isinstance(kind, str) or not isinstance(original, torch.Tensor):
            continue
        if "dynamic" in kind or kind == "longrope":
            module._buffers[f"{prefix}inv_freq"] = original.clone()
            if f"{prefix}max_seq_len_cached" in module.__dict__ and hasattr(module, "original_max_seq_len"):
                module.__dict__[f"{prefix}max_seq_len_cached"] = module.original_max_seq_len


def structure_of(model: nn.Module) -> tuple[Any, ...]:
    """What a shadow does not follow: the modules of a model, which of PEFT's adapters are on, and hooks that change the
    arguments of the whole model, of which its body is called by itself."""
    modules = (part for module in model.modules() for part in (module, *_switches(module)))
    return *model._forward_pre_hooks, *modules


def _switches(module: nn.Module) -> Iterator[Any]:
    for name in ("_active_adapter", "_disable_adapters", "merged_adapters"):
        if (value := vars(module).get(name)) is not None:
            yield tuple(value) if isinstance(value, list) else value
