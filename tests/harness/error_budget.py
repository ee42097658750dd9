"""The error a kernel may have: twice that of PyTorch in the same dtype, plus one rounding; no tuned tolerance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ErrorBudget(NamedTuple):
    """Errors against the fp64 oracle, and those allowed; each as largest and as root mean square."""

    kernel_max: float
    kernel_rms: float
    pytorch_max: float
    pytorch_rms: float
    allowed_max: float
    allowed_rms: float


def assert_within_budget(actual: Tensor, oracle_fp64: Tensor, same_dtype_pytorch: Tensor, *, name: str) -> ErrorBudget:
    """Assert that `actual` is about as close to the oracle as PyTorch gets with the same dtypes.

    Args:
        actual: the kernel's result.
        oracle_fp64: the same quantity computed in float64 from the same inputs. For integers and bools: the exact one.
        same_dtype_pytorch: the same quantity computed by PyTorch from the kernel's inputs; same dtype as `actual`.
        name: what was compared, for the failure message.

    The largest error and the root-mean-square error are each allowed `2 * error of PyTorch + one unit roundoff of the
    dtype times the oracle's magnitude` (largest or root mean square). NaN and infinities must be where the oracle,
    rounded to the dtype, has them; where PyTorch overflows and the oracle does not, either is right. Integers and bools
    are exactly equal.

    Pass some hundred values or more: with a handful, PyTorch may happen to have all of them right. Float64 kernels
    cannot be checked, since the oracle is no better than they are.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> assert_within_budget(x.sum(), x.double().sum(), x.sum(), name="sum").kernel_max
    0.0
    """
    budget = measured(actual, oracle_fp64, same_dtype_pytorch, name=name)
    if budget.kernel_max > budget.allowed_max or budget.kernel_rms > budget.allowed_rms:
        actual, oracle, pytorch = (t.detach().cpu() for t in (actual, oracle_fp64, same_dtype_pytorch))
        error = (actual.double() - oracle).abs().nan_to_num(0, 0)
        raise AssertionError(
            f"{name} ({actual.dtype}, {tuple(actual.shape)}): error over budget\n"
            f"             kernel       PyTorch      allowed\n"
            f"  largest    {budget.kernel_max:<12.4g} {budget.pytorch_max:<12.4g} {budget.allowed_max:<12.4g}\n"
            f"  rms        {budget.kernel_rms:<12.4g} {budget.pytorch_rms:<12.4g} {budget.allowed_rms:<12.4g}\n"
            f"  worst {_at(error, actual, oracle, pytorch)}"
        )
    return budget


def measured(actual: Tensor, oracle_fp64: Tensor, same_dtype_pytorch: Tensor, *, name: str) -> ErrorBudget:
    """What `assert_within_budget` checks. Asserts what needs no budget: integers, and where NaN and infinities are."""
    _check_arguments(actual, oracle_fp64, same_dtype_pytorch, name)
    actual, oracle, pytorch = (t.detach().cpu() for t in (actual, oracle_fp64, same_dtype_pytorch))
    if not actual.dtype.is_floating_point:
        _assert_equal(actual, oracle, name)
        return ErrorBudget(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    dtype = actual.dtype
    kinds = _kind(actual)
    rounded = _kind(oracle.to(dtype))
    strays = (kinds != rounded) & (kinds != _kind(pytorch))
    if strays.any():
        raise AssertionError(
            f"{name}: NaN or infinity in the wrong place, {_at(strays.double(), actual, oracle, pytorch)}"
        )

    finite = (kinds == 0) & (rounded == 0)
    exact = oracle.double()
    kernel_error = torch.where(finite, (actual.double() - exact).abs(), 0)
    pytorch_error = torch.where(finite & (_kind(pytorch) == 0), (pytorch.double() - exact).abs(), 0)
    magnitude = torch.where(finite, exact.abs(), 0)
    info = torch.finfo(dtype)
    unit_roundoff, half_subnormal = info.eps / 2, info.smallest_normal * info.eps / 2

    def allowed(pytorch_error: float, magnitude: float) -> float:
        return 2 * pytorch_error + max(unit_roundoff * magnitude, half_subnormal)

    return ErrorBudget(
        _largest(kernel_error),
        _rms(kernel_error),
        _largest(pytorch_error),
        _rms(pytorch_error),
        allowed(_largest(pytorch_error), _largest(magnitude)),
        allowed(_rms(pytorch_error), _rms(magnitude)),
    )


def _check_arguments(actual: Tensor, oracle: Tensor, pytorch: Tensor, name: str) -> None:
    """Mistakes of the test, not of the kernel, except for a wrong shape or dtype."""
    if actual.is_complex():
        raise TypeError(f"{name}: complex tensors have no budget")
    if actual.shape != oracle.shape or actual.shape != pytorch.shape:
        shapes = f"kernel {tuple(actual.shape)}, oracle {tuple(oracle.shape)}, PyTorch {tuple(pytorch.shape)}"
        raise AssertionError(f"{name}: shapes differ: {shapes}")
    if actual.dtype != pytorch.dtype:
        raise AssertionError(f"{name}: the kernel gives {actual.dtype}, PyTorch gives {pytorch.dtype}")
    if actual.dtype.is_floating_point and oracle.dtype != torch.float64:
        raise TypeError(f"{name}: the oracle must be float64, got {oracle.dtype}")


def _assert_equal(actual: Tensor, oracle: Tensor, name: str) -> None:
    wrong = actual != oracle
    if wrong.any():
        at = _at(wrong.double(), actual, oracle, None)
        raise AssertionError(f"{name}: {int(wrong.sum())} of {wrong.numel()} integers differ, first {at}")


def _kind(values: Tensor) -> Tensor:
    """0 finite, 1 and -1 infinite, 2 NaN."""
    return torch.where(values.isnan(), 2, values.isinf() * values.sign().nan_to_num()).to(torch.int8)


def _largest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0


def _rms(values: Tensor) -> float:
    # Scaled, since squares of the smallest errors would underflow and those of the largest overflow.
    largest = _largest(values)
    return largest * (values / largest).square().mean().sqrt().item() if largest > 0 else 0.0


def _at(severity: Tensor, actual: Tensor, oracle: Tensor, pytorch: Tensor | None) -> str:
    """The index where `severity` is largest, and the values there."""
    index = tuple(int(i) for i in torch.unravel_index(severity.argmax(), severity.shape)) if severity.ndim else ()
    values = f"kernel {actual[index].item()!r}, oracle {oracle[index].item()!r}"
    return f"at {list(index)}: {values}" + ("" if pytorch is None else f", PyTorch {pytorch[index].item()!r}")
