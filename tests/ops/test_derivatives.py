"""Derivatives that kernels do not have: none is dropped silently, and the reference has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pdkernels.ops.library import OPS
from tests.ops.examples import PUBLIC, example, floats_of, is_float, run, tensors_in

# Each op with each of its float inputs: some ops have none.
CASES = [(op, name) for op in PUBLIC for name in floats_of(op)]
# The ops with their own derivative; and those whose results are detached from the graph, as documented.
DIFFERENTIABLE = [op for op in PUBLIC if f"{op}_backward" in OPS]
CUT = [op for op in PUBLIC if OPS[op].gradients == "cut" or op == "unmask_"]
# Ops whose reference has none either.
NEVER = [op for op in PUBLIC if OPS[op].gradients == "none"]
FIRST = {op: floats_of(op)[0] for op in PUBLIC if floats_of(op)}


def call(op: str, name: str, **options: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """An input of the op, and the op as a function of it."""
    arguments = example(op)
    return arguments[name], lambda x: run(op, example(op) | {name: x}, **options)


def dual(x: Tensor) -> Tensor:
    return forward_ad.make_dual(x, torch.ones_like(x))


@pytest.fixture
def level() -> Iterator[None]:
    with forward_ad.dual_level():
        yield


def test_ops_without_floats() -> None:
    """Not one of them has an input whose derivative means something."""
    assert set(PUBLIC) - set(FIRST) == {
        "kv_trim_", "verify_draft", "log_step_", "recurrence_advance_", "quantized_embedding", "state_commit_", "state_trim_",
        "lookup_draft_",
    }  # fmt: skip
    assert sorted(NEVER) == ["draft_lengths_", "kv_quantize", "quantized_grouped_linear", "quantized_linear"]
    assert set(CUT) == {
        "token_statistics", "linear_token_statistics", "filter_logits", "logit_divergence", "unmask_",
    }  # fmt: skip


@pytest.mark.parametrize("op, name", CASES)
def test_a_tangent_is_refused(op: str, name: str, level: None) -> None:
    x, function = call(op, name)
    tangent = dual(x)
    text = rf"pdkernels\.{op}: an input has a tangent, and the kernels have no derivative in forward mode\. Pass backend='reference'"
    if op in NEVER:
        text = rf"pdkernels\.{op}: an input has a tangent, and the op has no derivative\. Pass the primal alone\."
    with pytest.raises(NotImplementedError, match=text):
        function(tangent)
    function(forward_ad.unpack_dual(tangent).primal)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=text):  # which does not disable forward mode
        function(tangent)


@pytest.mark.parametrize("op, name", [(op, name) for op, name in CASES if op in NEVER])
def test_a_reference_without_one_refuses_it(op: str, name: str, level: None) -> None:
    x, function = call(op, name, backend="reference")
    with pytest.raises(NotImplementedError, match="the op has no derivative"):
        function(dual(x))
    with pytest.raises(
        NotImplementedError, match=rf"{op}: {name} must not require a gradient.*under torch\.no_grad\(\)\.$"
    ):
        function(x.requires_grad_())


@pytest.mark.parametrize("op", [op for op in FIRST if op not in NEVER])
def test_the_reference_has_it(op: str, level: None) -> None:
    """All but ops that return no floats."""
    if not any(is_float(x) for x in tensors_in(run(op, example(op)))):
        pytest.skip("returns no floats")
    x, function = call(op, FIRST[op], backend="reference")
    floats = [t for t in tensors_in(function(dual(x))) if is_float(t)]
    assert any(forward_ad.unpack_dual(t).tangent is not None for t in floats)


@pytest.mark.parametrize("op, name", CASES)
def test_the_transform_is_refused_too(op: str, name: str) -> None:
    x, function = call(op, name)
    with pytest.raises(NotImplementedError, match="an input has a tangent"):
        torch.func.jvp(function, (x,), (x,))


@pytest.mark.parametrize("op", ["block_sparse_attention", "speculative_attention", "speculative_attention_append_"])
def test_a_raw_call_of_attention_refuses_it_too(op: str, level: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """These ops have an autograd kernel with its own check."""
    monkeypatch.setattr("pdkernels.ops.library.refuse_tangents", lambda *_, **__: None)
    x, function = call(op, "q")
    with pytest.raises(NotImplementedError, match="an input has a tangent"):
        function(dual(x))


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_gradient_has_no_derivative_in_forward_mode(op: str, level: None) -> None:
    """The gradient is linear in the incoming one, whose tangent would be lost in it."""
    x, function = call(op, FIRST[op])
    out = tensors_in(function(x.requires_grad_()))[0]
    with pytest.raises(NotImplementedError, match=f"{op}: an input has a tangent"):
        torch.autograd.grad(out, x, dual(torch.randn_like(out)))


@pytest.mark.parametrize("op, name", [(op, name) for op, name in CASES if op not in (*CUT, *DIFFERENTIABLE)])
def test_a_gradient_is_refused(op: str, name: str) -> None:
    x, function = call(op, name)
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"pdkernels\.{op}: .* must not require"):
        function(x)
    with torch.no_grad():
        function(x)


@pytest.mark.parametrize("op", CUT)
def test_where_no_gradient_flows_results_have_no_history(op: str) -> None:
    x, function = call(op, FIRST[op])
    found = function(x.requires_grad_())
    assert not any(t.requires_grad for t in found)
