"""apply_rope_: rows within the error budget, every byte around them unchanged, the bits of apply_rope_append_."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.models.architectures.rope import apply_rope, rope_tables
from pdkernels.ops import library as _library
from pdkernels.reference.transformer_ops import apply_rope_ as reference
from tests.harness.error_budget import assert_within_budget
from tests.ops.implementations import NAMES, implementation
from tests.ops.kv_cases import copy_of, storage, whole
from tests.support.errors import refused

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STYLES = ["half", "interleaved"]
CPU = torch.device("cpu")
P = 40


class Case(NamedTuple):
    """One call; `x` has heads and guards around it whose bytes are random."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    style: str

    def moved(self, device: torch.device) -> Case:
        return Case(*(copy_of(t, device) for t in self[:4]), self.style)

    def doubled(self) -> Case:
        return self._replace(x=self.x.double(), cos=self.cos.double(), sin=self.sin.double())

    def run(self, call) -> Case:
        call(*self[:4], style=self.style)
        return self

    def bytes(self) -> Tensor:
        return whole(self.x).cpu()


def make_case(
    seed: int,
    *,
    batch: int = 2,
    rows: int = 5,
    heads: int = 3,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    style: str = "half",
    heads_first: bool = False,
    pad: int = 0,
    skew: bool = False,
    index_dtype: torch.dtype = torch.int64,
    given: str = "own",
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    x = storage((batch, rows, heads + 2, head_dim), dtype, (0, 2, 1, 3) if heads_first else (0, 1, 2, 3), pad, seed)[
        :, :, 1 : heads + 1
    ]
    x.copy_(torch.randn(x.shape, generator=generator))
    cos, sin = (
        torch.empty(t.numel() + skew)[skew:].view(t.shape).copy_(t)
        for t in rope_tables(P, head_dim, theta=100.0, style=style)[:2]
    )
    drawn = torch.randint(0, P, (batch + 1, 2 * rows), generator=generator, dtype=index_dtype)
    shared = drawn[batch, :rows]
    positions = dict(
        own=drawn[:batch, :rows], strided=drawn[1:, ::2], shared=shared, expanded=shared.expand(batch, rows)
    )
    return Case(x, cos, sin, positions[given], style)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return make_case(
        draw(st.integers(0, 2**20)),
        batch=draw(st.integers(0, 3)),
        rows=draw(st.integers(0, 5)),
        heads=draw(st.integers(0, 5)),
        head_dim=draw(st.sampled_from([2, 4, 16, 18, 34, 64, 96])),
        dtype=draw(st.sampled_from(DTYPES)),
        style=draw(st.sampled_from(STYLES)),
        heads_first=draw(st.booleans()),
        pad=draw(st.sampled_from([0, 1, 8])),
        skew=draw(st.booleans()),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        given=draw(st.sampled_from(["own", "strided", "shared", "expanded"])),
    )


def check(case: Case, actual: Case) -> None:
    """The results of a call on a copy of the case."""
    expected, exact = case.moved(CPU).run(reference).x, case.moved(CPU).doubled().run(reference).x
    if case.x.numel() >= 500:
        assert_within_budget(actual.x.cpu(), exact, expected, name="rows")
    else:
        eps = torch.finfo(case.x.dtype).eps
        assert torch.allclose(actual.x.cpu().double(), exact, rtol=4 * eps, atol=8 * eps)
    left, was = actual.moved(CPU), case.moved(CPU)
    left.x.zero_(), was.x.zero_()
    assert torch.equal(left.bytes(), was.bytes())


# --- parity ------------------------------------------------------------------------------------------------------------


@given(case=cases())
@settings(max_examples=120)
def test_equals_reference(impl, case: Case) -> None:
    check(case, case.moved(impl.device).run(impl.apply_rope_))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 6, 16, 80, 96, 128, 250, 256])
def test_sizes_of_heads(impl, head_dim: int, dtype: torch.dtype, style: str) -> None:
    case = make_case(head_dim, rows=3, heads=max(3, 512 // head_dim), head_dim=head_dim, dtype=dtype, style=style)
    check(case, case.moved(impl.device).run(impl.apply_rope_))


@pytest.mark.parametrize("style", STYLES)
def test_is_the_rotation_of_the_models(impl, style: str) -> None:
    case = make_case(5, head_dim=16, style=style)
    expected = apply_rope(case.x, rope_tables(P, 16, theta=100.0, style=style).at(case.positions), style)
    assert torch.allclose(case.moved(impl.device).run(impl.apply_rope_).x.cpu(), expected, atol=1e-6)


def both_ops(ops: tuple, dtype: torch.dtype, style: str, head_dim: int, device: torch.device) -> list[Tensor]:
    """The rows that apply_rope_ leaves, and those that apply_rope_append_ leaves, at the same positions and without a bias."""
    first, second = (
        torch.randn(2, 4, 8, head_dim, generator=torch.Generator().manual_seed(head_dim))
        .to(device, dtype)
        .repeat(2, 1, 1, 1, 1)
    )
    table = [t.to(device) for t in rope_tables(P, head_dim, theta=100.0, style=style)[:2]]
    lengths = torch.tensor([3, 17], device=device)
    ops[0](first[:, :, :6], *table, lengths[:, None] + torch.arange(4, device=device), style)
    k, v = torch.zeros(2, 2, P, 2, head_dim, dtype=dtype, device=device)
    ops[1](second, None, *table, k, v, lengths, style)
    return [first.cpu(), second.cpu()]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_has_the_bits_of_apply_rope_append(impl, dtype: torch.dtype, style: str) -> None:
    ops = (lambda *t: impl.apply_rope_(*t[:-1], style=t[-1]), lambda *t: impl.apply_rope_append_(*t[:-1], style=t[-1]))
    for head_dim in (2, 18, 64, 96):
        assert torch.equal(*both_ops(ops, dtype, style, head_dim, impl.device))


# --- properties --------------------------------------------------------------------------------------------------------


@given(case=cases())
@settings(max_examples=20)
def test_rows_alone_have_the_same_bits(impl, case: Case) -> None:
    together, again = (case.moved(impl.device).run(impl.apply_rope_) for _ in range(2))
    assert torch.equal(together.bytes(), again.bytes())
    alone = case.moved(impl.device)
    for b in range(case.x.shape[0]):
        for row in range(case.x.shape[1]):
            at = (
                alone.positions[row : row + 1]
                if case.positions.dim() == 1
                else alone.positions[b : b + 1, row : row + 1]
            )
            impl.apply_rope_(alone.x[b : b + 1, row : row + 1], alone.cos, alone.sin, at, style=case.style)
    assert torch.equal(alone.bytes(), together.bytes())


@given(case=cases())
@settings(max_examples=10)
def test_result_does_not_depend_on_the_order_of_threads(case: Case) -> None:
    impl = implementation("cudasim")
    expected = case.moved(CPU).run(impl.apply_rope_)
    for order in impl.schedules():
        with order:
            assert torch.equal(case.moved(CPU).run(impl.apply_rope_).bytes(), expected.bytes())


def test_threads_share_the_work() -> None:
    case, before, found = make_case(13, batch=3, rows=30, heads=12, head_dim=96), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(case.moved(CPU).run(pd.apply_rope_))
    finally:
        torch.set_num_threads(before)
    check(case, found[0])
    assert all(torch.equal(other.bytes(), found[0].bytes()) for other in found)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_vector_unit(level_ops: object, dtype: torch.dtype, style: str) -> None:
    ops = (
        lambda *t: level_ops.apply_rope_(*t[:-1], t[-1] == "interleaved"),
        lambda *t: level_ops.apply_rope_append_(*t[:-1], None, None, t[-1] == "interleaved"),
    )
    for head_dim in (2, 18, 34, 96):
        case = make_case(head_dim, head_dim=head_dim, heads=20, dtype=dtype, style=style, pad=1)
        check(case, case.moved(CPU).run(lambda *t, style: ops[0](*t, style)))
        assert torch.equal(*both_ops(ops, dtype, style, head_dim, CPU))


# --- torch integration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", STYLES)
def test_opcheck(shape: str) -> None:
    for device in [name for name in NAMES if name != "cudasim"]:
        case = make_case(19, given="own" if shape == "half" else "shared", style=shape).moved(torch.device(device))
        torch.library.opcheck(torch.ops.pdkernels.apply_rope_.default, (*case[:4], shape == "interleaved"))


@pytest.mark.parametrize("shared", [False, True])
def test_fullgraph_without_recompiles(shared: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(qkv, cos, sin, positions):
        pd.apply_rope_(qkv[:, :, :3], cos, sin, positions)
        return qkv + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seed, (batch, rows) in enumerate([(2, 3), (3, 5), (4, 7), (5, 4)]):
        case = make_case(seed, batch=batch, rows=rows, head_dim=16, given="shared" if shared else "own")
        qkv, tables, positions = torch.randn(batch, rows, 5, 16), (case.cos, case.sin), case.positions.clone()
        expected, found = step(qkv.clone(), *tables, positions), qkv.clone()
        assert torch.equal(compiled(found, *tables, positions), expected) and torch.equal(found + 1, expected)
    assert counter.frame_count == 1


def test_reference_backend_serves_double_precision() -> None:
    case = make_case(23, head_dim=8).doubled()
    expected = case.moved(CPU).run(reference)
    pd.apply_rope_(*case[:4], backend="reference")
    assert torch.equal(case.x, expected.x) and case.x.dtype == torch.float64


# --- values out of range -----------------------------------------------------------------------------------------------

BAD = [-1, P, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("given", ["own", "shared"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_position_is_named_and_nothing_is_written(bad: int, given: str) -> None:
    case = make_case(29, given=given)
    case.positions[..., -1] = bad
    before, text = (
        case.bytes().clone(),
        rf"^pdkernels\.apply_rope_: positions\[0, 4\] must be in \[0, 39\], got {bad} for sequence 0\.",
    )
    for backend, remedy in (("auto", " Make longer tables"), ("reference", "")):
        with pytest.raises(ValueError, match=text + remedy):
            pd.apply_rope_(*case[:4], backend=backend)
        assert torch.equal(case.bytes(), before)


@pytest.mark.parametrize("head_dim", [18, 32])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_is_left_alone_on_the_device(device_impl, bad: int, head_dim: int) -> None:
    case = make_case(31, head_dim=head_dim)
    case.positions[1, 2] = bad
    actual = case.moved(device_impl.device).run(device_impl.apply_rope_)
    good = case.moved(CPU)
    good.positions[1, 2] = 0
    good.run(reference)
    assert torch.equal(actual.x[1, 2].cpu(), case.x[1, 2])
    good.x[1, 2] = case.x[1, 2]
    assert torch.allclose(actual.x.cpu(), good.x, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_debug_checks_raise_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(37).moved(torch.device("cuda"))
    case.positions[1, 2] = P
    monkeypatch.setattr(_library, "DEBUG_CHECKS", True)
    with pytest.raises(ValueError, match=r"positions\[1, 2\] must be in"):
        case.run(pd.apply_rope_)


# --- errors --------------------------------------------------------------------------------------------------------------

GOOD = make_case(41)
TABLE = {
    r"apply_rope_: x must have shape \(B, R, heads, D\), got \(5, 3, 32\)": {"x": GOOD.x[0]},
    r"TypeError: apply_rope_: x must be a tensor, got list": {"x": [1.0]},
    r"TypeError: x must be float32, float16 or bfloat16, got torch\.int64\. Convert it": {"x": GOOD.x.long()},
    r"TypeError: got torch\.float64\. Pass backend='reference'": {"x": GOOD.x.double()},
    r"x must have an even head_dim of at least 2, got 7": {"x": GOOD.x[..., :7]},
    r"x must have an even head_dim of at least 2, got 0": {"x": GOOD.x[..., :0]},
    r"x must have a contiguous last dimension, got strides": {"x": GOOD.x[..., ::2]},
    r"TypeError: cos must be a tensor, got NoneType": {"cos": None},
    r"cos must have shape \(P, 32\) with at least one position, got \(40, 4\)": {"cos": GOOD.cos[:, :4]},
    r"with at least one position, got \(0, 32\)": {"cos": GOOD.cos[:0], "sin": GOOD.sin[:0]},
    r"with at least one position, got \(\)": {"cos": GOOD.cos[0, 0]},
    r"sin must have shape \(40, 32\) like cos, got \(9, 32\)": {"sin": GOOD.sin[:9]},
    r"TypeError: sin must be float32, got torch\.bfloat16": {"sin": GOOD.sin.bfloat16()},
    r"TypeError: cos must be float32.*for the kernels, got torch\.float64": dict(
        cos=GOOD.cos.double(), sin=GOOD.sin.double()
    ),
    r"cos must be contiguous, got strides": {"cos": GOOD.cos.repeat(1, 2)[:, ::2]},
    r"cos must be on cpu, got meta": {"cos": GOOD.cos.to("meta")},
    r"TypeError: positions must be an int32 or int64 tensor, got int": {"positions": 3},
    r"TypeError: positions must be an int32 or int64 tensor, got torch\.float32": {"positions": GOOD.positions.float()},
    r"positions must have shape \(2, 5\), got \(2, 4\)": {"positions": GOOD.positions[:, :4]},
    r"positions must have shape \(5\), got \(4,\)": {"positions": GOOD.positions[0, :4]},
    r"positions must have shape \(2, 5\), got \(\)": {"positions": GOOD.positions[0, 0]},
    r"positions must be on cpu, got meta": {"positions": GOOD.positions.to("meta")},
    r"style must be 'half' or 'interleaved', got 'pairs'": {"style": "pairs"},
    r"NotImplementedError: backend must be one of auto, native, reference on cpu, got 'triton'": {"backend": "triton"},
    r"NotImplementedError: x must not require a gradient, got a tensor that does": {
        "x": GOOD.x.clone().requires_grad_()
    },
}


@pytest.mark.parametrize("text, change", TABLE.items(), ids=TABLE)
def test_bad_arguments(text: str, change: dict[str, object]) -> None:
    before = GOOD.bytes().clone()
    with refused(text) as error:
        pd.apply_rope_(**{**GOOD._asdict(), **change})
    assert str(error.value).startswith("pdkernels.") and torch.equal(GOOD.bytes(), before)
