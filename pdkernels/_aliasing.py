"""Checks that a tensor that an op writes overlaps no other argument, and that its entries do not share memory.

The compiled ops check this themselves (`python_bindings/aliasing.h`). This module raises the error, and checks
references and Triton kernels. Views that interleave, such as K and V of one buffer, do not overlap.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pdkernels._validation import fail, message

# stride * x for an integer x in [minimum, maximum]; stride above 0
Term = tuple[int, int, int]


# Kernels iterate over all entries of an expanded dimension, whose size is not limited by memory.
MAX_EXPANDED = 2**31 - 1


def check_dense(op: str, arguments: Iterable[tuple[str, Any]]) -> None:
    """Raises TypeError for tensors that are not dense, ValueError for expanded tensors of absurd sizes."""
    compiling = torch.compiler.is_compiling()
    for name, value in arguments:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            if tensor.layout is not torch.strided:
                raise TypeError(message(op, name, "be a dense tensor", tensor.layout, "Convert it with .to_dense()."))
            if compiling or isinstance(tensor, FakeTensor):
                continue
            if any(n > MAX_EXPANDED and stride == 0 for n, stride in zip(tensor.shape, tensor.stride())):
                expectation = f"have at most {MAX_EXPANDED} entries in an expanded dimension"
                fail(op, name, expectation, f"shape {tuple(tensor.shape)}")


def check_written(op: str, mutated: Sequence[str], arguments: Iterable[tuple[str, Any]]) -> None:
    """Raises ValueError unless each of the `mutated` arguments has its own memory. Tracing has no addresses and checks
    only strides."""
    compiling, spans = torch.compiler.is_compiling(), []
    for name, value in arguments:
        is_list = isinstance(value, (list, tuple))
        for i, tensor in enumerate(value if is_list else (value,)):
            if not isinstance(tensor, Tensor):
                continue
            if name in mutated:
                _check_itself(op, f"{name}[{i}]" if is_list and len(value) > 1 else name, tensor, compiling)
            if not compiling and (span := _span(tensor)):
                spans.append((*span, name, i, tensor))
    spans.sort(key=operator.itemgetter(0))
    for n, (_, end, name, i, tensor) in enumerate(spans):
        for start, _, other, j, second in spans[n + 1 :]:
            if start >= end:
                break
            if (name in mutated or other in mutated) and overlap(tensor, second):
                _refuse(op, mutated, arguments, (name, i), (other, j))


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Start and end of its memory; None if it has none."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:
        return None
    if not start:
        return None
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    item = tensor.element_size()
    return start, start + item * (1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())))


def _check_itself(op: str, name: str, tensor: Tensor, compiling: bool) -> None:
    expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))
    if not expanded and (compiling or tensor.is_contiguous() or not _span(tensor)):
        return
    if tensor.numel() > 0 and (expanded or overlaps_itself(tensor)):
        actual = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        remedy = "It is written; pass a copy, .contiguous(), of what was expanded."
        fail(op, name, "have a place in memory for each entry", actual, remedy)


def _refuse(op: str, mutated: Sequence[str], arguments: Iterable[tuple[str, Any]], *pair: tuple[str, int]) -> None:
    """Raises the error for an overlapping pair, named in the order of the arguments, read-only ones last."""
    values = dict(arguments)
    order = list(values)
    pair = tuple(sorted(pair, key=lambda entry: (entry[0] not in mutated, order.index(entry[0]), entry[1])))
    first, second = (
        f"{name}[{i}]" if isinstance(values[name], (list, tuple)) and len(values[name]) > 1 else name
        for name, i in pair
    )
    remedy = f"{first} is written; pass a copy, .clone(), of {second}."
    if pair[1][0] in mutated:
        remedy = "Both are written; give each its own memory."
    fail(op, second, f"not overlap the memory of {first}", "tensors that share bytes", remedy)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte."""
    terms: dict[int, tuple[int, int]] = {}
    for tensor, sign in ((a, 1), (b, -1)):
        item = tensor.element_size()
        for size, stride in zip(tensor.shape, tensor.stride()):
            if size > 1 and stride > 0:
                minimum, maximum = terms.get(stride * item, (0, 0))
                terms[stride * item] = (minimum, maximum + size - 1) if sign > 0 else (minimum - size + 1, maximum)
    distance = b.data_ptr() - a.data_ptr()
    numbers = [(stride, *bounds) for stride, bounds in terms.items()]
    return _finds(numbers, distance - a.element_size() + 1, distance + b.element_size() - 1)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two entries share a byte.

    >>> x = torch.zeros(9)
    >>> overlaps_itself(x.as_strided((3, 3), (2, 1))), overlaps_itself(x.as_strided((2, 3), (3, 2)))
    (True, False)
    """
    item = tensor.element_size()
    dims = sorted(((stride * item, n) for n, stride in zip(tensor.shape, tensor.stride()) if n > 1), reverse=True)
    extent, nested = item, True
    for stride, n in reversed(dims):
        nested = nested and stride >= extent
        extent += (n - 1) * stride
    if nested:
        return False
    if dims[-1][0] == 0:
        return True
    # Two entries differ: consider the first dimension in which they do, by 1 or more.
    for first, (stride, n) in enumerate(dims):
        inner_terms = [(stride, 1 - n, n - 1) for stride, n in dims[first + 1 :]]
        if _finds([(stride, 1, n - 1), *inner_terms], 1 - item, item - 1):
            return True
    return False


def _finds(terms: list[Term], low: int, high: int) -> bool:
    """Whether some sum of one value per term lies in ``[low, high]``; True if the search takes too long."""
    terms = sorted(terms, reverse=True)
    rests = [(0, 0, 0)]  # minimum and maximum of the terms that follow, and their common divisor
    for stride, minimum, maximum in reversed(terms):
        rests.append((rests[-1][0] + stride * minimum, rests[-1][1] + stride * maximum, math.gcd(rests[-1][2], stride)))
    rests.reverse()
    steps = 10000

    def finds(k: int, low: int, high: int) -> bool:
        nonlocal steps
        if k == len(terms):
            return low <= 0 <= high
        steps -= 1
        if steps < 0:
            return True
        minimum, maximum, divisor = rests[k]
        if high // divisor * divisor < low or high < minimum or low > maximum:
            return False
        stride, minimum, largest = terms[k]
        first = max(minimum, -((rests[k + 1][1] - low) // stride))
        last = min(largest, (high - rests[k + 1][0]) // stride)
        return any(finds(k + 1, low - stride * x, high - stride * x) for x in range(first, last + 1))

    return finds(0, low, high)
