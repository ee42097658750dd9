"""A GPU in name only: tensors that report ``cuda:0`` and are in host memory.

    with pretended_gpu():
        model = pd.models.load("tiny-code").to("cuda")
        pd.decoding.generate(model, "import os")

Every operator runs on the CPU, with real values, and refuses what a GPU refuses: tensors of both devices in one call, except
single numbers. So Python code that forgets a device fails here instead of on the first GPU it runs on. It does not test kernels:
an op of ours runs its CPU kernel. There is no backward pass, for which autograd would ask for a driver. Inference mode is no_grad
inside, because its tensors cannot be wrapped.

`waits` reports where a host would have waited for a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pdkernels import backends
from tests.cudasim.build import CACHE, build_once, compiler, digest_text, run_compiler

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: none needs to be pretended")
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
# Where torch itself accepts indices in host memory.
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default}
# Operators whose result has a size, or is a number, that depends on the values. Indexing is one if an index is a mask.
READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_log: list[str] | None = None  # of `waits`
_calls: list[tuple[Any, Any]] | None = None  # of `operators`
_table: Tensor | None = None

# What CUDA builds have and CPU builds lack: switching to the device, a no-op here.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using c10::DeviceType;
c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> guard;
struct Register {
  Register() { c10::impl::device_guard_impl_registry[static_cast<int>(DeviceType::CUDA)].store(&guard); }
} at_load;
}  // namespace
"""


def flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    unused = torch.empty(0)
    return out, lse, unused, unused, q.shape[2], k.shape[2], unused, unused, unused


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, with_lse: bool) -> tuple[Any, ...]:
    assert with_lse and bias.stride(-2) % 8 == 0
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
    unused = torch.empty(0)
    return out, torch.nn.functional.pad(lse, (0, -q.shape[2] % 32)), unused, unused


# Operators that exist only on GPUs.
STAND_INS = {
    torch.ops.aten._fused_sdp_choice.default: lambda *arguments, **options: 0,  # plain operators
    torch.ops.aten._scaled_dot_product_flash_attention.default: flash,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: efficient,
}


@cache
def install_guard() -> None:
    if torch.cuda.is_available():
        raise RuntimeError(
            "tests.harness.pretended_gpu: there is a GPU, and pretending another would break it for this process."
        )
    folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", "-isystem", str(folder / "include"), "-L", str(folder / "lib"), "-lc10"]
    library = CACHE / f"libpretended_gpu-{digest_text(GUARD, torch.__version__, *flags)}.so"

    def build(target: Path) -> None:
        source = target.with_suffix(".cpp")
        source.write_text(GUARD)
        run_compiler([compiler(), str(source), *flags, "-o", str(target)])
        source.unlink()

    ctypes.CDLL(str(build_once(library, build)))


class Pretended(Tensor):
    """A tensor on the pretended GPU, and ``held``, which has its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        facts = dict(strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device="cuda:0")
        tensor = Tensor._make_wrapper_subclass(cls, held.shape, **facts)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Pretended({self.held})"


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """What operators take and return is made of lists, tuples and dicts; torch's own trees take several times as long."""
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(change, item) for item in value])
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return change(value)


def run(function: Any, args: Any, kwargs: Any) -> Any:
    """One operator, its devices checked, on the CPU."""
    leaves: list[Any] = []
    mapped(leaves.append, (args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    devices = [x for x in leaves if isinstance(x, torch.device)]
    there = [x for x in tensors if isinstance(x, Pretended)]
    here = [x for x in tensors if not isinstance(x, Pretended)]
    ours = function._schema.name.startswith("pdkernels")
    if there and not devices and function not in COPIES and any(x.dim() > 0 or ours for x in here):
        if function not in INDEXING or not isinstance(args[0], Pretended):
            raise RuntimeError(f"{function}: tensors of cuda:0 and cpu in one call")
    stays = devices[0].type == "cuda" if devices else bool(there)
    plain = mapped(
        lambda x: x.held if isinstance(x, Pretended) else CPU if isinstance(x, torch.device) else x, (args, kwargs)
    )
    chosen = STAND_INS.get(function, function) if there else function
    if _calls is not None and stays:
        _calls.append((function, args))
    if _log is not None and (event := _event(function, args, kwargs, stays)):
        _log.append(event)
    result = chosen(*plain[0], **plain[1])
    known = {id(x.held): x for x in there}

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, Pretended) or not stays:
            return x
        if any(x is other for other in here):  # `to` without another device
            return Pretended(x.clone()) if devices else x
        return known[id(x)] if id(x) in known else Pretended(x)

    return mapped(wrapped, result)


def _event(function: Any, args: Any, kwargs: Any, stays: bool) -> str | None:
    """What `waits` records for an operator, whose result is on the GPU if it `stays`."""
    if function is torch.ops.aten._to_copy.default:
        return _crossing(isinstance(args[0], Pretended), stays, kwargs.get("non_blocking", False))
    if function is torch.ops.aten.copy_.default:
        return _crossing(isinstance(args[1], Pretended), isinstance(args[0], Pretended), args[2:] == (True,))
    if not args or not isinstance(args[0], Pretended):
        return None
    if function is torch.ops.aten.embedding.default:
        return "forward" if args[0].held is _table else None
    if function in INDEXING:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype == torch.bool for index in indices):
            fills = len(args) > 2 and not isinstance(
                args[2], Pretended
            )  # a number, which torch writes without reading the mask
            return None if fills else "read"
        return "upload" if any(not isinstance(index, Pretended) for index in indices) else None
    return "read" if READING.intersection(function.tags) else None


def _crossing(source: bool, target: bool, non_blocking: bool) -> str | None:
    if source and not target:
        return "read"
    return "upload" if target and not source and not non_blocking else None


class Operators(TorchDispatchMode):
    """Calls without a tensor of ours: factories, and copies from the CPU."""

    def __init__(self) -> None:
        super().__init__()
        # The only kind of mode under which torch needs no driver to make a tensor.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Calls that never reach an operator."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.tolist and isinstance(args[0], Pretended):
            if _log is not None:
                _log.append("read")
            return args[0].held.tolist()
        if function in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            return function(*args, **{**kwargs, "device": "cpu"}).to(kwargs.get("device") or "cpu")
        return function(*args, **kwargs)


def on_cuda(op: str) -> dict[tuple[str, str], str]:
    """The choices for a GPU, which a library without CUDA code lacks."""
    return {(name, "cuda"): backends.ON_CUDA[op] for name in ("auto", backends.ON_CUDA[op])}


@contextmanager
def pretended_gpu() -> Iterator[None]:
    install_guard()
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            patch.object(torch, "inference_mode", lambda mode=True: torch.set_grad_enabled(not mode)),
            patch.dict(backends.CHOICES, {op: on_cuda(op) | choices for op, choices in backends.CHOICES.items()}),
            Functions(),
            Operators(),
        ):
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)


@contextmanager
def waits(embedding: Tensor | None = None) -> Iterator[list[str]]:
    """Where the host would wait for the GPU, and the forwards in between, in order.

    "read": values come to the host, one by one or many at once, or decide on a shape. "upload": a copy to the GPU without
    ``non_blocking``. "forward": tokens were looked up in `embedding`, which a model has on the pretended GPU.
    """
    global _log, _table
    before = _log, _table
    log: list[str] = []
    _log, _table = log, None if embedding is None else embedding.held
    try:
        yield log
    finally:
        _log, _table = before


@contextmanager
def operators() -> Iterator[list[tuple[Any, Any]]]:
    """Every operator that runs on the pretended GPU, with its positional arguments, in order."""
    global _calls
    before, _calls = _calls, []
    try:
        yield _calls
    finally:
        _calls = before
