"""logit_divergence against the formulas in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference.logit_divergence import logit_divergence as reference
from tests.harness.error_budget import assert_within_budget
from tests.ops.implementations import NAMES, implementation
from tests.support.errors import refused

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = math.nan, math.inf


def inputs(
    rows: int, width: int, dtype: torch.dtype = torch.float32, scale: float = 3.0, step: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Logits, and those of a recurrence before."""
    generator = torch.Generator().manual_seed(rows * 10_007 + width)
    logits, change = (torch.randn(rows, width, generator=generator) for _ in range(2))
    return (scale * logits).to(dtype), (scale * logits + step * change).to(dtype)


def run(impl, logits: Tensor, previous: Tensor | None = None, **options) -> pd.LogitDivergence:
    moved = (t if t is None else t.to(impl.device) for t in (logits, previous))
    return pd.LogitDivergence(*(t.cpu() for t in impl.logit_divergence(*moved, **options)))


def check(actual: pd.LogitDivergence, logits: Tensor, previous: Tensor | None, min_p: float = 0.1) -> None:
    exact = reference(logits.double(), None if previous is None else previous.double(), min_p)
    same = reference(logits, previous, min_p)
    for name, *tensors in zip(pd.LogitDivergence._fields, actual, exact, same):
        assert_within_budget(*tensors, name=name)


# --- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, width", [(64, 1), (200, 7), (100, 33), (64, 100), (80, 1031), (24, 8192), (24, 8193), (24, 65536)]
)
def test_within_the_error_budget(impl, rows: int, width: int, dtype: torch.dtype) -> None:
    logits, previous = inputs(rows, width, dtype)
    check(run(impl, logits, previous), logits, previous)
    check(run(impl, logits), logits, None)


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.5, 1.0])
def test_min_p(impl, min_p: float) -> None:
    logits, previous = inputs(64, 90)
    check(run(impl, logits, previous, min_p=min_p), logits, previous, min_p)
    check(run(impl, logits, min_p=min_p), logits, None, min_p)


def test_formulas_by_hand(impl) -> None:
    """p goes from (1/2, 1/2, 0) to (3/4, 1/4, 0); at min_p 1/2 the token of 1/4 becomes 1/3, and so does the last one."""
    then, now = torch.tensor([[0.0, 0.0, -INF]]), torch.tensor([[math.log(3), 0.0, -INF]])
    divergence = run(impl, now, then, min_p=0.5)
    assert divergence.argmax.item() == 0
    assert divergence.entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), rel=1e-6)
    assert divergence.kl.item() == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-5)
    old, new = [0.5, 0.5, 1 / 3], [0.75, 1 / 3, 1 / 3]
    expected = sum(p / sum(old) * math.log((p / sum(old)) / (q / sum(new))) for p, q in zip(old, new))
    assert divergence.minp_kl.item() == pytest.approx(expected, rel=1e-5)


def test_nothing_moved(impl) -> None:
    logits, _ = inputs(20, 500)
    divergence = run(impl, logits, logits)
    assert torch.equal(divergence.kl, torch.zeros(20)) and torch.equal(divergence.minp_kl, torch.zeros(20))


def test_a_uniform_distribution_is_the_first_of_all(impl) -> None:
    """If no earlier distribution is given, it is that of equal logits."""
    logits, _ = inputs(20, 500)
    for a, b in zip(run(impl, logits), run(impl, logits, torch.full_like(logits, 2.5))):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert run(impl, torch.full((1, 500), -7.0)).kl.item() == pytest.approx(0, abs=1e-6)


# --- infinities and NaN -----------------------------------------------------------------------------------


def test_masked_tokens(impl) -> None:
    """Logits of -inf on either side, on both, and a distribution with all its mass on one token."""
    logits, previous = inputs(100, 1000)
    logits[::4, ::3] = -INF
    previous[::4, ::3] = -INF
    previous[1::4, ::2] = -INF
    logits[2::4, 5] = -INF
    logits[3::4] = -INF
    logits[3::4, 77] = 0.5
    divergence = run(impl, logits, previous)
    check(divergence, logits, previous)
    assert divergence.kl.view(25, 4)[:, :2].isfinite().all() and (divergence.kl.view(25, 4)[:, 2:] == INF).all()
    assert divergence.minp_kl.isfinite().all()
    assert (divergence.argmax[3::4] == 77).all() and (divergence.entropy[3::4].abs() < 1e-6).all()
    check(run(impl, logits), logits, None)


@pytest.mark.parametrize("below", [88.0, 95.0, 103.0, 110.0, 500.0])
def test_a_token_that_became_impossible_is_infinitely_far(impl, below: float) -> None:
    """However small its probability was: one that underflows a float is not 0."""
    logits, previous = torch.tensor([[0.0, -INF, 0.0]]), torch.tensor([[0.0, -below, 0.0]])
    for min_p in (0.0, 0.1):
        found = run(impl, logits, previous, min_p=min_p)
        expected = reference(logits, previous, min_p)
        assert found.kl.item() == expected[2].item() == INF
        assert (found.minp_kl.item() == INF) == (expected[3].item() == INF) == (min_p == 0)
    possible = run(impl, previous, logits)
    assert possible.kl.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("width", [5, 1000, 20_000])
def test_rows_without_a_distribution(impl, width: int) -> None:
    logits, previous = inputs(7, width)
    logits[0] = -INF
    logits[1, width // 2] = NAN
    logits[1, 3] = NAN
    logits[2, width - 1] = INF
    logits[3] = NAN
    previous[4] = -INF
    previous[5, 1] = NAN
    divergence = run(impl, logits, previous)
    assert torch.equal(divergence.argmax, logits.argmax(-1))
    assert divergence.argmax[:4].tolist() == [0, min(3, width // 2), width - 1, 0]
    assert divergence.entropy[:4].isnan().all() and divergence.entropy[4:].isfinite().all()
    for t in (divergence.kl, divergence.minp_kl):
        assert t[:6].isnan().all() and t[6].isfinite()
    alone = run(impl, logits)
    assert alone.kl[:4].isnan().all() and alone.minp_kl[:4].isnan().all() and alone.kl[4:].isfinite().all()


@pytest.mark.parametrize("width", [2, 40, 9000])
def test_the_first_of_the_largest(impl, width: int) -> None:
    logits = torch.zeros(4, width)
    logits[1, width // 2 :] = 1.0
    logits[2, -1] = 1e-30
    logits[3] = torch.arange(width).float().clamp(max=width - 2)
    assert torch.equal(run(impl, logits).argmax, torch.tensor([0, width // 2, width - 1, width - 2]))


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 3e38])
def test_a_constant_changes_nothing(impl, offset: float) -> None:
    logits, previous = (torch.round(t * 4) for t in inputs(8, 300))
    if abs(offset) > 1e6:  # all differences are lost
        logits = torch.zeros_like(logits)
    a, b = run(impl, logits, previous), run(impl, logits + offset, previous)
    assert all(torch.equal(s, t) for s, t in zip(a, b))


# --- layouts, sizes, the same bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_layout(impl, dtype: torch.dtype) -> None:
    logits, previous = (t.view(2, 3, 128).to(impl.device) for t in inputs(6, 128, dtype))
    expected = impl.logit_divergence(logits, previous)
    wide = torch.full((2, 3, 140), NAN, dtype=dtype, device=impl.device)
    for view in (
        wide[..., 8:136],
        wide[..., 3:131],
        torch.empty_like(logits.transpose(0, 1)).transpose(0, 1),
        torch.empty_like(logits.mT).mT,
    ):
        divergence = impl.logit_divergence(view.copy_(logits), previous)
        assert torch.equal(divergence.argmax, expected.argmax)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(divergence[1:], expected[1:]))
    last = impl.logit_divergence(logits[1, 2], previous[1, 2])
    assert last.kl.shape == () and torch.equal(last.kl, expected.kl[1, 2])
    assert torch.equal(last.argmax, expected.argmax[1, 2])


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (1, 1)])
def test_empty_and_single(impl, shape: tuple[int, ...]) -> None:
    divergence = impl.logit_divergence(torch.zeros(shape, device=impl.device))
    assert all(t.shape == shape[:-1] for t in divergence) and divergence.argmax.dtype == torch.int64
    assert divergence.kl.dtype == torch.float32


def test_a_row_does_not_depend_on_the_others(impl) -> None:
    logits, previous = inputs(9, 9001)
    together, again, alone = (
        run(impl, logits, previous),
        run(impl, logits, previous),
        run(impl, logits[4:5], previous[4:5]),
    )
    assert all(torch.equal(a, b) and torch.equal(a[4:5], c) for a, b, c in zip(together, again, alone))


def test_threads_give_the_same_bits() -> None:
    logits, previous = inputs(3, 50_000)
    impl, before, results = implementation("cpu"), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(impl, logits, previous))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_result_does_not_depend_on_the_order_of_threads() -> None:
    impl = implementation("cudasim")
    logits, previous = inputs(3, 700)
    logits[1, 600] = NAN
    expected = run(impl, logits, previous)
    for order in impl.schedules():
        with order:
            for a, b in zip(run(impl, logits, previous), expected):
                assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(200, 7), (8, 8200)])
def test_every_vector_unit(level_ops: object, rows: int, width: int, dtype: torch.dtype) -> None:
    logits, previous = inputs(rows, width, dtype)
    check(pd.LogitDivergence(*level_ops.logit_divergence(logits, previous, 0.1)), logits, previous)
    check(pd.LogitDivergence(*level_ops.logit_divergence(logits, None, 0.1)), logits, None)


# --- torch integration -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    for device in [name for name in NAMES if name != "cudasim"]:
        logits, previous = (t.to(device) for t in inputs(4, 30, dtype))
        for call in ((logits, previous, 0.1), (logits,), (logits.view(2, 2, 30)[:, 1], None, 0.5)):
            torch.library.opcheck(torch.ops.pdkernels.logit_divergence.default, call)


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(logits, previous):
        divergence = pd.logit_divergence(logits, previous)
        return divergence.argmax, divergence.kl < 1e-3, divergence.entropy

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for rows, width in [(2, 30), (3, 50), (7, 16), (4, 90)]:
        call = inputs(rows, width)
        assert all(torch.equal(a, b) for a, b in zip(compiled(*call), step(*call)))
    assert counter.frame_count == 1


def test_gradients_stop_here() -> None:
    logits, previous = inputs(3, 20)
    assert not pd.logit_divergence(logits.requires_grad_(), previous).kl.requires_grad


def test_reference_backend() -> None:
    logits, previous = inputs(3, 20)
    assert torch.allclose(
        pd.logit_divergence(logits, previous, backend="reference").kl,
        pd.logit_divergence(logits, previous).kl,
        atol=1e-6,
    )
    assert pd.logit_divergence(logits.double(), backend="reference").kl.dtype == torch.float64


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    "text, call",
    {
        r"TypeError: logit_divergence: logits must be a tensor, got list": {"logits": [1.0]},
        r"logits must have shape \(\.\.\., V\), V at least 1, got \(\)": {"logits": X[0, 0]},
        r"V at least 1, got \(2, 0\)": {"logits": X[:, :0]},
        r"TypeError: logits must be float32, float16 or bfloat16, got torch\.int32": {"logits": X.int()},
        r"TypeError: for the kernels, got torch\.float64\. Pass backend='reference'": {"logits": X.double()},
        r"previous must have shape \(2, 4\) like logits, got \(1, 4\)": {"previous": X[:1]},
        r"TypeError: previous must be torch\.float32 like the others, got torch\.float16": {"previous": X.half()},
        r"previous must be on cpu, got meta": {"previous": X.to("meta")},
        r"TypeError: previous must be a tensor, got float": {"previous": 1.0},
        r"min_p must be in \[0, 1\], got 1\.5": {"min_p": 1.5},
        r"min_p must be in \[0, 1\], got -0\.1": {"min_p": -0.1},
        r"min_p must be in \[0, 1\], got nan": {"min_p": NAN},
        r"TypeError: min_p must be a number, got NoneType": {"min_p": None},
        r"NotImplementedError: backend must be one of auto, native, reference on cpu, got 'triton'": {
            "backend": "triton"
        },
    }.items(),
)
def test_bad_call(call: dict[str, object], text: str) -> None:
    with refused(text) as error:
        pd.logit_divergence(**{"logits": X, **call})
    assert str(error.value).startswith("pdkernels.")
