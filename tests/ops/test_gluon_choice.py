"""When a Gluon kernel serves a call, and what happens if it fails."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pdkernels._attention import AttentionArguments, GradientArguments, SpeculativeArguments
from pdkernels.masks import causal
from pdkernels.masks.tile_plan import dense_plan
from pdkernels.ops import _gluon as _choice
from pdkernels.reference.block_sparse_attention import block_sparse_attention as reference
from pdkernels.reference.speculative_attention import speculative_attention as speculative_reference
from tests.ops.speculative_cases import make_inputs


def given(head_dim: int = 64, dtype: torch.dtype = torch.float16) -> AttentionArguments:
    q = torch.randn(1, 200, 2, head_dim).to(dtype)
    return AttentionArguments(q, q, q, *causal(200).plan(128, 128).arguments, 0.125)


def right(arguments: AttentionArguments) -> tuple[Tensor, Tensor]:
    q, k, v = (x.float() for x in arguments[:3])
    out, lse = reference(q, k, v, causal(q.shape[1]).dense(), arguments.scale)
    return out.to(arguments.q.dtype), lse


def speculative(page_size: int = 0) -> SpeculativeArguments:
    mask = causal(40)
    *tensors, table = make_inputs(40, [100], heads=2, kv_heads=1, head_dim=64, dtype=torch.float16, page_size=page_size)
    return SpeculativeArguments(*tensors, *mask.plan(64, 64).arguments, 0.125, table)


def gradients() -> GradientArguments:
    arguments = given()
    return GradientArguments(arguments.q, None, *right(arguments), arguments)


def by_reference(arguments: Any) -> tuple[Tensor, ...]:
    """Of any of the ops."""
    if isinstance(arguments, AttentionArguments):
        return right(arguments)
    if isinstance(arguments, SpeculativeArguments):
        mask = dense_plan(arguments.plan, arguments.new, arguments.new)
        table = arguments.block_table
        return speculative_reference(*arguments[:6], mask, block_table=table, scale=arguments.scale)
    forward = arguments.forward
    q, k, v = (x.float().requires_grad_() for x in forward[:3])
    out, _ = reference(q, k, v, causal(q.shape[1]).dense(), forward.scale)
    return torch.autograd.grad(out, (q, k, v), arguments.grad_out.float())


def wrong(arguments: AttentionArguments) -> tuple[Tensor, Tensor]:
    out, lse = right(arguments)
    out[:, 150] = 0
    return out, lse


def not_a_number(arguments: AttentionArguments) -> tuple[Tensor, Tensor]:
    out, lse = right(arguments)
    return out, lse * torch.nan


def fails(arguments: AttentionArguments) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no such instruction")


@pytest.fixture(autouse=True)
def unchecked() -> Any:
    with mock.patch.dict(_choice.CHECKED, clear=True):
        yield


def test_a_kernel_that_computes_the_reference_passes_and_runs_once() -> None:
    runs = []

    def counted(arguments: AttentionArguments) -> tuple[Tensor, Tensor]:
        runs.append(arguments)
        return right(arguments)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(_choice.passes(given(), counted) for _ in range(3))
    assert len(runs) == 1
    assert _choice.passes(given(128), counted) and len(runs) == 2


@pytest.mark.parametrize("call", [speculative, lambda: speculative(16), gradients])
def test_the_other_kernels_are_compared_too(call: Any) -> None:
    """Each for itself, and for its page size."""
    assert _choice.passes(given(), right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _choice.passes(call(), by_reference)
    assert len(_choice.CHECKED) == 2
    _choice.CHECKED.clear()
    with pytest.warns(UserWarning, match="its results are off"):
        assert not _choice.passes(call(), lambda arguments: tuple(x * 1.1 for x in by_reference(arguments)))


@pytest.mark.parametrize(
    "kernel, why",
    [(wrong, "results are off"), (not_a_number, "results are off by nan"), (fails, "no such instruction")],
)
def test_a_kernel_that_fails_is_named_once(kernel: Any, why: str) -> None:
    with pytest.warns(
        UserWarning, match=f"block-sparse attention for heads of 64 in torch.float16 is not used on cpu, .*{why}"
    ):
        assert not _choice.passes(given(), kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _choice.passes(given(), kernel)


def test_no_check_while_a_graph_is_captured() -> None:
    arguments = given()
    q = mock.MagicMock(wraps=arguments.q, is_cuda=True, shape=arguments.q.shape, dtype=arguments.q.dtype)
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        assert not _choice.passes(arguments._replace(q=q), right)
    assert not _choice.CHECKED


def on_gpu(capability: tuple[int, int]) -> Any:
    """Arguments that say that they are on a GPU."""
    arguments = given()
    q = SimpleNamespace(device=torch.device("cuda", 0), shape=arguments.q.shape, dtype=arguments.q.dtype)
    return arguments._replace(q=q), mock.patch("torch.cuda.get_device_capability", return_value=capability)


@pytest.mark.parametrize(
    "capability, setting, served", [((9, 0), "auto", True), ((9, 0), "0", False), ((10, 0), "auto", False)]
)
def test_hopper_alone_unless_the_environment_says_no(
    capability: tuple[int, int], setting: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    from pdkernels.gluon import launch as _launch
    from pdkernels.gluon import launch_speculative as _launch_speculative

    arguments, there = on_gpu(capability)
    monkeypatch.setenv(_choice.VARIABLE, setting)
    monkeypatch.setattr(_launch, "serves", lambda given: True)
    monkeypatch.setattr(_choice, "passes", lambda given, forward: True)
    monkeypatch.setattr(_launch, "serves_gradients", lambda given: True)
    monkeypatch.setattr(_launch_speculative, "serves", lambda given: True)
    with there:
        assert (_choice.forward_for(arguments) is _launch.forward) == served
        assert (_choice.speculative_for(arguments) is _launch_speculative.forward) == served
        of_gradients = GradientArguments(arguments.q, None, arguments.q, arguments.q, arguments)
        assert (_choice.backward_for(of_gradients) is _launch.backward) == served


def test_the_gradients_in_one_pass_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its kernel serves, and passes its own check; the others are as ever."""
    pytest.importorskip("triton", reason="needs triton")
    from pdkernels.gluon import launch as _launch
    from pdkernels.gluon import launch_one_pass as _one_pass

    arguments, there = on_gpu((9, 0))
    of_gradients = GradientArguments(arguments.q, None, arguments.q, arguments.q, arguments)
    failing: set[Any] = set()
    monkeypatch.setattr(_launch, "serves", lambda given: True)
    monkeypatch.setattr(_launch, "serves_gradients", lambda given: True)
    monkeypatch.setattr(_one_pass, "serves", lambda given: True)
    monkeypatch.setattr(_choice, "passes", lambda given, kernel: kernel not in failing)
    with there:
        assert _choice.backward_for(of_gradients) is _launch.backward
        monkeypatch.setenv(_choice.VARIABLE, "one-pass")
        assert _choice.forward_for(arguments) is _launch.forward
        assert _choice.backward_for(of_gradients) is _one_pass.backward
        failing.add(_one_pass.backward)
        assert _choice.backward_for(of_gradients) is _launch.backward
        monkeypatch.setattr(_one_pass, "serves", lambda given: False)
        failing.clear()
        assert _choice.backward_for(of_gradients) is _launch.backward


def test_the_environment_says_auto_0_or_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_choice.VARIABLE, "yes")
    with pytest.raises(ValueError, match="PDKERNELS_GLUON must be auto, 0 or one-pass, got 'yes'"):
        _choice.enabled()


def test_what_the_kernel_does_not_serve() -> None:
    pytest.importorskip("triton", reason="needs triton")
    from pdkernels.gluon.launch import serves
    from pdkernels.gluon.launch_one_pass import serves as in_one_pass

    of_heads = [GradientArguments(x.q, None, x.q, x.q, x) for x in (given(128), given(64), given(96))]
    assert [in_one_pass(gradients) for gradients in of_heads] == [True, False, False]
    assert serves(given()) and serves(given(128, torch.bfloat16))
    assert not serves(given(96)) and not serves(given(64, torch.float32))
    plain = given()
    for block_q, block_k in ((32, 128), (64, 64), (128, 96)):
        assert not serves(plain._replace(block_q=block_q, block_k=block_k))
    # Two heads of 64 rows share a program, if there are two.
    assert serves(plain._replace(block_q=64, k=plain.k[:, :, :1], v=plain.v[:, :, :1]))
    assert not serves(plain._replace(block_q=64))
    shifted = torch.zeros(200 * 2 * 64 + 4, dtype=torch.float16)[4:].view(1, 200, 2, 64)
    assert not serves(plain._replace(v=shifted)) and not serves(plain._replace(q=plain.q[:, :0]))
    assert not serves(plain._replace(k=torch.zeros(1, 200, 2, 68, dtype=torch.float16)[..., :64]))


def test_rows_of_8_bits_are_left_to_triton() -> None:
    """Whatever their width: that of the codes and a scale may be a head dimension that the kernel has."""
    pytest.importorskip("triton", reason="needs triton")
    from pdkernels.gluon.launch_speculative import serves

    numbers = speculative(128)._replace(q=torch.randn(1, 100, 4, 64).half(), k_new=torch.randn(1, 100, 1, 64).half())
    numbers = numbers._replace(v_new=numbers.k_new)
    assert serves(numbers)
    rows = {
        name: torch.zeros(*getattr(numbers, name).shape[:-1], 64 + 16, dtype=torch.int8)[..., : 64 + 4]
        for name in ("k_new", "v_new", "k_cache", "v_cache")
    }
    assert all(stride % 16 == 0 for x in rows.values() for stride in x.stride()[:-1])
    assert not serves(numbers._replace(**rows))
