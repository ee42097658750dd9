"""token_statistics against the formulas in double precision: the statistics, odd values, layouts. Draws: test_token_statistics_draws.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference.token_statistics import token_statistics as reference
from tests.ops.implementations import NAMES, implementation
from tests.ops.token_cases import DTYPES, check, rows_of, run
from tests.support.errors import refused

NAN, INF = math.nan, math.inf
FLOATS = ("probs", "top_probs", "margin", "entropy", "logsumexp")


# --- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(64, 1), (300, 7), (200, 33), (100, 100), (60, 1031), (30, 8192), (30, 8200)])
def test_within_the_error_budget(impl, rows: int, width: int, dtype: torch.dtype) -> None:
    logits = rows_of(rows, width, dtype)
    top_k = min(5, width)
    check(run(impl, logits, top_k=top_k), logits, top_k=top_k)


def test_a_real_vocabulary(impl) -> None:
    """Rows as flat and as peaked as those of models, and merged parts of the vocabulary."""
    logits = rows_of(2, 126_464, torch.bfloat16)
    logits[1] *= 4
    actual, exact = run(impl, logits), reference(logits.double())
    for name, a, b in zip(pd.TokenStatistics._fields, actual, exact):
        assert torch.equal(a, b) if a.dtype == torch.int64 else torch.allclose(a.double(), b, rtol=1e-6, atol=1e-6), (
            name
        )


@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 16])
def test_runners_up(impl, top_k: int) -> None:
    """Many equal logits, so the order of ids shows; 16-bit logits of a small range."""
    logits = (rows_of(60, 700) * 2).round().to(torch.bfloat16)
    check(run(impl, logits, top_k=top_k), logits, top_k=top_k)
    wide = (rows_of(3, 17_000)).round()
    check(run(impl, wide, top_k=top_k), wide, top_k=top_k)


@pytest.mark.parametrize("width", [1, 2, 4, 5, 9])
def test_as_many_as_there_are(width: int) -> None:
    logits, head = rows_of(3, width), torch.eye(width)
    for found in (pd.token_statistics(logits), pd.linear_token_statistics(logits, head)):
        order = logits.argsort(-1, descending=True)
        assert torch.equal(found.top_ids, order[:, :5]) and torch.equal(found.ids, order[:, 0])


def test_runners_up_next_to_each_other(impl) -> None:
    """Logits a rounding apart, in any order and in growing order: each of the first may come last."""
    steps = torch.arange(9000)
    shuffled = torch.randperm(9000, generator=torch.Generator().manual_seed(0))
    logits = (1 + torch.stack([steps, steps.flip(0), shuffled]) * 2.0**-23).float()
    assert run(impl, logits, top_k=16).top_ids.equal(logits.argsort(-1, descending=True)[:, :16])


def test_by_hand(impl) -> None:
    found = run(impl, torch.tensor([[math.log(2), math.log(6), -INF, 0.0, 0.0]]), top_k=5)
    assert found.ids.item() == 1 and found.top_ids.tolist() == [[1, 0, 3, 4, 2]]
    assert found.top_probs[0].tolist() == pytest.approx([0.6, 0.2, 0.1, 0.1, 0.0], rel=1e-6)
    assert found.margin.item() == pytest.approx(0.4, rel=1e-6)
    assert found.logsumexp.item() == pytest.approx(math.log(10), rel=1e-6)
    assert found.entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (0.6, 0.2, 0.1, 0.1)), rel=1e-6)


def test_margins_of_compiled_statistics() -> None:
    """Inductor's expm1 of a small number is 0: an op is opaque to it."""
    logits = torch.tensor([[1.0, 1.0 + 2**-20, 0.0, -3.0]])
    compiled = torch.compile(pd.token_statistics)(logits)
    assert compiled.margin.item() == pd.token_statistics(logits).margin.item() > 1e-8


def test_sure_rows(impl) -> None:
    """One token has all the mass: probability 1, margin 1, entropy 0, exactly."""
    logits = torch.full((3, 9000), -200.0)
    logits[0, 8999] = logits[1, 0] = 1.0
    logits[2] = -INF
    logits[2, 5] = -1e4
    found = run(impl, logits)
    assert found.ids.tolist() == [8999, 0, 5] and found.probs.tolist() == [1.0] * 3
    assert found.margin.tolist() == [1.0] * 3
    assert found.entropy.tolist() == [0.0] * 3 and found.logsumexp.tolist() == [1.0, 1.0, -1e4]
    assert found.top_ids[2].tolist() == [5, 0, 1, 2, 3] and found.top_probs[2].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_equals(impl) -> None:
    for width in (3, 40, 8193):
        found = run(impl, torch.full((2, width), -7.5), top_k=3)
        assert found.ids.tolist() == [0, 0] and found.top_ids.tolist() == [[0, 1, 2]] * 2
        assert found.margin.tolist() == [0.0, 0.0]
        assert found.entropy[0].item() == pytest.approx(math.log(width), rel=1e-6)
    assert run(impl, torch.tensor([[-0.0, 0.0, -0.0]]), top_k=3).top_ids.tolist() == [[0, 1, 2]]


# --- suppressed tokens, chosen rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_suppressed_tokens(impl, dtype: torch.dtype) -> None:
    logits = rows_of(40, 9000, dtype)
    suppress = [8999, 0, 4000, *logits[:8].argmax(-1).tolist(), 8192]
    check(run(impl, logits, suppress=suppress), logits, suppress=suppress)
    assert run(impl, logits[:, :4], suppress=[0, 1, 2, 3], top_k=1).ids.tolist() == [-1] * 40
    logits[:, 7] = NAN  # a NaN that does not count
    assert run(impl, logits, suppress=[7]).entropy.isfinite().all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_chosen_rows(impl, index_dtype: torch.dtype) -> None:
    logits = rows_of(6, 500).view(2, 3, 500)
    index = torch.tensor([[5, -1, 0, 0], [-1, 2, 1, -1]], dtype=index_dtype)
    found, all_rows = run(impl, logits, row_index=index, temperature=0.9), run(impl, logits, temperature=0.9)
    for name, few, many in zip(pd.TokenStatistics._fields, found, all_rows):
        expected = many.flatten(0, 1)[index.clamp(min=0).long()]
        nothing = {"ids": -1, "top_ids": -1, "logsumexp": -INF}.get(name, 0)
        expected[index < 0] = torch.tensor(nothing, dtype=expected.dtype)
        assert torch.equal(few, expected), name
    strided = torch.stack([index, index], -1)[..., 0]
    assert torch.equal(run(impl, logits, row_index=strided, temperature=0.9).ids, found.ids)


def test_a_row_that_is_not_there_is_not_read(impl) -> None:
    logits = rows_of(4, 300)
    logits[1] = NAN
    found = run(impl, logits, row_index=torch.tensor([0, -1, 3]))
    assert found.ids[1] == -1 and found.probs.isfinite().all()
    assert run(impl, logits, row_index=torch.zeros(0, 3, dtype=torch.int64)).top_ids.shape == (0, 3, 5)


# --- infinities and NaN -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("width", [20, 1000, 20_000])
def test_rows_without_a_distribution(impl, width: int, temperature: float) -> None:
    logits = rows_of(7, width)
    logits[0] = -INF
    logits[1, [3, width // 2]] = NAN
    logits[2, [5, width - 1]] = INF
    logits[3, [2, 4]] = INF
    logits[3, width - 1] = NAN
    logits[4] = NAN
    logits[5] = -INF
    logits[5, width - 2] = INF
    for options in ({}, {"top_p": 0.8, "min_p": 0.1}, {"distribution": "sampling", "top_p": 0.5}):
        found = run(impl, logits, temperature=temperature, **options)
        assert found.ids[:6].tolist() == [-1, 3, 5, width - 1, 0, width - 2]
        expected = logits[1:6].sort(dim=-1, descending=True, stable=True).indices[:, :5]
        assert torch.equal(found.top_ids[1:6], expected) and found.top_ids[0].tolist() == [-1] * 5
        for name in FLOATS:
            values = getattr(found, name)
            assert values[1:6].isnan().all() and values[6].isfinite().all(), name
            assert (values[0] == (-INF if name == "logsumexp" else 0)).all(), name


@pytest.mark.parametrize("offset", [1e4, -1e4, 3e38])
def test_a_constant_changes_nothing(impl, offset: float) -> None:
    logits = torch.round(rows_of(8, 300) * 4) if abs(offset) < 1e6 else torch.zeros(8, 300)
    for a, b in list(zip(run(impl, logits), run(impl, logits + offset)))[:-1]:
        assert torch.equal(a, b)


def test_far_apart(impl) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 3.1e38, 3.1e38]])
    found = run(impl, logits)
    assert found.top_ids.tolist() == [[3, 4, 0, 2, 1]] and found.top_probs.tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0]]


# --- layouts, sizes, the same bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_layout(impl, dtype: torch.dtype) -> None:
    logits = rows_of(6, 128, dtype).view(2, 3, 128).to(impl.device)
    options = {"temperature": 0.7, "top_p": 0.9}
    expected = impl.token_statistics(logits, **options)
    wide = torch.full((2, 3, 140), NAN, dtype=dtype, device=impl.device)
    for view in (
        wide[..., 8:136],
        wide[..., 3:131],
        torch.empty_like(logits.transpose(0, 1)).transpose(0, 1),
        torch.empty_like(logits.mT).mT,
    ):
        for a, b in zip(impl.token_statistics(view.copy_(logits), **options), expected):
            assert torch.equal(a, b) if a.dtype == torch.int64 else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert impl.token_statistics(logits[1, 2]).top_probs.shape == (5,)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (1, 1)])
def test_empty_and_single(impl, shape: tuple[int, ...]) -> None:
    found = impl.token_statistics(torch.zeros(shape, device=impl.device), top_k=1, temperature=1.0, top_p=0.5)
    assert all(
        t.shape == (*shape[:-1], 1) if "top" in name else t.shape == shape[:-1] for name, t in found._asdict().items()
    )
    assert found.ids.dtype == found.top_ids.dtype == torch.int64 and found.margin.dtype == torch.float32
    assert (found.margin == 1).all()


def test_a_row_does_not_depend_on_the_others(impl) -> None:
    logits, options = rows_of(9, 9001), {"temperature": 0.8, "top_p": 0.9, "distribution": "sampling"}
    together, again = run(impl, logits, **options), run(impl, logits, **options)
    alone = run(impl, logits[4:5], positions=torch.tensor([4]), **options)
    assert all(torch.equal(a, b) and torch.equal(a[4:5], c) for a, b, c in zip(together, again, alone))


def test_threads_give_the_same_bits() -> None:
    logits, impl, before, results = rows_of(3, 50_000), implementation("cpu"), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(impl, logits, temperature=0.5, min_p=0.01))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_result_does_not_depend_on_the_order_of_threads() -> None:
    impl, logits = implementation("cudasim"), rows_of(3, 9000)
    logits[1, 600] = NAN
    options = {"temperature": 0.8, "top_p": 0.9, "distribution": "sampling", "suppress": [17]}
    expected = run(impl, logits, **options)
    for order in impl.schedules():
        with order:
            for a, b in zip(run(impl, logits, **options), expected):
                assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


# --- torch integration -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    for device in [name for name in NAMES if name != "cudasim"]:
        logits, numbers = rows_of(4, 30, dtype).to(device), torch.tensor([3, 0], device=device)
        for call in (
            (logits,),
            (logits.view(2, 2, 30)[:, 1], 0.7, 3, None, 2),
            (logits, 0.7, 3, numbers, 0, numbers, numbers, numbers, [1], 2, 0.9, 0.1, "sampling"),
        ):
            torch.library.opcheck(torch.ops.pdkernels.token_statistics.default, call)


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(logits: Tensor, positions: Tensor, number: Tensor, moment: int) -> tuple[Tensor, Tensor]:
        found = pd.token_statistics(logits, temperature=0.5, positions=positions, step=number, suppress=3)
        return found.ids, pd.token_statistics(logits, temperature=0.5, step=moment, top_k=1).ids

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for moment, (rows, width) in enumerate([(2, 30), (3, 50), (7, 16), (4, 90)], 2):
        call = rows_of(rows, width), torch.arange(rows), torch.full((rows,), width), moment
        assert all(torch.equal(a, b) for a, b in zip(compiled(*call), step(*call)))
    assert counter.frame_count == 1


def test_gradients_stop_here() -> None:
    assert not pd.token_statistics(rows_of(3, 20).requires_grad_()).probs.requires_grad


def test_reference_backend() -> None:
    logits = rows_of(3, 20)
    assert torch.allclose(
        pd.token_statistics(logits, backend="reference").probs, pd.token_statistics(logits).probs, atol=1e-6
    )
    assert pd.token_statistics(logits.double(), backend="reference").entropy.dtype == torch.float64


X = torch.zeros(2, 40)
NUMBERS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "text, call",
    {
        r"TypeError: token_statistics: logits must be a tensor, got list": {"logits": [1.0]},
        r"logits must have shape \(\.\.\., V\), V at least 1, got \(\)": {"logits": X[0, 0]},
        r"V at least 1, got \(2, 0\)": {"logits": X[:, :0]},
        r"TypeError: logits must be float32, float16 or bfloat16, got torch\.int32": {"logits": X.int()},
        r"TypeError: for the kernels, got torch\.float64\. Pass backend='reference'": {"logits": X.double()},
        r"temperature must be in \[0, 1e30\], got -0\.5": {"temperature": -0.5},
        r"temperature must be in \[0, 1e30\], got nan": {"temperature": NAN},
        r"TypeError: temperature must be a number, got str": {"temperature": "hot"},
        r"top_p must be in \[0, 1\], got 1\.5": {"top_p": 1.5},
        r"min_p must be in \[0, 1\], got -1": {"min_p": -1},
        r"TypeError: seed must be an int, got float": {"seed": 0.5},
        r"step must be in \[0, 2\*\*32\), got -1": {"step": -1},
        r"step must broadcast to the shape \(2,\) of the rows, got \(1, 2\)": {"step": NUMBERS.view(1, 2)},
        r"TypeError: step must be an int32 or int64 tensor, got torch\.float32": {"step": torch.zeros(2)},
        r"step must be in \[0, 4294967295\], got -1 for row 0": {"step": NUMBERS - 1, "temperature": 1.0},
        r"positions must have shape \(2\), got \(1,\)": {"positions": NUMBERS[:1]},
        r"TypeError: positions must be an int32 or int64 tensor, got int": {"positions": 3},
        r"positions must be in \[0, 4294967295\], got -2 for row 0": {"positions": NUMBERS - 2, "temperature": 1.0},
        r"TypeError: row_index must be an int32 or int64 tensor, got list": {"row_index": [0]},
        r"row_index must be in \[-1, 1\], got 2 for row 0": {"row_index": NUMBERS + 2},
        r"row_index must be in \[-1, 1\], got -2 for row 0": {"row_index": NUMBERS - 2},
        r"TypeError: suppress must be an int or a sequence of ints, got 'abc'": {"suppress": "abc"},
        r"TypeError: suppress must be an int or a sequence of ints, got None": {"suppress": None},
        r"suppress must hold ids in \[0, 39\], got 40": {"suppress": 40},
        r"suppress must have at most 16 ids, got 17": {"suppress": list(range(17))},
        r"top_k must be in 1 \.\. min\(V, 16\) = 16, got 0": {"top_k": 0},
        r"top_k must be in 1 \.\. min\(V, 16\) = 16, got 17": {"top_k": 17},
        r"top_k must be in 1 \.\. min\(V, 16\) = 3, got 4": {"logits": X[:, :3], "top_k": 4},
        r"distribution must be 'model' or 'sampling', got 'dream'": {"distribution": "dream"},
        r"NotImplementedError: backend must be one of auto, native, reference on cpu, got 'triton'": {
            "backend": "triton"
        },
    }.items(),
)
def test_bad_call(call: dict[str, object], text: str) -> None:
    with refused(text) as error:
        pd.token_statistics(**{"logits": X, **call})
    assert str(error.value).startswith("pdkernels.")
