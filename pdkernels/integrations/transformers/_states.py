"""Layers of transformers with a recurrent state: their own code, with other functions for the scans.

The layers of the hybrid families call a convolution and a scan by name, as functions of their module. A shadow's layers
run the same code with functions of ours under those names, which find the states of the forward in `USED`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdkernels.models.architectures import fused
from pdkernels.models.architectures.states import Activation, States

USED: ContextVar[States | None] = ContextVar("states", default=None)


@contextmanager
def using(states: States) -> Iterator[None]:
    """Scans of this thread take these states."""
    token = USED.set(states)
    try:
        yield
    finally:
        USED.reset(token)


def _states() -> States:
    found = USED.get()
    assert found is not None, "a layer with a state runs outside of a wrapped model's forward"
    return found


def _convolution(layer: int) -> Callable[..., Any]:
    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        kind = cast(Activation, {None: "none", "swish": "silu"}.get(activation, activation))
        return _states().short_conv((layer, "conv"), hidden_states.mT, weight, bias, kind).mT

    return causal_conv1d_fn


def _delta(layer: int) -> Callable[..., Any]:
    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        eps = 1e-6 if use_qk_l2norm_in_kernel else None
        return _states().gated_delta((layer, "delta"), query, key, value, g, beta, eps), None

    return chunk_gated_delta_rule


def _selective(layer: int) -> Callable[..., Any]:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> Tensor:
        scan = (hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit)
        return _states().selective_state((layer, "selective"), *scan)

    return mamba2_chunk_scan


_SCANS: dict[str, Callable[[int], Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta,
    "mamba2_chunk_scan": _selective,
}


def _lightning(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """The layer of MiniMax, whose class has no function for its scan."""
    heads = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (module.num_attention_heads, -1))
    q, k, v = heads.split(module.head_dim, -1)
    decay = -module.slope_rate.float().view(-1)
    mixed = _states().selective_state((module.layer_idx, "selective"), v, None, decay, k, q)
    gate = F.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(mixed.flatten(-2))), None


class _Functional:
    """`torch.nn.functional` with functions whose bits do not depend on the other rows, or on where a number is in a
    tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return fused.linear(x, weight, bias)

    @staticmethod
    def softplus(x: Tensor) -> Tensor:
        return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


class _Modules:
    """`torch.nn` with these functions."""

    functional = _Functional()

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)


_ROWS = {"F": _Modules.functional, "nn": _Modules()}


# Scans that our ops do not compute: a decay for every channel.
_OTHERS = {"chunk_kimi_delta_attention": "Kimi delta attention", "mamba_selective_scan": "Mamba 1"}


def other_scans(shadowed: nn.Module) -> str:
    """Which of them the layers of a shadow call, in words."""
    called = {name for module in shadowed.modules() for name in _names(inspect.unwrap(type(module).forward))}
    return ", ".join(words for name, words in _OTHERS.items() if name in called)


def exchange_(shadowed: nn.Module) -> bool:
    """Gives the layers of a shadow our scans; says whether there were any. Its matrix products are then ours as well,
    so that a row has the same bits in any forward."""
    modules = [(module, inspect.unwrap(type(module).forward)) for module in shadowed.modules()]
    exchanged = False
    for module, forward in modules:
        layer, names = getattr(module, "layer_idx", None), _names(forward)
        scans = {name: _SCANS[name](layer) for name in names if name in _SCANS and isinstance(layer, int)}
        if "get_linear_cache" in names and hasattr(module, "slope_rate"):
            exchanged = True
            _assign(module, types.MethodType(_lightning, module))
        if scans and not any(name in names for name in _OTHERS):
            exchanged = True
            _replace(module, forward, {**scans, **_rows(forward)})
    for module, forward in modules if exchanged else ():
        if type(module) is nn.Linear:
            _assign(module, types.MethodType(_product, module))
        elif "linear" in _names(forward) and _rows(forward) and "forward" not in module.__dict__:
            _replace(module, forward, _rows(forward))
    return exchanged


def _names(forward: Any) -> tuple[str, ...]:
    return getattr(getattr(forward, "__code__", None), "co_names", ())


def _rows(forward: Any) -> dict[str, Any]:
    """Those of `_ROWS` that a function looks up as globals."""
    found = getattr(forward, "__globals__", {})
    true = {"F": F, "nn": nn}
    return {name: _ROWS[name] for name in _names(forward) if found.get(name) is true.get(name, forward)}


def _product(module: nn.Linear, x: Tensor) -> Tensor:
    return fused.linear(x, module.weight, module.bias)


def _replace(module: nn.Module, forward: Any, names: dict[str, Any]) -> None:
    changed = types.FunctionType(
        forward.__code__, {**forward.__globals__, **names}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    _assign(module, types.MethodType(changed, module))


def _assign(module: nn.Module, forward: Any) -> None:
    # accelerate puts a function of its own in the place of a module's forward, which calls this attribute.
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    module.__dict__[name] = forward
