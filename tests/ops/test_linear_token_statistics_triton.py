"""The Triton kernels of linear_token_statistics against the reference, interpreted or on a GPU."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.reference.linear_token_statistics import linear_token_statistics as reference
from tests.decoding.test_memory import Allocations
from tests.harness.triton_interpreter import dot_dtypes, requires_triton, triton_device
from tests.ops import linear_token_cases as cases
from tests.ops.linear_token_cases import DRAWS, inputs, whole_numbers

pytest.importorskip("triton", reason="needs triton")
from pdkernels.triton import linear_token_statistics as kernels

# The interpreter computes in NumPy, which warns about logarithms of 0 and differences of infinities.
pytestmark = [requires_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")]
DEVICE = triton_device()
INF, NAN = math.inf, math.nan
ops = importlib.import_module("pdkernels.ops.linear_token_statistics")  # the function has the name of its module


def run(hidden: Tensor, weight: Tensor, **options: Any) -> pd.TokenStatistics:
    """The CUDA kernel, whatever the device is."""
    step = options.pop("step", 0)
    steps, step = (step.to(DEVICE), 0) if isinstance(step, Tensor) else (None, step)
    seed = options.pop("seed", 0)
    seeds, seed = (seed.to(DEVICE), 0) if isinstance(seed, Tensor) else (None, seed)
    options = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    given = ops.Options(seed=seed, seeds=seeds, step=step, steps=steps, **options)
    return pd.TokenStatistics(*(t.cpu() for t in ops._triton(hidden.to(DEVICE), weight.to(DEVICE), *given)))


def same_bits(a: pd.TokenStatistics, b: pd.TokenStatistics) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.fixture
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has several tiles, and the last one fewer."""
    monkeypatch.setattr(kernels, "MAX_PARTS", 2)


CASES = [(dtype, *draw) for i, dtype in enumerate(dot_dtypes()) for draw in DRAWS[i % 2 :: 2]]


@pytest.mark.parametrize("dtype, temperature, distribution", CASES)
def test_within_the_error_budget(dtype: torch.dtype, temperature: float, distribution: str) -> None:
    hidden, weight = inputs(40, 331, 72, dtype)
    options = dict(temperature=temperature, distribution=distribution, seed=2**40 + 3, step=7, suppress=(4, 330))
    cases.check(run(hidden, weight, **options), hidden, weight, **options)


@pytest.mark.covering
@pytest.mark.parametrize("temperature, distribution", DRAWS)
@pytest.mark.parametrize("rows, width, depth, top_k", [(1, 1, 1, 1), (3, 2, 5, 2), (9, 700, 3, 16), (33, 129, 3, 1)])
def test_ties_go_to_the_lowest_id(
    rows: int, width: int, depth: int, top_k: int, temperature: float, distribution: str, few_parts: None
) -> None:
    hidden, weight = whole_numbers(rows, width, depth)
    options = {"temperature": temperature, "distribution": distribution, "top_k": top_k, "seed": -5, "step": 2**32 - 1}
    cases.check_exactly(run(hidden, weight, **options), hidden, weight, **options)


def test_rows_that_are_asked_for() -> None:
    """In any order, repeated, with their own positions, seeds and steps; -1 and numbers out of range are no rows."""
    hidden, weight = whole_numbers(6, 300, 10)
    hidden[3] = NAN  # not read
    rows = torch.tensor([[5, -1, 0, 0], [2, 4, -1, 5]])
    options = {
        "temperature": 0.9,
        "positions": torch.arange(8).view(2, 4) + 2**32 - 9,
        "seed": torch.tensor([[-3], [2**40 + 1]]).expand(2, 4),
        "step": torch.tensor([[1], [9]]).expand(2, 4),
        "row_index": rows.int(),
        "suppress": tuple(range(16)),
        "top_k": 3,
    }
    found = run(hidden.view(2, 3, 10), weight, **options)
    cases.check_exactly(found, hidden, weight, **options)
    assert found.ids.shape == (2, 4) and found.ids[0, 1] == -1 and found.logsumexp[0, 1] == -INF
    out_of_range = options | {"row_index": torch.where(rows < 0, torch.tensor([[6], [-7]]), rows)}
    assert same_bits(run(hidden, weight, **out_of_range), found)


def test_infinities_and_nan(few_parts: None) -> None:
    hidden, weight = whole_numbers(5, 300, 4)
    hidden[:, 0] = torch.tensor([1.0, 0.0, 1.0, 1.0, NAN])
    weight[:, 0] = 0.0
    for values in (
        {7: INF, 200: INF},
        {130: -INF, 3: INF, 290: NAN},
        {299: NAN, 150: NAN},
        dict.fromkeys(range(300), -INF),
    ):
        strange = weight.clone()
        for token, value in values.items():
            strange[token, 0] = value
        for options in ({"temperature": 0.8, "distribution": "sampling"}, {"suppress": (3, 7, 290, 299)}):
            found = run(hidden, strange, **options)
            logits = hidden.double() @ strange.double().T
            logits[:, list(options.get("suppress", ()))] = -INF
            undefined = (logits.isnan() | (logits == INF)).any(1)
            assert torch.equal(found.probs.isnan(), undefined) and torch.equal(found.entropy.isnan(), undefined)
            cases.check_exactly(found, hidden, strange, **options)


def test_nothing_left() -> None:
    """A row whose tokens are all suppressed counts as no row."""
    hidden, weight = whole_numbers(3, 4, 8)
    found = run(hidden, weight, suppress=(0, 1, 2, 3), top_k=4)
    assert (found.ids == -1).all() and (found.top_ids == -1).all() and (found.logsumexp == -INF).all()
    assert not any(t.any() for t in (found.probs, found.top_probs, found.margin, found.entropy))


def test_far_apart_and_far_out() -> None:
    """Logits of any size have a distribution: only differences count."""
    hidden = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1e-30]])
    weight = torch.tensor([[3e38, 0.0], [3e38, 1.0], [-3e38, -1.0], [0.0, 1e8]])
    cases.check_exactly(run(hidden, weight, top_k=4), hidden, weight, top_k=4)
    for temperature in (1e-30, 1e30):
        found = run(hidden[1:], weight[1:], temperature=temperature, distribution="sampling", top_k=3)
        assert all(t.isfinite().all() for t in (found.probs, found.margin, found.entropy))
        assert torch.allclose(found.top_probs[1], torch.tensor([1.0, 0.0, 0.0] if temperature < 1 else [1 / 3] * 3))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_row_does_not_depend_on_the_others(temperature: float, few_parts: None) -> None:
    hidden, weight = inputs(33, 200, 40)
    positions = torch.arange(33) + 100
    together = run(hidden, weight, temperature=temperature, positions=positions)
    again = run(hidden, weight, temperature=temperature, positions=positions)
    assert same_bits(together, again)
    for row in (0, 32):
        alone = run(hidden[row : row + 1], weight, temperature=temperature, positions=positions[row : row + 1])
        assert same_bits(pd.TokenStatistics(*(t[row : row + 1] for t in together)), alone)


def test_any_strides() -> None:
    hidden, weight = (t.to(DEVICE) for t in whole_numbers(6, 200, 12))
    wide = torch.full((6, 40), NAN, device=DEVICE)
    wide[:, 4:28:2] = hidden
    turned = weight.T.contiguous().T
    assert turned.stride() == (1, 200)
    expected = run(hidden, weight)
    assert same_bits(run(wide[:, 4:28:2], weight), expected) and same_bits(run(hidden, turned), expected)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_empty(shape: tuple[int, ...]) -> None:
    weight = torch.ones(9, 8)
    found = run(torch.zeros(shape), weight, temperature=1.0)
    assert all(t.shape[: len(shape) - 1] == shape[:-1] and t.numel() == 0 for t in found)
    found = run(torch.zeros(shape), weight, row_index=torch.tensor([-1, -1]))
    assert found.ids.tolist() == [-1, -1] and found.top_ids.shape == (2, 5)


def test_every_column_is_in_one_part() -> None:
    for vocabulary in (1, 127, 128, 129, 32768, 32769, 50257, 126464, 2**20 + 1):
        tiles, parts = kernels.choose_parts(vocabulary, 128)
        assert parts <= kernels.MAX_PARTS and (parts - 1) * tiles * 128 < vocabulary <= parts * tiles * 128


def test_memory_does_not_grow_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the launches: what is allocated for rows of a vocabulary of 126464 is a small part of their logits."""

    class Unlaunched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: None

    monkeypatch.setattr(kernels, "_parts_kernel", Unlaunched())
    monkeypatch.setattr(kernels, "_merge_kernel", Unlaunched())
    made = {}
    for width in (126464, 2**21):
        log = Allocations({0})
        log.made.append([])
        hidden, weight = (
            torch.zeros(512, 8, dtype=torch.bfloat16),
            torch.zeros(1, 8, dtype=torch.bfloat16).expand(width, 8),
        )
        with log:
            ops._triton(hidden, weight, *ops.Options(temperature=1.0))
        made[width] = sum(nbytes for *_, nbytes in log.made[0])
    assert 0 < made[126464] < 512 * 126464 * 2 / 10
    assert made[2**21] <= made[126464] * 256 / 247


def test_filters_take_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tokens stay is known only once all logits are."""
    asked = []

    def by_blocks(*arguments: Any) -> tuple[Tensor, ...]:
        asked.append(arguments[2])
        return tuple(torch.zeros(1) for _ in range(7))

    monkeypatch.setattr(ops, "_by_blocks", by_blocks)
    monkeypatch.setattr(kernels, "forward", lambda *arguments: pytest.fail("filters need all logits"))
    hidden, weight = whole_numbers(1, 9, 4)
    run(hidden, weight, top_p=0.5)
    run(hidden, weight, min_p=0.1)
    assert [(options.top_p, options.min_p) for options in asked] == [(0.5, 0.0), (1.0, 0.1)]


def test_draws_are_those_of_the_reference() -> None:
    """Word for word: among equal logits the noise alone decides."""
    hidden, weight = torch.ones(20, 1), torch.ones(403, 1)
    for seed, step in ((0, 0), (2**63 - 1, 5), (-1, 2**31)):
        options = {"temperature": 1.0, "seed": seed, "step": step}
        assert torch.equal(
            run(hidden, weight, **options).ids, reference(hidden.double(), weight.double(), **options)[0]
        )
