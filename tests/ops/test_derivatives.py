"""Derivatives that kernels do not have: none is dropped in silence, and the reference has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import pdkernels as pd
from pdkernels.ops._library import SCHEMAS

Call = Callable[..., Any]
PLAN = pd.masks.causal(4).plan(16, 16)
ZERO, ONE, TWO = (torch.full((1,), n) for n in range(3))
# Not one of them has an input whose derivative means something.
OF_INTEGERS = {"kv_trim_", "verify_draft", "log_step_", "recurrence_advance_"}


def kv(heads: int = 1) -> Tensor:
    return torch.randn(1, 8, heads, 16)


def attention(x: Tensor, op: Call, **options: Any) -> Any:
    return op(x, kv()[:, :4], kv()[:, :4], kv(), kv(), TWO, PLAN, **options)


def exit_(x: Tensor, **options: Any) -> Any:
    rest = (torch.randn(1, 4, 16), torch.ones(16), None, torch.ones(1, 4, dtype=torch.int64), 4 * ONE, ZERO)
    return pd.recurrence_exit(x, *rest, threshold=0.1, **options)


def inject(x: Tensor, **options: Any) -> Any:
    vectors = (torch.zeros(1, 4, dtype=torch.int64), ZERO, 4 * ONE, ZERO, ONE)
    return pd.recurrence_inject(None, x, None, *vectors, seed=0, **options)


def apply_rope_append(x: Tensor, **options: Any) -> Any:
    table = torch.ones(8, 16)
    return pd.apply_rope_append_(
        x[:, :, None].expand(1, 4, 3, 16).clone(), None, table, table, kv(), kv(), ONE, **options
    )


# The op with its first float input: ``(1, 4, 16)``.
CALLS: dict[str, Call] = {
    "kv_append_": lambda x, **o: pd.kv_append_([kv()], [kv()], [x[:, :, None]], [kv()[:, :4]], ONE, **o),
    "kv_commit_": lambda x, **o: pd.kv_commit_(
        x[:, :, None].clone(), kv()[:, :4], ZERO.clone(), TWO, torch.tensor([[0, 2]]), **o
    ),
    "block_sparse_attention": lambda x, **o: pd.block_sparse_attention(
        x[:, :, None], kv()[:, :4], kv()[:, :4], PLAN, **o
    ),
    "speculative_attention": lambda x, **o: attention(x[:, :, None], pd.speculative_attention, **o),
    "speculative_attention_append_": lambda x, **o: attention(x[:, :, None], pd.speculative_attention_append_, **o),
    "token_statistics": pd.token_statistics,
    "linear_token_statistics": lambda x, **o: pd.linear_token_statistics(x, torch.randn(9, 16), **o),
    "logit_divergence": lambda x, **o: pd.logit_divergence(torch.randn(1, 4, 16), x, **o),
    "add_rms_norm": lambda x, **o: pd.add_rms_norm(torch.randn(1, 4, 16), x, torch.ones(16), **o),
    "silu_and_mul": pd.silu_and_mul,
    "apply_rope_append_": apply_rope_append,
    "apply_rope_": lambda x, **o: pd.apply_rope_(x[:, :, None].clone(), *[torch.ones(8, 16)] * 2, torch.arange(4), **o),
    "recurrence_inject": inject,
    "recurrence_exit": exit_,
    "unmask_": lambda x, **o: pd.unmask_(
        torch.zeros(4, 16, dtype=torch.int64), torch.ones(4, 16, dtype=torch.int64), x[0], mask_token=0, **o
    ),
    "select_stale_rows_": lambda x, **o: pd.select_stale_rows_(x[:, :, None], kv(), ZERO, count=2, **o),
    "gather_rows": lambda x, **o: pd.gather_rows(x, torch.tensor([[0, 2]]), **o),
    "add_cached_rows_": lambda x, **o: pd.add_cached_rows_(x, torch.randn(1, 4, 16), **o),
}
# Those that a caller may train beside: their results are no part of a graph, as the documentation says.
CUT = {"token_statistics", "linear_token_statistics", "logit_divergence", "unmask_"}
REFUSE = sorted(set(CALLS) - CUT - {"block_sparse_attention"})


@pytest.fixture
def level() -> Iterator[None]:
    with forward_ad.dual_level():
        yield


def test_every_op_is_looked_at() -> None:
    assert set(CALLS) | OF_INTEGERS == {name for name in SCHEMAS if not name.endswith("_backward")}


@pytest.mark.parametrize("op", CALLS)
def test_a_tangent_is_refused(op: str, level: None) -> None:
    x = torch.randn(1, 4, 16)
    dual = forward_ad.make_dual(x, torch.ones_like(x))
    text = rf"pdkernels\.{op}: its inputs must have no tangent \(forward mode\), got a tensor with one\. Pass backend='reference'"
    with pytest.raises(NotImplementedError, match=text):
        CALLS[op](dual)
    CALLS[op](forward_ad.unpack_dual(dual).primal)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=text):  # which turns forward mode off for nobody
        CALLS[op](dual)


@pytest.mark.parametrize(
    "op",
    sorted(
        set(CALLS) - {"unmask_", "select_stale_rows_", "apply_rope_append_", "apply_rope_", "kv_append_", "kv_commit_"}
    ),
)
def test_the_reference_has_it(op: str, level: None) -> None:
    """All but ops that return no floats."""
    x = torch.randn(1, 4, 16)
    found = CALLS[op](forward_ad.make_dual(x, torch.ones_like(x)), backend="reference")
    floats = [
        t for t in (found if isinstance(found, tuple) else (found,)) if isinstance(t, Tensor) and t.is_floating_point()
    ]
    assert any(forward_ad.unpack_dual(t).tangent is not None for t in floats)


@pytest.mark.parametrize("op", CALLS)
def test_the_transform_is_refused_too(op: str) -> None:
    x = torch.randn(1, 4, 16)
    with pytest.raises(NotImplementedError, match="must have no tangent"):
        torch.func.jvp(CALLS[op], (x,), (x,))


@pytest.mark.parametrize("op", ["block_sparse_attention", "speculative_attention", "speculative_attention_append_"])
def test_a_raw_call_of_attention_refuses_it_too(op: str, level: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those have a kernel for autograd, which looks for itself."""
    monkeypatch.setattr("pdkernels.ops._library.refuse_tangents", lambda *_: None)
    x = torch.randn(1, 4, 16)
    with pytest.raises(NotImplementedError, match="must have no tangent"):
        CALLS[op](forward_ad.make_dual(x, torch.ones_like(x)))


def test_a_gradient_has_no_derivative_in_forward_mode(level: None) -> None:
    """The gradient is linear in what comes from behind: a tangent of that would be lost in it."""
    x = torch.randn(1, 4, 16, requires_grad=True)
    out = CALLS["block_sparse_attention"](x)
    behind = forward_ad.make_dual(torch.randn_like(out), torch.ones_like(out))
    with pytest.raises(NotImplementedError, match="block_sparse_attention: its inputs must have no tangent"):
        torch.autograd.grad(out, x, behind)


@pytest.mark.parametrize("op", REFUSE)
def test_a_gradient_is_refused(op: str) -> None:
    x = torch.randn(1, 4, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match=rf"pdkernels\.{op}: .* must not require"):
        CALLS[op](x)
    with torch.no_grad():
        CALLS[op](x)


@pytest.mark.parametrize("op", sorted(CUT))
def test_where_no_gradient_flows_results_have_no_history(op: str) -> None:
    found = CALLS[op](torch.randn(1, 4, 16, requires_grad=True))
    assert not any(t.requires_grad for t in found)
