"""Gradients of add_rms_norm and silu_and_mul against those of the reference in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import pdkernels as pd
from pdkernels.reference import transformer_ops as reference
from tests.harness.error_budget import assert_within_budget
from tests.ops.implementations import implementation
from tests.ops.test_transformer_ops import DTYPES, draw, layouts, norm_inputs

# Which of grad, grad_next, residual, weight and next_weight are given.
FORMS = {
    "sandwich": "11111",
    "sum and its norm": "11101",
    "norm": "10010",
    "norm of a sum": "10110",
    "norm, then norm": "11011",
    "the second result alone": "01111",
    "the sum alone is unused": "01101",
}
Case = dict[str, Tensor | None]


def raw(impl: Any, op: str) -> Any:
    """The op itself: the public function of a simulated device has no autograd."""
    return getattr(impl.ops if impl.name == "cudasim" else torch.ops.pdkernels, op)


def norm_case(rows: int, width: int, dtype: torch.dtype, form: str) -> Case:
    x, residual, weight, next_weight = norm_inputs(rows, width, dtype)
    grad, grad_next = (draw(seed, rows, width, dtype=dtype) for seed in (8, 9))
    made = {"grad": grad, "grad_next": grad_next, "residual": residual, "weight": weight, "next_weight": next_weight}
    return {"x": x, **{name: t if bit == "1" else None for bit, (name, t) in zip(FORMS[form], made.items())}}


def by_autograd(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of x, weight and next_weight, of PyTorch's own making."""
    typed = {name: None if t is None else t.to(dtype) for name, t in case.items()}
    names = [name for name in ("x", "weight", "next_weight") if typed[name] is not None]
    leaves = {name: typed[name].requires_grad_() for name in names}
    given = typed | leaves
    y, following = reference.add_rms_norm(*(given[n] for n in ("x", "residual", "weight", "next_weight")), 1e-6)
    pairs = [(out, grad) for out, grad in ((y, typed["grad"]), (following, typed["grad_next"])) if grad is not None]
    return list(torch.autograd.grad([out for out, _ in pairs], [*leaves.values()], [grad for _, grad in pairs]))


def backward(impl: Any, case: Case) -> list[Tensor]:
    order = ("grad", "grad_next", "x", "residual", "weight", "next_weight")
    on_device = [None if case[name] is None else case[name].to(impl.device) for name in order]
    dx, dweight, dnext = raw(impl, "add_rms_norm_backward")(*on_device, 1e-6)
    found = {"x": dx, "weight": dweight, "next_weight": dnext}
    assert all(t.numel() == 0 for name, t in found.items() if case[name] is None)
    return [t.cpu() for name, t in found.items() if case[name] is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_norms_within_the_error_budget(impl: Any, form: str, dtype: torch.dtype) -> None:
    for rows, width in ((64, 7), (70, 33), (9, 520)):
        case = norm_case(rows, width, dtype, form)
        for number, tensors in enumerate(
            zip(backward(impl, case), by_autograd(case, torch.float64), by_autograd(case, dtype))
        ):
            assert_within_budget(*tensors, name=f"gradient {number} of {form}, {rows} x {width}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(300, 1), (16, 33), (3, 4099)])
def test_gate_within_the_error_budget(impl: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    x, grad = draw(4, rows, 2 * width, dtype=dtype, scale=4), draw(5, rows, width, dtype=dtype)
    found = raw(impl, "silu_and_mul_backward")(grad.to(impl.device), x.to(impl.device)).cpu()
    exact, same = (
        torch.autograd.grad(reference.silu_and_mul(leaf), leaf, grad.to(leaf.dtype))[0]
        for leaf in (x.double().requires_grad_(), x.clone().requires_grad_())
    )
    assert_within_budget(found, exact, same, name="gate")


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_is_what_autograd_makes_of_the_forward_pass(form: str) -> None:
    case = {name: None if t is None else t.double() for name, t in norm_case(7, 12, torch.float64, form).items()}
    order = ("grad", "grad_next", "x", "residual", "weight", "next_weight")
    found = reference.add_rms_norm_backward(*(case[name] for name in order), 1e-6)
    kept = [t for name, t in zip(("x", "weight", "next_weight"), found) if case[name] is not None]
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(kept, by_autograd(case, torch.float64)))
    x = draw(1, 5, 8, dtype=torch.float64).requires_grad_()
    grad = draw(2, 5, 4, dtype=torch.float64)
    wanted = torch.autograd.grad(reference.silu_and_mul(x), x, grad)[0]
    assert torch.allclose(reference.silu_and_mul_backward(grad, x.detach()), wanted, rtol=1e-12)


def test_any_layout(impl: Any) -> None:
    x, residual, grad = (draw(i, 2, 3, 32) for i in (0, 1, 2))
    weight = draw(3, 32)
    case = {"grad": grad, "grad_next": None, "x": x, "residual": residual, "weight": weight, "next_weight": None}
    wanted = backward(impl, case)
    gate = raw(impl, "silu_and_mul_backward")(grad[..., :16].contiguous().to(impl.device), x.to(impl.device))
    for name, view in layouts(grad).items():
        again = backward(impl, case | {"grad": view, "x": layouts(x)[name]})
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(again, wanted)), name
        half = view[..., :16]
        assert torch.equal(raw(impl, "silu_and_mul_backward")(half.to(impl.device), x.to(impl.device)), gate), name


@pytest.mark.parametrize("rows", [0, 3])
def test_no_rows_and_no_width(impl: Any, rows: int) -> None:
    width = 8 if rows == 0 else 0
    case = norm_case(rows, width, torch.float32, "sandwich")
    dx, dweight, dnext = backward(impl, case)
    assert dx.shape == (rows, width) and not dweight.any() and not dnext.any() and dnext.shape == (width,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_and_other_rows_change_no_bit(dtype: torch.dtype) -> None:
    case, before = norm_case(2500, 40, dtype, "sandwich"), torch.get_num_threads()
    cpu = type("Cpu", (), {"name": "cpu", "device": "cpu"})
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(backward(cpu, case))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found))
    own = {name: t[7:8] if t.dim() == 2 else t for name, t in case.items()}
    assert torch.equal(backward(cpu, own)[0], found[0][0][7:8])


@pytest.mark.parametrize("width", [700, 2088])  # single elements, and more packs of 8 than threads
def test_result_does_not_depend_on_the_order_of_threads(width: int) -> None:
    rows = 6  # two parts
    impl, case = implementation("cudasim"), norm_case(rows, width, torch.bfloat16, "sandwich")
    x, grad = draw(4, rows, 2 * width, dtype=torch.bfloat16), draw(5, rows, width, dtype=torch.bfloat16)
    found = []
    for order in impl.schedules():
        with order:
            found.append([*backward(impl, case), raw(impl, "silu_and_mul_backward")(grad, x)])
    assert len(found) == 4
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0]))


# --- autograd ------------------------------------------------------------------------------------------------------------


def leaves_of(form: str) -> tuple[Case, dict[str, Tensor]]:
    case = norm_case(6, 24, torch.float32, form)
    return case, {
        n: case[n].clone().requires_grad_() for n in ("x", "residual", "weight", "next_weight") if case[n] is not None
    }


def run(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    given = {"residual": None, "weight": None, **leaves}
    return pd.add_rms_norm(given["x"], given["residual"], given["weight"], next_weight=given.get("next_weight"))


@pytest.mark.parametrize("form", FORMS)
def test_autograd_calls_it(form: str) -> None:
    case, leaves = leaves_of(form)
    pairs = [(out, case[name]) for out, name in zip(run(leaves), ("grad", "grad_next")) if case[name] is not None]
    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    order = ("grad", "grad_next", "x", "residual", "weight", "next_weight")
    dx, dweight, dnext = torch.ops.pdkernels.add_rms_norm_backward(*(case[name] for name in order), 1e-6)
    wanted = {"x": dx, "residual": dx, "weight": dweight, "next_weight": dnext}
    assert all(torch.equal(leaf.grad, wanted[name]) for name, leaf in leaves.items())


def test_only_what_is_asked_for() -> None:
    case, leaves = leaves_of("sandwich")
    for frozen in ("weight", "next_weight", "residual"):
        leaves[frozen].requires_grad_(False)
    y, _ = run(leaves)
    y.backward(case["grad"])
    assert leaves["x"].grad is not None and all(leaves[n].grad is None for n in ("weight", "next_weight", "residual"))


def test_a_sum_that_alone_is_used_passes_its_gradient_on() -> None:
    case, leaves = leaves_of("sum and its norm")
    run(leaves)[0].backward(case["grad"])
    assert torch.equal(leaves["x"].grad, case["grad"]) and torch.equal(leaves["residual"].grad, case["grad"])
    assert leaves["next_weight"].grad is None


def test_derivatives_that_it_does_not_have() -> None:
    x = draw(0, 2, 8).requires_grad_()
    weight = torch.ones(8)
    for op, function in (
        ("add_rms_norm", lambda x: pd.add_rms_norm(x, None, weight)[0].sum()),
        ("silu_and_mul", lambda x: pd.silu_and_mul(x).sum()),
    ):
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"pdkernels.{op}: its gradient must not be differentiated again"):
            first.sum().backward()
        with pytest.raises(NotImplementedError, match=f"pdkernels.{op}: torch.func cannot differentiate its inputs"):
            torch.func.grad(function)(x.detach())


def test_opcheck() -> None:
    for form in ("sandwich", "norm"):
        _, leaves = leaves_of(form)
        given = [leaves.get(name) for name in ("x", "residual", "weight", "next_weight")]
        torch.library.opcheck(torch.ops.pdkernels.add_rms_norm.default, (*given, 1e-6))
    torch.library.opcheck(torch.ops.pdkernels.silu_and_mul.default, (draw(0, 3, 8).requires_grad_(),))


def test_a_compiled_layer_trains_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def loss(x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor) -> Tensor:
        y, following = pd.add_rms_norm(x, residual, weight, next_weight=next_weight)
        return (pd.silu_and_mul(torch.cat([following, y], -1)) * y).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for rows, width in ((2, 8), (5, 12), (7, 6)):
        inputs = [t.requires_grad_() for t in norm_inputs(rows, width, torch.float32)]
        wanted, found = (torch.autograd.grad(function(*inputs), inputs) for function in (loss, compiled))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


def test_bad_gradients() -> None:
    x, weight = torch.zeros(2, 4), torch.zeros(4)
    op = torch.ops.pdkernels.add_rms_norm_backward
    for call, error in (
        ((x[:1], None, x, None, weight, None, 1e-6), "grad must have shape"),
        ((None, None, x, None, weight, None, 1e-6), "grad and grad_next are missing"),
        ((x, x, x, None, weight, None, 1e-6), "next_weight is missing"),
    ):
        with pytest.raises(RuntimeError):
            op(*call)
        with pytest.raises(ValueError, match=error):
            op(*(t.to("meta") if isinstance(t, Tensor) else t for t in call))
    with pytest.raises(ValueError, match="grad must have shape"):
        torch.ops.pdkernels.silu_and_mul_backward(x.to("meta"), x.to("meta"))
