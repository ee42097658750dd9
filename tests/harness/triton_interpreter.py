"""Runs a test's Triton kernel compiled if there is a GPU, and interpreted on CPU tensors otherwise.

Triton decides when it is imported and a kernel is decorated, by the environment variable TRITON_INTERPRET. So
`tests/conftest.py` calls `choose_mode()` before anything imports Triton, and a test only needs

    pytestmark = requires_triton
    x = torch.randn(..., device=triton_device())
    kernel[grid](x, ...)

The interpreter computes `tl.dot` of bfloat16 wrongly, so tests take the dtypes of such kernels from `dot_dtypes()`.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import pytest
import torch

TRITON_FOUND = importlib.util.find_spec("triton") is not None
requires_triton = pytest.mark.skipif(not TRITON_FOUND, reason="needs triton")


def choose_mode() -> None:
    """Interpret where there is no GPU, unless TRITON_INTERPRET says otherwise. Must run before Triton is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if interpreted() and TRITON_FOUND:
        _accept_recent_numpy()
        _keep_truth_values()
        _remember_what_repeats()


def _accept_recent_numpy() -> None:
    """Triton 3.6 calls `int` on arrays of one element for loop bounds; NumPy 2.4 refuses (triton-lang/triton#9171)."""
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _keep_truth_values() -> None:
    """A comparison of scalars has the type of its operands once it is spread over a block, and Triton 3.9 takes only booleans for a mask."""
    from triton.runtime import interpreter

    splat = interpreter.InterpreterBuilder.create_splat

    def splat_as(self: Any, type: Any, value: Any) -> Any:
        spread = splat(self, type, value)
        spread.data = spread.data.astype(value.data.dtype, copy=False)
        return spread

    interpreter.InterpreterBuilder.create_splat = splat_as


def _remember_what_repeats() -> None:
    """Three quarters of the interpreter's time go into what gives the same again: it patches the language for every call of a helper
    within a kernel, though the launch has done so, and builds shapes and tables of dtypes anew for every value."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch_lang, numpy_dtype, nothing = interpreter._patch_lang, interpreter._get_np_dtype, interpreter._LangPatchScope()
    patched: dict[str, Any] = {}  # what patched a module of the language

    @cache
    def languages(fn: Any) -> frozenset[str]:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return frozenset(module.__name__ for module in modules)

    def patch_for_a_launch(fn: Any) -> Any:
        found = languages(fn)
        if found <= patched.keys():
            return nothing
        scope, is_launch = patch_lang(fn), not patched
        patched.update((name, scope) for name in found - patched.keys())
        # A launch restores the language at its end: what Triton's own functions have patched too, which see another module of it.
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                for other in reversed([*patched.values()]):
                    restore() if other is scope else other.restore()
                patched.clear()

            scope.restore = restore_all
        return scope

    @cache
    def numpy_dtype_of_scalars(dtype: Any) -> Any:
        return numpy_dtype(dtype)

    def numpy_dtype_of(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return numpy_dtype(scalar) if isinstance(scalar, tl.pointer_type) else numpy_dtype_of_scalars(scalar)

    @cache
    def shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        value = tl.tensor(None, tl.block_type(tl.int1, list(shape)) if shape else tl.int1)
        return value.numel, value.shape

    build = tl.tensor.__init__

    def tensor_with_a_known_shape(self: Any, handle: Any, type: Any) -> None:
        if handle is None:
            build(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(type.shape if type.is_block() else ())

    build_type = tl.block_type.__init__
    shapes: dict[
        int, tuple[Any, int, str]
    ] = {}  # by the identity of the shape that types share, which `known_shape` keeps

    @cache
    def known_shape(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        plain = object.__new__(tl.block_type)
        build_type(plain, tl.int1, list(sizes))
        return shapes.setdefault(id(plain.shape), (plain.shape, plain.numel, str(plain.shape)))

    def type_with_a_known_shape(self: Any, element_ty: Any, shape: Any) -> None:
        found = shapes.get(id(shape))
        if found is None:
            sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
            if not sizes or any(type(size) is not int for size in sizes):
                build_type(self, element_ty, shape)
                return
            found = known_shape(sizes)
        self.element_ty, (self.shape, self.numel, text) = element_ty, found
        self.name = f"<{text}, {element_ty}>"

    tuples_equal, dtypes_equal, broadcast = tl.tuple.__eq__, tl.dtype.__eq__, TritonSemantic.broadcast_impl_value

    def equal_tuples(self: Any, other: Any) -> Any:
        if self is other:
            return tl.constexpr(True)
        if isinstance(other, list) and all(type(value) is int for value in other):
            return tl.constexpr(self.values == other)
        return tuples_equal(self, other)

    def equal_dtypes(self: Any, other: Any) -> Any:
        return self is other or dtypes_equal(self, other)

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        alike = left.is_block() and right.is_block() and left.shape is right.shape
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_for_a_launch, numpy_dtype_of
    tl.tensor.__init__ = tensor_with_a_known_shape
    tl.block_type.__init__ = type_with_a_known_shape
    tl.tuple.__eq__, tl.dtype.__eq__ = equal_tuples, equal_dtypes
    TritonSemantic.broadcast_impl_value = broadcast_unless_alike


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_device() -> torch.device:
    return torch.device("cpu" if interpreted() else "cuda")


def dot_dtypes() -> list[torch.dtype]:
    """The dtypes for which `tl.dot` can be trusted here."""
    exact_everywhere = [torch.float16, torch.float32]
    return exact_everywhere if interpreted() else [*exact_everywhere, torch.bfloat16]
