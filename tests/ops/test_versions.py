"""Autograd notices what an op has written as it notices PyTorch's own writes: by the version of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels import _native
from pdkernels.generation import next_token
from pdkernels.models.architectures import greedy_steps, whole_step
from pdkernels.ops.library import NAMESPACE, OPS
from tests.models.test_row_invariance import CONFIG, a_model
from tests.ops.examples import example, floats_of, raw_arguments, run

WRITERS = [name for name, spec in OPS.items() if spec.mutated]
Call = tuple[Callable[[], object], list[Tensor], list[Tensor]]


def public(op: str, **options: Any) -> Call:
    arguments = example(op)
    written = [arguments[name] for name in OPS[op].mutated]
    others = [x for name, x in arguments.items() if isinstance(x, Tensor) and name not in OPS[op].mutated]
    return lambda: run(op, arguments, **options), written, others


def raw(op: str) -> Call:
    """As an exported program or a graph of torch.fx calls it."""
    given, options = raw_arguments(op)
    tensors = [x if isinstance(x, list) else [x] for x in given]
    written = [x for i in OPS[op].writes for x in tensors[i]]
    others = [x for i in OPS[op].tensors if i < len(given) and i not in OPS[op].writes for x in tensors[i]]
    return lambda: OPS[op].overload(*given, **options), written, [x for x in others if x is not None]


def check(
    call: Callable[[], object], written: list[Tensor], others: list[Tensor], times: int = 1, lazy: bool = False
) -> None:
    """A call gives what it writes, and nothing else, a new version. `lazy`: it may find that there is nothing to write."""
    losses = [(torch.ones_like(x, dtype=torch.float32, requires_grad=True) * x).sum() for x in written]
    for _ in range(times):
        before = [(x._version, x.clone()) for x in (*written, *others)]
        with torch.no_grad():
            call()
        for x, (version, old) in zip((*written, *others), before):
            is_written = any(x is one for one in written)
            assert (x._version > version) == is_written or (lazy and torch.equal(x, old))
    for loss, x in zip(losses, written):
        if x._version > 0:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("op", WRITERS)
def test_what_is_written_has_a_new_version(op: str) -> None:
    check(*public(op))


@pytest.mark.parametrize("op", WRITERS)
def test_calls_of_the_raw_op_count(op: str) -> None:
    check(*raw(op))


@pytest.mark.parametrize("op", WRITERS)
def test_references_count(op: str) -> None:
    check(*public(op, backend="reference"), lazy=True)


@pytest.mark.covering(of=["backend"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("op", WRITERS)
def test_compiled_graphs_count(op: str, backend: str) -> None:
    """Twice: the first run differs from those after it."""
    call, written, others = public(op)
    torch._dynamo.reset()
    check(torch.compile(call, backend=backend), written, others, times=2)


def test_layers_and_views_count_for_the_tensor_they_belong_to() -> None:
    """A view and its base have one version, as for PyTorch's own writes."""
    pool = torch.zeros(3, 1, 10, 2, 16)
    apart = [torch.zeros(1, 8, 2, 16) for _ in range(3)]
    new, lengths = torch.ones(3, 1, 2, 2, 16), torch.zeros(1, dtype=torch.int64)
    saved = torch.ones_like(pool, requires_grad=True)
    loss = (saved * pool).sum()
    pd.kv_append_([layer[:, 2:] for layer in pool], apart, new, new, lengths)
    assert [layer._version for layer in apart] == [1, 1, 1] and pool._version > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_a_write_in_between_the_gradient_is_right() -> None:
    k, v = torch.ones(1, 1, 4, 1, 8), torch.ones(1, 1, 4, 1, 8)
    new, lengths = torch.full((1, 1, 2, 1, 8), 7.0), torch.zeros(1, dtype=torch.int64)
    weight = torch.ones_like(k, requires_grad=True)
    pd.kv_append_(k, v, new, new, lengths)
    (weight * k).sum().backward()
    assert torch.equal(weight.grad, k)


@pytest.mark.parametrize("op", WRITERS)
def test_inference_mode(op: str) -> None:
    """It counts for tensors from outside, as for PyTorch's writes. Tensors from inside have no version and are written anywhere:
    autograd refuses to save them."""
    call, written, _ = public(op)
    before = [x._version for x in written]
    with torch.inference_mode():
        call()
        inside, others, _ = public(op)
        inside()
    assert all(x._version > version for x, version in zip(written, before))
    assert all(x.is_inference() for x in others)
    with torch.no_grad():
        inside()


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in WRITERS for name in floats_of(op) if name in OPS[op].mutated]
)
def test_a_leaf_that_requires_a_gradient_is_not_written(op: str, name: str) -> None:
    """Nor is anything else. PyTorch refuses to write one too, while gradients are recorded."""
    arguments = example(op)
    leaf = arguments[name] = arguments[name].requires_grad_()
    before = {other: (x.clone(), x._version) for other, x in arguments.items() if isinstance(x, Tensor)}
    for options in ({}, {"backend": "reference"}):
        with pytest.raises(NotImplementedError, match="requires? a gradient|not require gradients"):
            run(op, arguments, **options)
        assert all(torch.equal(arguments[other], x) for other, (x, _) in before.items())
        assert all(arguments[other]._version == version for other, (_, version) in before.items())
    with torch.no_grad():
        run(op, arguments)
    assert leaf._version > before[name][1]


def test_a_refused_call_has_written_nothing() -> None:
    k, v, new = (torch.zeros(1, 1, rows, 1, 8) for rows in (4, 4, 2))
    for lengths in (torch.tensor([3]), torch.tensor([0.5])):  # past the capacity; not an index
        with pytest.raises((ValueError, TypeError)):
            pd.kv_append_(k, v, new, new, lengths)
    assert (k._version, v._version) == (0, 0)


@pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")
def test_all_layers_in_one_op_count_too() -> None:
    model = a_model(CONFIG, torch.float32)
    cache = model.new_cache(1, 8)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    assert cache.k._version > 0 and cache.v._version > 0


def test_every_op_that_writes_counts() -> None:
    """Those that are not public too."""
    names = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::")
    }
    assert {whole_step.OP, greedy_steps.OP, next_token.OP, *OPS} <= names
    for name in names:
        is_writer = getattr(getattr(torch.ops, NAMESPACE), name).default._schema.is_mutable
        counts = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "ADInplaceOrView")
        assert counts == is_writer, name
