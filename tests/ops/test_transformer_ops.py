"""add_rms_norm and the gates against the reference in double precision; apply_rope_append_ is tested in test_apply_rope_append.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference import transformer_ops as reference
from tests.harness.error_budget import assert_within_budget
from tests.ops.implementations import NAMES, implementation
from tests.support.errors import refused

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GATES = ["silu_and_mul", "gelu_and_mul"]
WIDTHS = [(33, 1), (32, 7), (16, 33), (4, 513), (3, 5280)]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def norm_inputs(rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, residual, weight, next_weight."""
    return [
        draw(0, rows, width, dtype=dtype),
        draw(1, rows, width, dtype=dtype, scale=3),
        *(draw(i, width, dtype=dtype) for i in (2, 3)),
    ]


def add_rms_norm(impl, inputs: list[torch.Tensor], **options) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, next_weight = (t.to(impl.device) for t in inputs)
    return tuple(t.cpu() for t in impl.add_rms_norm(x, residual, weight, next_weight=next_weight, **options))


# --- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", WIDTHS)
def test_norms_within_the_error_budget(impl, rows: int, width: int, dtype: torch.dtype) -> None:
    inputs = norm_inputs(rows, width, dtype)
    expected, exact = reference.add_rms_norm(*inputs), reference.add_rms_norm(*(t.double() for t in inputs))
    for name, *tensors in zip(("y", "next"), add_rms_norm(impl, inputs), exact, expected):
        assert_within_budget(*tensors, name=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_roundings_are_where_the_published_model_has_them(impl, dtype: torch.dtype) -> None:
    """Bit for bit, except for the rare value that a differently rounded sum of squares moves across a rounding boundary."""
    inputs = norm_inputs(16, 2000, dtype)
    expected, actual = reference.add_rms_norm(*inputs), add_rms_norm(impl, inputs)
    assert all((a == b).float().mean() > 0.998 for a, b in zip(actual, expected))
    x, residual, weight, _ = (t.float() for t in inputs)
    rounded_sum = reference.add_rms_norm((x + residual).to(dtype), torch.zeros_like(inputs[0]), inputs[2])[0]
    rounded_once = reference.add_rms_norm(x, residual, weight)[0].to(dtype)
    for other in (rounded_sum, rounded_once):  # either change would be seen
        assert (other == expected[0]).float().mean() < 0.99


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(300, 1), (65, 7), (16, 33), (3, 4099), (2, 17920)])
def test_gates_within_the_error_budget(impl, rows: int, width: int, dtype: torch.dtype, gate: str) -> None:
    x, oracle = draw(4, rows, 2 * width, dtype=dtype, scale=4), getattr(reference, gate)
    actual = getattr(impl, gate)(x.to(impl.device)).cpu()
    assert_within_budget(actual, oracle(x.double()), oracle(x), name=gate)


def test_gelu_far_below_zero(impl) -> None:
    """Each number to the digits of its exponent: where 1 + tanh is 0 in float32, and up to where e^-88 is."""
    gates = torch.linspace(-9.5, 0, 1000)
    exact = gates.double() / (
        1 + (-gates.double() * (1.5957691216057308 + 0.07135481627260025 * gates.double() ** 2)).exp()
    )
    found = impl.gelu_and_mul(torch.cat([gates, torch.ones_like(gates)]).to(impl.device)).cpu()
    torch.testing.assert_close(found.double(), exact, rtol=5e-5, atol=1e-37)


def test_without_a_next_weight(impl) -> None:
    inputs = norm_inputs(5, 40, torch.float32)
    x, residual, weight = (t.to(impl.device) for t in inputs[:3])
    y, following = impl.add_rms_norm(x, residual, weight)
    assert following is None and torch.equal(y.cpu(), add_rms_norm(impl, inputs)[0])


FORMS = {  # which of x, residual, weight, next_weight are given
    "norm": (0, None, 2, None),
    "norm, then norm": (0, None, 2, 3),
    "sum and its norm": (0, 1, None, 3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows, width", [(33, 1), (16, 33), (3, 5280)])
def test_what_is_not_given_is_left_out(impl, rows: int, width: int, form: str, dtype: torch.dtype) -> None:
    inputs = norm_inputs(rows, width, dtype)
    given = [None if i is None else inputs[i] for i in FORMS[form]]
    on_device = [None if t is None else t.to(impl.device) for t in given]
    y, following = impl.add_rms_norm(*on_device[:3], next_weight=on_device[3])
    exact, same = ([f(t) for t in given] for f in (lambda t: t if t is None else t.double(), lambda t: t))
    for name, actual, *tensors in zip(
        ("y", "next"), (y, following), reference.add_rms_norm(*exact), reference.add_rms_norm(*same)
    ):
        if actual is not None:
            assert_within_budget(actual.cpu(), *tensors, name=name)
    assert (following is None) == (given[3] is None)
    if given[2] is None:
        assert torch.equal(y.cpu(), inputs[0] + inputs[1])


def test_eps_is_added_to_the_mean_square(impl) -> None:
    inputs = norm_inputs(8, 64, torch.float32)
    expected, exact = (
        reference.add_rms_norm(*(t.to(dtype) for t in inputs), 0.5) for dtype in (torch.float32, torch.float64)
    )
    for name, *tensors in zip(("y", "next"), add_rms_norm(impl, inputs, eps=0.5), exact, expected):
        assert_within_budget(*tensors, name=name)


# --- layouts and sizes -----------------------------------------------------------------------------------------------------


def layouts(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of a (2, 3, width) tensor with another layout."""
    width = t.shape[-1]
    poisoned = torch.full((2, 3, width + 5), torch.nan, dtype=t.dtype, device=t.device)
    unaligned = torch.full((t.numel() + 3,), torch.nan, dtype=t.dtype, device=t.device)[3:].view(t.shape)
    views = {
        "rows apart": poisoned[..., 2 : width + 2],
        "unaligned": unaligned,
        "swapped": torch.empty_like(t.transpose(0, 1)).transpose(0, 1),
        "columns first": torch.empty_like(t.mT).mT,
        "batch apart": t.new_full((4, 3, width), torch.nan)[::2],
    }
    return {name: view.copy_(t) for name, view in views.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [33, 128])
def test_any_layout(impl, width: int, dtype: torch.dtype) -> None:
    x, residual = (draw(i, 2, 3, width, dtype=dtype).to(impl.device) for i in (0, 1))
    weight, apart = draw(2, width, dtype=dtype).to(impl.device), draw(3, 2 * width, dtype=dtype).to(impl.device)[::2]
    y, following = impl.add_rms_norm(x, residual, weight, next_weight=apart)
    gated = {gate: getattr(impl, gate)(x[..., : width // 2 * 2].contiguous()) for gate in GATES}
    others = layouts(residual)
    for name, view in layouts(x).items():
        again, next_again = impl.add_rms_norm(view, others[name], weight, next_weight=apart)
        assert again.is_contiguous() and torch.allclose(again.float(), y.float(), rtol=1e-2), name
        assert torch.equal(again, y) or name == "unaligned" or impl.name != "cpu", name
        assert torch.allclose(next_again.float(), following.float(), rtol=2e-2), name
        for gate, result in gated.items():
            assert torch.equal(getattr(impl, gate)(view[..., : width // 2 * 2]), result), name
    spread = x[:1, :1].expand(2, 3, width)
    assert torch.equal(
        impl.add_rms_norm(spread, spread, weight)[0],
        impl.add_rms_norm(spread.contiguous(), spread.contiguous(), weight)[0],
    )


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (8,), (1, 1, 1, 8)])
def test_shapes_of_results(impl, shape: tuple[int, ...]) -> None:
    x, weight = draw(0, *shape).to(impl.device), torch.ones(shape[-1], device=impl.device)
    y, following = impl.add_rms_norm(x, x, weight, next_weight=weight)
    assert y.shape == following.shape == x.shape
    assert y.isfinite().all()
    for gate in GATES:
        gated = getattr(impl, gate)(x)
        assert gated.shape == (*shape[:-1], shape[-1] // 2) and gated.isfinite().all()


def test_offsets_beyond_32_bits(impl) -> None:
    """Rows 4 GiB apart. The memory is reserved, but only the rows in use are ever touched."""
    stride = 2**30 + 64
    wide = torch.empty(stride + 32, dtype=torch.float32, device=impl.device).as_strided((2, 32), (stride, 1))
    wide.copy_(draw(0, 2, 32))
    for gate in GATES:
        assert torch.equal(getattr(impl, gate)(wide), getattr(impl, gate)(wide.contiguous()))


# --- values ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(impl, dtype: torch.dtype) -> None:
    info, width = torch.finfo(dtype), 40
    rows = [
        torch.full((width,), value, dtype=dtype)
        for value in (0.0, info.tiny, info.max, -info.max / 2, torch.inf, torch.nan)
    ]
    rows.append(torch.linspace(-1e4, 1e4, width).to(dtype))
    x, weight = torch.stack(rows), draw(5, width, dtype=dtype)
    zeros = torch.zeros_like(x)
    inputs = [x, zeros, weight, weight]
    for name, *tensors in zip(
        ("y", "next"),
        add_rms_norm(impl, inputs),
        reference.add_rms_norm(*(t.double() for t in inputs)),
        reference.add_rms_norm(*inputs),
    ):
        assert_within_budget(*tensors, name=name)
    gates = torch.tensor(
        [0.0, -0.0, 1e-4, -1e-4, 20, -20, 88, -88, 104, -104, 6e4, -6e4, torch.inf, -torch.inf, torch.nan], dtype=dtype
    )
    x = torch.cat([gates, torch.ones_like(gates)])
    for gate in GATES:
        actual, oracle = getattr(impl, gate)(x.to(impl.device)).cpu(), getattr(reference, gate)
        assert_within_budget(actual, oracle(x.double()), oracle(x), name=gate)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_pattern_of_16_bits(impl, dtype: torch.dtype) -> None:
    """silu(20) and gelu(20) are 20 in float32, and 20 times a number has two bits more: ties, subnormals and overflows are among the products."""
    up = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    x = torch.cat([torch.full_like(up, 20), up]).to(impl.device)
    for gate in GATES:
        found = getattr(impl, gate)(x).cpu().nan_to_num(7)
        assert torch.equal(found, (20 * up.float()).to(dtype).nan_to_num(7)), gate


def test_a_nan_stays_in_its_row(impl) -> None:
    inputs = norm_inputs(3, 64, torch.float32)
    inputs[0][1, 5] = torch.nan
    for t in add_rms_norm(impl, inputs):
        assert t[1].isnan().all() and not t[[0, 2]].isnan().any()


# --- the same bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(impl, dtype: torch.dtype) -> None:
    inputs = norm_inputs(19, 1000, dtype)
    together, again = add_rms_norm(impl, inputs), add_rms_norm(impl, inputs)
    alone = add_rms_norm(impl, [t[7:8] for t in inputs[:2]] + inputs[2:])
    assert all(torch.equal(a, b) and torch.equal(a[7:8], c) for a, b, c in zip(together, again, alone))
    x = inputs[0].to(impl.device)
    for gate in GATES:
        assert torch.equal(getattr(impl, gate)(x)[7:8], getattr(impl, gate)(x[7:8]))


def test_threads_give_the_same_bits() -> None:
    inputs, wide, before = norm_inputs(37, 3000, torch.float32), draw(6, 3, 40_000), torch.get_num_threads()
    impl, results = implementation("cpu"), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((*add_rms_norm(impl, inputs), *(getattr(impl, gate)(wide) for gate in GATES)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_result_does_not_depend_on_the_order_of_threads() -> None:
    impl, inputs = implementation("cudasim"), norm_inputs(3, 700, torch.bfloat16)
    expected, gated = add_rms_norm(impl, inputs), [getattr(impl, gate)(inputs[0]) for gate in GATES]
    for order in impl.schedules():
        with order:
            assert all(torch.equal(a, b) for a, b in zip(add_rms_norm(impl, inputs), expected))
            assert all(torch.equal(getattr(impl, gate)(inputs[0]), a) for gate, a in zip(GATES, gated))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(64, 7), (5, 1025)])
def test_every_vector_unit(level_ops: object, rows: int, width: int, dtype: torch.dtype) -> None:
    inputs = norm_inputs(rows, width, dtype)
    for given in (inputs, [inputs[0], None, *inputs[2:]], [*inputs[:2], None, inputs[3]]):
        exact, same = (
            reference.add_rms_norm(*(t if t is None else t.double() for t in given)),
            reference.add_rms_norm(*given),
        )
        for name, *tensors in zip(("y", "next"), level_ops.add_rms_norm(*given, 1e-6), exact, same):
            assert_within_budget(*tensors, name=name)
    if dtype != torch.float32:
        gates = {gate: getattr(level_ops, gate) for gate in GATES}
        test_every_pattern_of_16_bits(SimpleNamespace(device="cpu", **gates), dtype)
    x = draw(7, rows, 2 * width, dtype=dtype, scale=5)
    for gate in GATES:
        oracle = getattr(reference, gate)
        assert_within_budget(getattr(level_ops, gate)(x), oracle(x.double()), oracle(x), name=gate)


# --- torch integration -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    for device in [name for name in NAMES if name != "cudasim"]:
        x, residual, weight, next_weight = (t.to(device) for t in norm_inputs(3, 20, dtype))
        for call in (
            (x, residual, weight, next_weight, 1e-6),
            (x, residual, weight),
            (x[..., :8], residual[..., :8], weight[:8]),
            (x, None, weight),
            (x, residual, None, next_weight),
        ):
            torch.library.opcheck(torch.ops.pdkernels.add_rms_norm.default, call)
        for gate in GATES:
            torch.library.opcheck(getattr(torch.ops.pdkernels, gate).default, (x,))


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(x, residual, weight):
        y, following = pd.add_rms_norm(x, residual, weight, next_weight=weight)
        both = torch.cat([following, y], -1)
        return y, following, pd.silu_and_mul(both), pd.gelu_and_mul(both)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for rows, width in [(2, 8), (3, 10), (7, 16), (4, 6)]:
        x, residual, weight, _ = norm_inputs(rows, width, torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x, residual, weight), step(x, residual, weight)))
    assert counter.frame_count == 1


def test_reference_backend_serves_double_precision_and_gradients() -> None:
    x, residual, weight, next_weight = (t.double().requires_grad_() for t in norm_inputs(2, 5, torch.float32))
    y, following = pd.add_rms_norm(x, residual, weight, next_weight=next_weight, backend="reference")
    gated = [getattr(pd, gate)(y[..., :4], backend="reference") for gate in GATES]
    (following.sum() + sum(x.sum() for x in gated)).backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float64 for t in (x, residual, weight, next_weight))


# --- errors --------------------------------------------------------------------------------------------------------------------

X, W = torch.zeros(2, 4), torch.zeros(4)
NORMS = [
    ({"x": [1]}, r"TypeError: add_rms_norm: x must be a tensor, got list"),
    ({"x": X[0, 0]}, r"x must have shape \(\.\.\., E\), got \(\)"),
    ({"x": X.long()}, r"TypeError: x must be float32, float16 or bfloat16, got torch\.int64\. Convert it"),
    (
        {"x": X.double(), "residual": X.double(), "weight": W.double()},
        r"TypeError: for the kernels, got torch\.float64\. Pass backend='reference'",
    ),
    ({"residual": X[:1]}, r"residual must have shape \(2, 4\) like x, got \(1, 4\)"),
    ({"residual": X.half()}, r"TypeError: residual must be torch\.float32 like the others, got torch\.float16"),
    ({"residual": X.to("meta")}, r"residual must be on cpu, got meta\. Move it"),
    ({"weight": W[:3]}, r"weight must have shape \(4\), got \(3,\)"),
    ({"weight": X}, r"weight must have shape \(4\), got \(2, 4\)"),
    (
        {"next_weight": W.bfloat16()},
        r"TypeError: next_weight must be torch\.float32 like the others, got torch\.bfloat16",
    ),
    ({"weight": None}, r"weight is missing\. Only a call with a residual and a next_weight may leave it out\."),
    (
        {"weight": None, "residual": None, "next_weight": W},
        r"weight is missing\. Only a call with a residual and a next_weight may leave it out\.",
    ),
    ({"eps": -1.0}, r"eps must be at least 0, got -1\.0"),
    ({"eps": "small"}, r"TypeError: eps must be a number, got str"),
    (
        {"backend": "triton"},
        r"NotImplementedError: backend must be one of auto, native, reference on cpu, got 'triton'",
    ),
]


@pytest.mark.parametrize("call, text", NORMS)
def test_bad_norms(call: dict[str, object], text: str) -> None:
    with refused(text) as error:
        pd.add_rms_norm(**{"x": X, "residual": X, "weight": W, **call})
    assert str(error.value).startswith("pdkernels.")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "x, text",
    [
        (3.0, r"TypeError: GATE: x must be a tensor, got float"),
        (X[0, 0], r"x must have shape \(\.\.\., 2F\), got \(\)"),
        (X[:, :3], r"x must have shape \(\.\.\., 2F\), got \(2, 3\)"),
        (X.int(), r"TypeError: x must be float32, float16 or bfloat16, got torch\.int32"),
        (X.double(), r"TypeError: got torch\.float64\. Pass backend='reference'"),
    ],
)
def test_bad_gates(x: object, text: str, gate: str) -> None:
    with refused(text.replace("GATE", gate)) as error:
        getattr(pd, gate)(x)
    assert str(error.value).startswith("pdkernels.")


def test_gelu_has_no_gradient() -> None:
    with refused(r"NotImplementedError: gelu_and_mul: x must not require a gradient"):
        pd.gelu_and_mul(X.clone().requires_grad_())
