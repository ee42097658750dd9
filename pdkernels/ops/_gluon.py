"""Whether a call runs a Gluon kernel or the Triton kernel that computes the same.

Gluon kernels are for Hopper. Before the first call on a device, the kernel runs on a small input and is compared with
the reference. If it fails, or its results differ, the Triton kernel serves the process (gradients in one pass: the kernels of
two passes), and a warning says so.
``PDKERNELS_GLUON=0`` chooses the Triton kernels, ``PDKERNELS_GLUON=one-pass`` the backward pass of attention that has five
products in place of seven, where its kernel serves.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pdkernels._attention import AttentionArguments, GradientArguments, SpeculativeArguments
from pdkernels._validation import message
from pdkernels.masks.basic import causal
from pdkernels.reference.block_sparse_attention import block_sparse_attention
from pdkernels.reference.speculative_attention import speculative_attention

VARIABLE = "PDKERNELS_GLUON"
ONE_PASS = "one-pass"
# By op, module of the kernel, device, head dimension, dtype and page size: whether the kernel passed.
CHECKED: dict[tuple[type, str, str, int, torch.dtype, int], bool] = {}

Arguments = TypeVar("Arguments", AttentionArguments, GradientArguments, SpeculativeArguments)
Results = tuple[Tensor, ...]
NAMES = {
    AttentionArguments: "block-sparse",
    GradientArguments: "the gradients of block-sparse",
    SpeculativeArguments: "speculative",
}


def enabled() -> bool:
    """Whether the environment allows Gluon kernels.

    >>> import os; from unittest import mock
    >>> with mock.patch.dict(os.environ, {VARIABLE: "0"}): enabled()
    False
    """
    return _setting() != "0"


def _setting() -> str:
    setting = os.environ.get("PDKERNELS_GLUON", "auto")
    if setting not in ("auto", "0", ONE_PASS):
        raise ValueError(message("block_sparse_attention", VARIABLE, "be auto, 0 or one-pass", repr(setting)))
    return setting


def on_hopper(q: Tensor) -> bool:
    device = q.device
    return enabled() and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def forward_for(arguments: AttentionArguments) -> Callable[[AttentionArguments], tuple[Tensor, Tensor]] | None:
    """The Gluon kernel for this call, or None."""
    if not on_hopper(arguments.q):
        return None
    try:
        from pdkernels.gluon import launch as _launch
    except ImportError:  # a Triton without Gluon
        return None
    return _launch.forward if _launch.serves(arguments) and passes(arguments, _launch.forward) else None


def backward_for(gradients: GradientArguments) -> Callable[[GradientArguments], tuple[Tensor, Tensor, Tensor]] | None:
    """The Gluon kernels of the backward pass for this call, or None."""
    if not on_hopper(gradients.forward.q):
        return None
    try:
        from pdkernels.gluon import launch as _launch
        from pdkernels.gluon import launch_one_pass as _one_pass
    except ImportError:
        return None
    if _setting() == ONE_PASS and _one_pass.serves(gradients) and passes(gradients, _one_pass.backward):
        return _one_pass.backward
    return _launch.backward if _launch.serves_gradients(gradients) and passes(gradients, _launch.backward) else None


def speculative_for(arguments: SpeculativeArguments) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The Gluon kernel for this call, or None. It takes ``append`` too."""
    if not on_hopper(arguments.q):
        return None
    try:
        from pdkernels.gluon import launch_speculative as _launch
    except ImportError:
        return None
    return _launch.forward if _launch.serves(arguments) and passes(arguments, _launch.forward) else None


def passes(arguments: Arguments, forward: Callable[[Arguments], Results]) -> bool:
    """Whether the kernel for this dtype, head dimension and page size computes what the reference does here. Runs it
    once."""
    q = arguments.forward.q if isinstance(arguments, GradientArguments) else arguments.q
    page_size = 0
    if isinstance(arguments, SpeculativeArguments) and arguments.block_table is not None:
        page_size = arguments.k_cache.shape[1]
    key = (type(arguments), forward.__module__, str(q.device), q.shape[-1], q.dtype, page_size)
    if key not in CHECKED:
        # A graph that is being captured cannot wait for results: it gets the Triton kernel.
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        CHECKED[key] = _compare(*_sample(arguments, q, page_size), forward, q)
    return CHECKED[key]


def _sample(arguments: Arguments, like: Tensor, page_size: int) -> tuple[Arguments, Callable[[], Results]]:
    """A small call of the same op, and its results by the reference."""
    device, dtype, head_dim = like.device, like.dtype, like.shape[-1]
    generator = torch.Generator().manual_seed(0)

    def randn(tokens: int, heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, head_dim, generator=generator).to(device, dtype)

    scale = head_dim**-0.5
    if not isinstance(arguments, SpeculativeArguments):
        mask = causal(200)
        q, k, v, grad = (randn(200, heads) for heads in (2, 1, 1, 2))
        sample = AttentionArguments(q, k, v, *mask.plan(128, 128, device).arguments, scale)

        def exact(*tensors: Tensor) -> Results:
            results: Results = block_sparse_attention(*tensors, mask.dense().to(device), scale)
            return results

        inputs = tuple(x.float() for x in (q, k, v))
        if isinstance(arguments, AttentionArguments):
            return sample, lambda: exact(*inputs)
        vjp: Any = torch.func.vjp(exact, *inputs)
        (out, lse), gradients = vjp
        return GradientArguments(grad, None, out.to(dtype), lse, sample), lambda: gradients((grad.float(), lse * 0))
    mask, slots = causal(70), 700
    q, k_new, v_new, k, v = (
        randn(tokens, heads) for tokens, heads in ((70, 2), (70, 1), (70, 1), (slots, 1), (slots, 1))
    )
    lengths = torch.tensor([600], device=device)
    table = None
    if page_size:
        pages = -(-slots // page_size)
        table = torch.arange(pages - 1, -1, -1, device=device)[None]
        k, v = (randn(pages * page_size, 1).view(pages, page_size, 1, head_dim) for _ in range(2))
    plan = mask.plan(64, 64, device).arguments
    sample = SpeculativeArguments(q, k_new, v_new, k, v, lengths, *plan, scale, table)
    inputs = tuple(x.float() for x in (q, k_new, v_new, k, v))
    return sample, lambda: speculative_attention(
        *inputs, lengths, mask.dense().to(device), block_table=table, scale=scale
    )


def _compare(
    sample: Arguments, exact: Callable[[], Results], forward: Callable[[Arguments], Results], like: Tensor
) -> bool:
    try:
        errors = [(a.float() - b).abs().max() / b.abs().max() for a, b in zip(forward(sample), exact(), strict=True)]
        worst = float(torch.stack(errors).max())  # NaN if one of them is, which Python's max may pass over
        problem = "" if worst < 0.02 else f"its results are off by {worst:.3g}"  # bf16 rounds at 0.004
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        one_pass = forward.__module__.endswith("_one_pass")
        op, other = NAMES[type(sample)], "those of two passes are" if one_pass else "the Triton kernel is"
        name = f"the Gluon kernel of {op} attention {'in one pass ' if one_pass else ''}for heads of {like.shape[-1]} in {like.dtype}"
        warnings.warn(f"pdkernels: {name} is not used on {like.device}, {other}: {problem}", stacklevel=5)
    return not problem
