"""The ops between a transformer's matrix products, in the sizes of Huginn-0125: ours, eager PyTorch, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pdkernels as pd
from bench.devices import DRY_RUN, by_device
from bench.timing import compare
from pdkernels.models.architectures.rope import rope_tables
from tests.harness.error_budget import assert_within_budget

HIDDEN, INNER, HEADS, HEAD_DIM, EPS = 5280, 17920, 55, 96, 1e-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {"cpu": (1, 16, 64, 128, 512), "cuda": (1, 16, 128, 512), "dry": (2,)}
ROWS_OF_TRAINING = {"cpu": (64, 512), "cuda": (512, 4096), "dry": (2,)}


class Job(NamedTuple):
    """One op on one set of tensors: how it runs, its results, and how many bytes must move."""

    ours: Callable[[], object]
    eager: Callable[..., object]
    inputs: tuple[Tensor, ...]
    result: Callable[[], tuple[Tensor, ...]] | None  # None: what the call returns
    exact: tuple[Tensor, ...]
    same_dtype: tuple[Tensor, ...]
    bytes: int


def norms(x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x.float() + residual.float(), (HIDDEN,), None, EPS).to(x.dtype) * weight
    return y, F.rms_norm(y.float(), (HIDDEN,), None, EPS).to(x.dtype) * next_weight


def gate(x: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (F.silu(first) * second).to(x.dtype)


def gelu_gate(x: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (F.gelu(first, approximate="tanh") * second).to(x.dtype)


def turn_(qkv: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    turned = qkv[:, :, : 2 * HEADS]
    wide = turned.float() + bias.float()
    swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned.copy_(wide * cos[positions].unsqueeze(1) + swapped * sin[positions].unsqueeze(1))


def rotation(turn: Callable[..., None], *tensors: Tensor) -> None:
    """Batch 1: positions are a vector, so that rows go to the cache by one index_copy each (compiled, it would copy the cache)."""
    qkv, bias, cos, sin, k_cache, v_cache, lengths, position = tensors
    positions = lengths + position
    turn(qkv, bias, cos, sin, positions)
    k_cache[0].index_copy_(0, positions, qkv[0, :, HEADS : 2 * HEADS])
    v_cache[0].index_copy_(0, positions, qkv[0, :, 2 * HEADS :])


def compiled_of(eager: Callable[..., object]) -> Callable[..., object]:
    if eager is EAGER_ROTATION:
        return partial(rotation, torch.compile(turn_, dynamic=False))
    return torch.compile(eager, dynamic=False)


EAGER_ROTATION = partial(rotation, turn_)


def norm_job(rows: int, dtype: torch.dtype, device: str, draw: Callable[..., Tensor]) -> Job:
    inputs = tuple(draw(*shape) for shape in ((rows, HIDDEN), (rows, HIDDEN), (HIDDEN,), (HIDDEN,)))
    ours = lambda: pd.add_rms_norm(*inputs[:3], next_weight=inputs[3], eps=EPS)  # noqa: E731
    exact, same = (
        pd.reference.transformer_ops.add_rms_norm(*(t.to(d) for t in inputs), EPS) for d in (torch.float64, dtype)
    )
    return Job(ours, norms, inputs, None, exact, same, (4 * rows + 2) * HIDDEN * dtype.itemsize)


def gate_job(op: str, rows: int, dtype: torch.dtype, device: str, draw: Callable[..., Tensor]) -> Job:
    x, ours, eager = draw(rows, 2 * INNER), getattr(pd, op), {"silu_and_mul": gate, "gelu_and_mul": gelu_gate}[op]
    exact, same = (getattr(pd.reference.transformer_ops, op)(x.to(d)) for d in (torch.float64, dtype))
    return Job(lambda: ours(x), eager, (x,), None, (exact,), (same,), 3 * rows * INNER * dtype.itemsize)


def rotation_job(rows: int, dtype: torch.dtype, device: str, draw: Callable[..., Tensor]) -> Job:
    qkv, bias = draw(1, rows, 3 * HEADS, HEAD_DIM), draw(2 * HEADS, HEAD_DIM)
    k, v = (torch.zeros(1, 2048, HEADS, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
    table = rope_tables(2048, HEAD_DIM, theta=50000.0, style="interleaved", device=device)
    lengths = torch.tensor([1000], device=device)
    tensors = (qkv, bias, table.cos, table.sin, k, v, lengths)

    def expected(wanted: torch.dtype) -> tuple[Tensor, ...]:
        tables = [t.to(torch.promote_types(wanted, torch.float32)) for t in (table.cos, table.sin)]
        fresh = [t.to(wanted, copy=True) for t in (qkv, bias)] + tables + [t.to(wanted, copy=True) for t in (k, v)]
        pd.reference.transformer_ops.apply_rope_append_(*fresh, lengths)
        return fresh[0], fresh[4], fresh[5]

    exact, same = expected(torch.float64), expected(dtype)
    # Every call rotates the rows again: norms do not change, and neither does the work.
    position = torch.arange(rows, device=device)
    moved = 7 * rows * HEADS * HEAD_DIM * dtype.itemsize  # q, k, v read; q, k written; k, v stored
    return Job(
        lambda: pd.apply_rope_append_(*tensors),
        EAGER_ROTATION,
        (*tensors, position),
        lambda: (qkv, k, v),
        exact,
        same,
        moved,
    )


def turn_rows_(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    wide = x.float()
    x.copy_(wide * cos[positions].unsqueeze(1) + wide.roll(HEAD_DIM // 2, -1) * sin[positions].unsqueeze(1))


def turn_job(rows: int, dtype: torch.dtype, device: str, draw: Callable[..., Tensor]) -> Job:
    """q and k as a view of the qkv product."""
    x = draw(1, rows, 3 * HEADS, HEAD_DIM)[:, :, : 2 * HEADS]
    table = rope_tables(2048, HEAD_DIM, theta=50000.0, style="half", device=device)
    positions = torch.arange(1000, 1000 + rows, device=device)

    def expected(wanted: torch.dtype) -> tuple[Tensor, ...]:
        turned = x.to(wanted, copy=True)
        tables = [t.to(torch.promote_types(wanted, torch.float32)) for t in (table.cos, table.sin)]
        pd.reference.transformer_ops.apply_rope_(turned, *tables, positions)
        return (turned,)

    exact, same = expected(torch.float64), expected(dtype)
    # Every call rotates the rows again: norms do not change, and neither does the work.
    inputs = (x, table.cos, table.sin, positions)
    moved = 4 * rows * HEADS * HEAD_DIM * dtype.itemsize
    return Job(lambda: pd.apply_rope_(*inputs), turn_rows_, inputs, lambda: (x,), exact, same, moved)


JOBS = {
    "add_rms_norm": norm_job,
    **{op: partial(gate_job, op) for op in ("silu_and_mul", "gelu_and_mul")},
    "apply_rope_append_": rotation_job,
    "apply_rope_": turn_job,
}
CANDIDATES = ("pdkernels", "torch eager", "torch.compile")


@by_device("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", JOBS)
@pytest.mark.parametrize("name", CANDIDATES)
def test_transformer_ops(benchmark, name: str, op: str, dtype: str, rows: int, device: str) -> None:
    benchmark.group = f"{op}, {dtype}, {rows} rows, {device}"
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype]).to(device)

    job = JOBS[op](rows, DTYPES[dtype], device, draw)
    torch._dynamo.reset()
    compiled = partial(compiled_of(job.eager), *job.inputs)
    call = {"pdkernels": job.ours, "torch eager": partial(job.eager, *job.inputs), "torch.compile": compiled}[name]
    with torch.inference_mode():
        returned = call()
        result = job.result() if job.result else returned if isinstance(returned, tuple) else (returned,)
        for tensors in zip(result, job.exact, job.same_dtype):
            assert_within_budget(*tensors, name=f"{name}: {op}")
        compare(
            benchmark,
            call,
            baseline=compiled,
            baseline_name="torch.compile",
            device=device,
            rounds=max(20, 600 // rows),
            bytes_moved=job.bytes // 2,
            op="transformer_ops",
            kernel=op,
            candidate=name,
            dtype=dtype,
            rows=rows,
        )


# --- forward and backward ------------------------------------------------------------------------------------------------


class Training(NamedTuple):
    """One op with its gradients on one set of tensors."""

    ours: Callable[..., object]
    eager: Callable[..., object]
    reference: Callable[..., object]
    inputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]  # of the results
    bytes: int


def norm_training(rows: int, dtype: torch.dtype, draw: Callable[..., Tensor]) -> Training:
    inputs = tuple(draw(*shape) for shape in ((rows, HIDDEN), (rows, HIDDEN), (HIDDEN,), (HIDDEN,)))
    grads = draw(rows, HIDDEN), draw(rows, HIDDEN)

    def ours(x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor) -> object:
        return pd.add_rms_norm(x, residual, weight, next_weight=next_weight, eps=EPS)

    reference = partial(pd.reference.transformer_ops.add_rms_norm, eps=EPS)
    # Forward: two rows read, two written; backward: four read, one written, which is the gradient of both summands.
    return Training(ours, norms, reference, inputs, grads, (9 * rows + 6) * HIDDEN * dtype.itemsize)


def gate_training(rows: int, dtype: torch.dtype, draw: Callable[..., Tensor]) -> Training:
    reference = pd.reference.transformer_ops.silu_and_mul
    moved = 8 * rows * INNER * dtype.itemsize  # forward: two read, one written; backward: three read, two written
    return Training(pd.silu_and_mul, gate, reference, (draw(rows, 2 * INNER),), (draw(rows, INNER),), moved)


def forward_and_backward(
    function: Callable[..., object], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Results, then the gradients of all inputs."""
    returned = function(*inputs)
    results = returned if isinstance(returned, tuple) else (returned,)
    return (*(t.detach() for t in results), *torch.autograd.grad(results, inputs, grads))


TRAINING = {"add_rms_norm": norm_training, "silu_and_mul": gate_training}


@by_device("rows", ROWS_OF_TRAINING)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", TRAINING)
@pytest.mark.parametrize("name", CANDIDATES)
def test_gradients(benchmark, name: str, op: str, dtype: str, rows: int, device: str) -> None:
    if DRY_RUN:
        pytest.skip("a pretended GPU has no backward pass")
    benchmark.group = f"{op}, forward and backward, {dtype}, {rows} rows, {device}"
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype]).to(device)

    job = TRAINING[op](rows, DTYPES[dtype], draw)
    torch._dynamo.reset()
    functions = {"pdkernels": job.ours, "torch eager": job.eager, "torch.compile": compiled_of(job.eager)}

    def run(function: Callable[..., object], dtype: torch.dtype = DTYPES[dtype]) -> tuple[Tensor, ...]:
        leaves = tuple(t.to(dtype).detach().requires_grad_() for t in job.inputs)
        return forward_and_backward(function, leaves, tuple(t.to(dtype) for t in job.grads))

    exact, same = run(job.reference, torch.float64), run(job.reference)
    for number, tensors in enumerate(zip(run(functions[name]), exact, same)):
        if name == "torch.compile" and dtype == "fp32":  # its sums over rows are less exact than eager ones
            assert (tensors[0] - tensors[1]).norm() <= 10 * torch.finfo(DTYPES[dtype]).eps * tensors[1].norm()
        else:
            assert_within_budget(*tensors, name=f"{name}: {op}, tensor {number}")
    leaves = tuple(t.detach().requires_grad_() for t in job.inputs)
    calls = {key: partial(forward_and_backward, function, leaves, job.grads) for key, function in functions.items()}
    compare(
        benchmark,
        calls[name],
        baseline=calls["torch.compile"],
        baseline_name="torch.compile",
        device=device,
        rounds=max(20, 600 // rows),
        bytes_moved=job.bytes // 2,
        op="transformer_ops gradients",
        kernel=op,
        candidate=name,
        dtype=dtype,
        rows=rows,
    )
