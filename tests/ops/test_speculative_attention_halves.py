"""speculative_attention of float32 queries on caches in 16 bits: the bits of a cache in float32 that holds the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pdkernels as pd
from pdkernels._attention import check_halves
from pdkernels.masks import causal
from tests.harness.error_budget import assert_within_budget
from tests.ops.kv_cases import copy_of
from tests.ops.speculative_cases import TAILS, Inputs, in_pages, make_inputs, make_rows

SHAPES = [(16, 2, 2), (40, 4, 2), (64, 9, 3), (128, 2, 1), (320, 2, 1), (96, 8, 1)]
OPS = [pd.speculative_attention, pd.speculative_attention_append_]


def of_rows(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return inputs._replace(**{name: getattr(inputs, name).to(dtype) for name in inputs._fields[1:5]})


def pair(new: int, lengths: tuple[int, ...], page_size: int = 0, **options: object) -> tuple[Inputs, Inputs]:
    """Inputs in 16 bits, and the same numbers in 32."""
    inputs = make_inputs(new, lengths, dtype=torch.float32, **options)
    halves = of_rows(in_pages(inputs, page_size) if page_size else inputs, torch.float16)
    return halves, of_rows(halves, torch.float32)


def on_level(ops: object, inputs: Inputs, tail: str) -> tuple[Tensor, ...]:
    parts = (*TAILS[tail].plan(32, 48).arguments, inputs.q.shape[-1] ** -0.5)
    return tuple(ops.speculative_attention(*inputs[:6], *parts, inputs.block_table))


@pytest.mark.covering
@pytest.mark.parametrize("tail", TAILS)
def test_the_bits_of_the_numbers(level_ops: object, tail: str) -> None:
    turn = list(TAILS).index(tail)
    head_dim, heads, kv_heads = SHAPES[turn % len(SHAPES)]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    halves, numbers = pair(TAILS[tail].q_len, (0, 37, 150), (0, 1, 16)[turn % 3], **sizes)
    found, expected = on_level(level_ops, halves, tail), on_level(level_ops, numbers, tail)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.covering
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), SHAPES)
def test_one_row_and_eight_after_any_prefix(level_ops: object, head_dim: int, heads: int, kv_heads: int) -> None:
    for tail, new in (("one token", 1), ("quadratic", 42)):
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        halves, numbers = pair(new, tuple(range(0, 270, 27)), **sizes)
        found, expected = on_level(level_ops, halves, tail), on_level(level_ops, numbers, tail)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_within_the_error_budget() -> None:
    """Of the reference, which widens the rows too."""
    halves, _ = pair(5, (0, 37, 150))
    plan = causal(5).plan(16, 16)
    found = pd.speculative_attention(*halves[:6], plan)
    exact = pd.speculative_attention(
        halves.q.double(), *(x.double() for x in halves[1:5]), halves.lengths, plan, backend="reference"
    )
    same = pd.speculative_attention(*halves[:6], plan, backend="reference")
    assert_within_budget(found, exact, same, name="out")


@pytest.mark.parametrize("page_size", [0, 3])
def test_rows_are_stored(level_ops: object, page_size: int) -> None:
    _, numbers = pair(42, (37, 0, 150), slots=200)
    rows = make_rows(numbers, "both")
    if page_size:
        stored = torch.tensor([len(rows.chosen(42, b)) for b in range(3)], dtype=numbers.lengths.dtype)
        longer = in_pages(numbers._replace(lengths=numbers.lengths + stored), page_size)
        numbers = longer._replace(lengths=numbers.lengths)
    plan, halves = TAILS["quadratic"].plan(32, 48), of_rows(numbers, torch.float16)
    results, caches = [], []
    for inputs in (halves, numbers):
        written = inputs.map(copy_of)
        parts = (*plan.arguments, inputs.q.shape[-1] ** -0.5)
        more = (*parts, written.block_table, None, None, 0, None, 0.0, *rows)
        results.append(level_ops.speculative_attention_append_(*written[:6], *more))
        caches.append([x.float() for x in written[3:5]])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*caches))


def test_all_numbers_of_16_bits_are_widened(level_ops: object) -> None:
    """Subnormal ones too. A key of zeros gives every row the same weight, so that a single value comes out as it is."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = bits[bits.isfinite()].reshape(-1, 1, 1, 64)
    zeros, lengths = torch.zeros_like(values), torch.zeros(len(values), dtype=torch.int64)
    plan = (*causal(1).plan(16, 16).arguments, 1.0)
    caches = torch.zeros(2, len(values), 1, 1, 64, dtype=torch.float16)
    out = level_ops.speculative_attention(zeros.float(), zeros, values, *caches, lengths, *plan, None)[0]
    assert torch.equal(out, values.float())


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_does_to_others_what_it_does_in_float32(number: float) -> None:
    plan, found = causal(40).plan(16, 16), []
    halves, _ = pair(40, (70, 0, 9))
    for name in ("k_cache", "v_new"):
        x = getattr(halves, name).clone()
        x[0, 3, 0, 5] = number
        inputs = halves._replace(**{name: x})
        found.append(pd.speculative_attention(*inputs[:6], plan))
        expected = pd.speculative_attention(*of_rows(inputs, torch.float32)[:6], plan)
        assert torch.equal(found[-1].nan_to_num(7.0), expected.nan_to_num(7.0))
        assert name == "k_cache" or not bool(found[-1].isfinite().all())


def test_a_compiled_graph_has_the_bits_of_the_op() -> None:
    halves, plan = pair(5, (37, 0, 150))[0], causal(5).plan(16, 16)
    step = lambda *given: pd.speculative_attention(*given, plan)  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*halves[:6]), step(*halves[:6]))


@pytest.mark.parametrize("op", OPS)
def test_errors(op: object) -> None:
    halves, numbers = pair(5, (3, 0, 7))
    plan = causal(5).plan(16, 16)
    with pytest.raises(TypeError, match="k_new must be float16 like k_cache, got torch.float32. Convert it with"):
        op(*halves._replace(k_new=numbers.k_new)[:6], plan)
    with pytest.raises(TypeError, match="k_new must be torch.float32 like q, got torch.float16"):
        op(*numbers._replace(k_new=halves.k_new)[:6], plan)
    with pytest.raises(TypeError, match="k_new must be torch.bfloat16 like q, got torch.float16"):
        op(*halves._replace(q=halves.q.bfloat16())[:6], plan)


def test_gpus_refuse_it() -> None:
    """Their kernels read rows in the dtype of the queries."""
    with FakeTensorMode():
        q = torch.empty(1, 1, 1, 16, device="cuda")
        wanted = "k_new must be torch.float32 like q on a GPU, got torch.float16"
        with pytest.raises(TypeError, match=wanted):
            check_halves("pdkernels.speculative_attention", "k_new", q.half(), q)
