"""Unusual arguments that concern all ops: devices without values, sizes without memory, numbers of other libraries."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pdkernels as pd
from pdkernels.ops.library import OPS
from tests.ops.examples import PUBLIC, example, raw_arguments, run, tensors_in


@pytest.mark.parametrize("op", PUBLIC)
def test_meta_tensors_have_shapes(op: str) -> None:
    found, real = tensors_in(run(op, example(op, device="meta"))), tensors_in(run(op, example(op)))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in real]
    assert all(x.is_meta for x in found)


@pytest.mark.parametrize("op", PUBLIC)
def test_sparse_and_absurd_tensors(op: str) -> None:
    for name, x in example(op).items():
        if not isinstance(x, torch.Tensor):
            continue
        with pytest.raises(TypeError, match=rf"{op}: {name} must be a dense tensor, got torch.sparse_coo"):
            run(op, example(op) | {name: x.to_sparse()})
        huge = x.narrow(0, 0, 1).expand(2**40, *x.shape[1:])
        with pytest.raises((ValueError, TypeError, MemoryError), match=r"^pdkernels\.[^\n]*$"):
            run(op, example(op) | {name: huge})


def test_absurd_sizes() -> None:
    v, starts = torch.zeros(1, 4, 1, 8), torch.zeros(1, dtype=torch.int64)
    for count in (2**62, 2**20 + 1, 2**64):
        with pytest.raises(ValueError, match="select_stale_rows_: max_selected must be"):
            pd.select_stale_rows_(v, v.clone(), starts, max_selected=count)
    draft = torch.zeros(1, 1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="draft must have 1 to 65536 candidates"):
        pd.verify_draft(draft.expand(1, 65537, 4), draft.expand(1, 65537, 4))
    with pytest.raises(MemoryError, match="silu_and_mul: its results do not fit into memory"):
        pd.silu_and_mul(torch.zeros(1, 1, 2).expand(2**30, 2**30, 2))


def test_numbers_of_numpy() -> None:
    """Integers are accepted, numbers that would have to be rounded are not."""
    logits = torch.randn(2, 9)
    assert torch.equal(pd.token_statistics(logits, top_k=numpy.int64(3)).top_ids, logits.topk(3).indices)
    for number in (numpy.float32(1.5), numpy.float32(2), numpy.float64(2)):
        with pytest.raises(TypeError, match="top_k must be an int, got float"):
            pd.token_statistics(logits, top_k=number)
    pd.token_statistics(logits, temperature=numpy.float32(0.5))


@pytest.mark.parametrize("given", [5, 2.5, None])
def test_masks_of_numbers(given: object) -> None:
    with pytest.raises(TypeError, match=r"pdkernels\.masks\.planned: stages must be a sequence of stages"):
        pd.masks.planned(given)
    with pytest.raises(TypeError, match=r"pdkernels\.masks\.tree: parents must be a sequence of integers"):
        pd.masks.tree(given)


@pytest.mark.parametrize(
    "op", ["apply_rope_append_", "gather_rows", "add_cached_rows_", "recurrence_exit", "kv_append_"]
)
def test_batches_larger_than_a_grid(op: str) -> None:
    """On CUDA the batch is a dimension of the grid, of at most 65535 blocks."""
    arguments, _ = raw_arguments(op)
    batch = 2

    def many(x: object) -> object:
        if isinstance(x, (list, tuple)):
            return [many(one) for one in x]
        if not isinstance(x, torch.Tensor):
            return x
        sizes = [65536 if n == batch and d in (0, x.dim() - 4) else n for d, n in enumerate(x.shape)]
        return torch.empty(sizes, dtype=x.dtype, device="cuda")

    with FakeTensorMode():
        with pytest.raises(NotImplementedError, match="must have a batch of at most 65535 on CUDA, got 65536"):
            OPS[op].fake(*(many(x) for x in arguments))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_backward_without_query_rows(backend: str) -> None:
    """Gradients of sums are expanded, and without elements any stride is fine."""
    q, k, v = (torch.randn(2, n, 2, 16, requires_grad=True) for n in (0, 5, 5))
    plan = pd.masks.full(0, 5).plan(16, 16)
    out, lse = pd.block_sparse_attention(q, k, v, plan, return_lse=True, backend=backend)
    gradients = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v))
    assert gradients[0].shape == q.shape and not gradients[1].any() and not gradients[2].any()
    odd = torch.empty(2, 0, 2, 16).mT.contiguous().mT
    assert torch.autograd.grad(pd.block_sparse_attention(q, k, v, plan), (k,), odd)[0].shape == k.shape


def test_a_wave_of_any_headway_ends_at_the_capacity() -> None:
    """With a headway near 2**63 the sum with the wave's width must not overflow."""
    arguments, expected = example("recurrence_advance_"), example("recurrence_advance_")
    run("recurrence_advance_", arguments | {"headway": 2**63 - 1})
    run("recurrence_advance_", expected | {"headway": 1000})
    assert all(torch.equal(arguments[name], expected[name]) for name in OPS["recurrence_advance_"].mutated)
    assert (arguments["width"] >= 0).all()
