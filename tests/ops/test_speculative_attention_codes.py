"""speculative_attention on 8-bit caches: the numbers that rows stand for, in float32, and the same bits in every call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels import masks
from pdkernels.masks import causal
from pdkernels.reference.kv_cache import kv_dequantize, kv_quantize
from pdkernels.reference.speculative_attention import speculative_attention as reference
from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import requires_triton
from tests.ops.attention_cases import DTYPES
from tests.ops.kv_cases import copy_of
from tests.ops.speculative_cases import (
    APPEND,
    OP,
    TAILS,
    Inputs,
    Results,
    assert_stored,
    in_pages,
    make_inputs,
    make_rows,
    raw,
    run,
    run_append,
)

SHAPES = [(16, 2, 2), (40, 4, 2), (64, 9, 3), (128, 2, 1), (320, 2, 1), (96, 8, 1)]
PAGES = [0, 1, 16]


def quantized(inputs: Inputs) -> Inputs:
    """The same K and V as rows of 8 bits. What may not be read is a row of NaN there too."""
    return inputs._replace(**{name: kv_quantize(getattr(inputs, name)) for name in inputs._fields[1:5]})


def make(new: int, lengths: tuple[int, ...], page_size: int = 0, **options: object) -> Inputs:
    inputs = quantized(make_inputs(new, lengths, **options))
    return paged(inputs, page_size) if page_size else inputs


def paged(inputs: Inputs, page_size: int) -> Inputs:
    """In pages, of which those that no sequence owns hold NaN."""
    scales = inputs.map(lambda x: x.view(torch.float32) if x.dtype == torch.int8 else x)
    made = in_pages(scales, page_size)
    return inputs._replace(
        k_cache=made.k_cache.view(torch.int8), v_cache=made.v_cache.view(torch.int8), block_table=made.block_table
    )


def within_budget(found: Results, inputs: Inputs, tail: str) -> None:
    dense = TAILS[tail].dense()
    exact, same = (
        reference(q, *inputs[1:6], dense, block_table=inputs.block_table) for q in (inputs.q.double(), inputs.q)
    )
    for name, *tensors in zip(Results._fields, found, exact, same):
        assert_within_budget(*tensors, name=name)


def on_level(ops: object, inputs: Inputs, tail: str) -> Results:
    parts = (*TAILS[tail].plan(32, 48).arguments, inputs.q.shape[-1] ** -0.5)
    return Results(*ops.speculative_attention(*inputs[:6], *parts, inputs.block_table))


@pytest.mark.covering
@pytest.mark.parametrize("tail", TAILS)
def test_within_the_error_budget(level_ops: object, tail: str) -> None:
    """Dtypes, shapes and pages cycle independently."""
    turn = list(TAILS).index(tail)
    head_dim, heads, kv_heads = SHAPES[turn % len(SHAPES)]
    options = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": DTYPES[turn % len(DTYPES)]}
    inputs = make(TAILS[tail].q_len, (0, 37, 150), PAGES[turn % len(PAGES)], **options)
    within_budget(on_level(level_ops, inputs, tail), inputs, tail)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("new", [1, 7])
def test_it_is_the_eager_attention_of_transformers_on_the_numbers(dtype: torch.dtype, new: int) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    heads, kv_heads, head_dim, length = 6, 2, 64, 200
    inputs = make(new, (length,), heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, training=False)
    sees = torch.ones(new, length + new, dtype=torch.bool).tril(length)

    def eager(number: torch.dtype) -> Tensor:
        k, v = (
            torch.cat([kv_dequantize(cached, number)[:, :length], kv_dequantize(own, number)], 1).transpose(1, 2)
            for cached, own in ((inputs.k_cache, inputs.k_new), (inputs.v_cache, inputs.v_new))
        )
        hidden = torch.zeros(1, 1, new, length + new, dtype=number).masked_fill(~sees, float("-inf"))
        return llama.eager_attention_forward(module, inputs.q.to(number).transpose(1, 2), k, v, hidden, head_dim**-0.5)[
            0
        ]

    found = pd.speculative_attention(*inputs[:6], causal(new).plan(16, 16))
    assert_within_budget(found, eager(torch.float64), eager(torch.float32).to(dtype), name="out")


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), SHAPES)
def test_a_single_row_after_a_prefix(
    level_ops: object, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    options = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    inputs = make(1, tuple(range(0, 270, 9)), **options)
    within_budget(on_level(level_ops, inputs, "one token"), inputs, "one token")


def test_splits_of_a_long_prefix(level_ops: object) -> None:
    inputs = make(42, (4200, 0, 90), slots=4300, heads=2, kv_heads=1, head_dim=32, dtype=torch.bfloat16)
    results = on_level(level_ops, inputs, "quadratic")
    within_budget(results, inputs, "quadratic")
    alone = on_level(level_ops, inputs.sequence(2), "quadratic")
    assert all(torch.equal(a[2:], b) for a, b in zip(results, alone))


@pytest.mark.parametrize("page_size", [0, 3])
def test_rows_are_stored(level_ops: object, page_size: int) -> None:
    inputs = make(42, (37, 0, 150), slots=200, dtype=torch.bfloat16)
    rows = make_rows(inputs, "both")
    if page_size:
        stored = torch.tensor([len(rows.chosen(42, b)) for b in range(3)], dtype=inputs.lengths.dtype)
        longer = paged(inputs._replace(lengths=inputs.lengths + stored), page_size)
        inputs = longer._replace(lengths=inputs.lengths)
    written, plan = inputs.map(copy_of), TAILS["quadratic"].plan(32, 48)
    parts = (*plan.arguments, inputs.q.shape[-1] ** -0.5)
    results = level_ops.speculative_attention_append_(
        *written[:6], *parts, written.block_table, None, None, 0, None, 0.0, *rows
    )
    assert all(torch.equal(a, b) for a, b in zip(results, on_level(level_ops, inputs, "quadratic")))
    assert_stored(written[3:5], inputs, rows)


GROUPS = [(dtype, 2, 40) for dtype in DTYPES]
GROUPS += [(torch.bfloat16, group, head_dim) for group, head_dim in ((1, 64), (3, 64), (4, 88), (5, 64), (8, 24))]
GROUPS += [(torch.float32, 3, 128), (torch.float32, 1, 320)]


@pytest.mark.parametrize(("dtype", "group", "head_dim"), GROUPS, ids=str)
def test_a_causal_row_has_the_same_bits_in_any_call(
    level_ops: object, dtype: torch.dtype, group: int, head_dim: int
) -> None:
    """Whatever is cached, however many rows there are, in pages or not: few lanes, one vector of them, or two."""
    length = 300
    every = make(length, (0,), slots=length, heads=group, kv_heads=1, head_dim=head_dim, dtype=dtype)
    plan = causal(length).plan(64, 64)
    scale = head_dim**-0.5

    def rows(first: int, last: int, page_size: int = 0) -> Tensor:
        new = [x[:, first:last] for x in every[:3]]
        inputs = Inputs(*new, every.k_new, every.v_new, torch.tensor([first]))
        inputs = paged(inputs, page_size) if page_size else inputs
        arguments = (*causal(last - first).plan(64, 64).arguments, scale, inputs.block_table)
        return level_ops.speculative_attention(*inputs[:6], *arguments)[0]

    whole = level_ops.speculative_attention(*every[:6], *plan.arguments, scale, None)[0]
    for first, last in ((299, 300), (128, 129), (127, 128), (0, 1), (290, 292), (250, 257), (120, 160), (1, 299)):
        assert torch.equal(rows(first, last), whole[:, first:last]), (first, last)
    assert torch.equal(rows(290, 291, 7), whole[:, 290:291])


def test_packed_sequences_have_the_bits_of_a_batch() -> None:
    inputs = make(5, (37, 0, 150), dtype=torch.bfloat16)
    expected = pd.speculative_attention(*inputs[:6], causal(5).plan(16, 16))
    rows = [x.flatten(0, 1) for x in inputs[:3]]
    ends = torch.arange(0, 16, 5)
    found = pd.speculative_attention(*rows, *inputs[3:6], causal(5).plan(16, 16), cu_seqlens=ends)
    assert torch.equal(found, expected.flatten(0, 1))


@pytest.mark.parametrize("new", [1, 5, 40])
@pytest.mark.parametrize("side", ["k_cache", "v_cache", "k_new", "v_new"])
def test_a_row_that_is_not_finite_is_nan_for_those_that_see_it(side: str, new: int) -> None:
    inputs = make_inputs(new, [70, 0, 9], dtype=torch.float32)
    x = getattr(inputs, side).clone()
    at = 3 if side.endswith("cache") else new - 1
    x[0, at, 0, 5] = float("inf")
    inputs = quantized(inputs._replace(**{side: x}))
    plain = quantized(make_inputs(new, [70, 0, 9], dtype=torch.float32))
    plan = causal(new).plan(16, 16)
    found, expected = (pd.speculative_attention(*each[:6], plan) for each in (inputs, plain))
    # Two query heads share the first KV head. Of new rows only the last sees itself.
    touched = torch.zeros(3, new, 4, dtype=torch.bool)
    touched[0, :, :2] = True if side.endswith("cache") else (torch.arange(new) >= at)[:, None]
    assert bool(found[touched].isnan().all()) and torch.equal(found[~touched], expected[~touched])
    backend = pd.speculative_attention(*inputs[:6], plan, backend="reference")
    assert torch.equal(backend.isnan(), found.isnan())


def test_rows_before_a_start_do_not_matter() -> None:
    inputs = make(5, (70, 20, 9), dtype=torch.float32)
    k, v = inputs.k_cache.clone(), inputs.v_cache.clone()
    k[:, :9], v[:, :9] = -128, -128  # whatever numbers these are
    plan, starts = causal(5).plan(16, 16), torch.tensor([9, 9, 9])
    expected = pd.speculative_attention(*inputs[:6], plan, starts=starts)
    found = pd.speculative_attention(*inputs._replace(k_cache=k, v_cache=v)[:6], plan, starts=starts)
    assert torch.equal(found, expected)


def arguments(**changes: Tensor) -> tuple:
    inputs = make(5, (3, 0), dtype=torch.bfloat16)._replace(**changes)
    return (*inputs[:6], causal(5).plan(16, 16))


PLAIN = make_inputs(5, [3, 0], dtype=torch.bfloat16)
ROWS = quantized(PLAIN)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k_new": PLAIN.k_new}, TypeError, "k_new must be int8 like k_cache, got torch.bfloat16. Quantize it with"),
        ({"v_cache": PLAIN.v_cache}, TypeError, "v_cache must be int8 like k_cache, got torch.bfloat16"),
        ({"k_cache": PLAIN.k_cache}, TypeError, "k_new must be float32, float16 or bfloat16, got torch.int8"),
        ({"k_new": ROWS.k_new[..., :32].contiguous()}, ValueError, "36 bytes a head: 32 codes and their scale, got"),
        (
            {"k_cache": ROWS.k_cache[..., :-2].contiguous()},
            ValueError,
            "k_cache must have rows at multiples of 4 bytes",
        ),
        ({"v_cache": ROWS.v_cache[..., :-4].contiguous()}, ValueError, r"v_cache must have shape \(2, 6, 2, 36\)"),
        (
            {"k_cache": torch.zeros(2, 6, 2, 37, dtype=torch.int8)[..., 1:]},
            ValueError,
            "k_cache must have rows at multiples of 4 bytes",
        ),
        ({"q": ROWS.k_new.repeat(1, 1, 2, 1)}, TypeError, "q must be float32, float16 or bfloat16, got torch.int8"),
    ],
)
@pytest.mark.parametrize("op", [pd.speculative_attention, pd.speculative_attention_append_])
def test_errors(op: object, changes: dict[str, Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"pdkernels.speculative_attention[a-z_]*: .*{words}"):
        op(*arguments(**changes))


@pytest.mark.slow
def test_opcheck() -> None:
    inputs = make(5, (37, 0, 150), 16, dtype=torch.float32)
    torch.library.opcheck(OP, raw(inputs, masks.causal(5), "cpu"))
    torch.library.opcheck(APPEND, raw(inputs, masks.causal(5), "cpu"), {"counts": torch.zeros(3, dtype=torch.int64)})


def test_a_compiled_graph_has_the_bits_of_the_op() -> None:
    inputs, plan = make(5, (37, 0, 150), dtype=torch.bfloat16), causal(5).plan(16, 16)

    def step(q: Tensor, k: Tensor, v: Tensor, *caches: Tensor) -> Tensor:
        return pd.speculative_attention(q, pd.kv_quantize(k), pd.kv_quantize(v), *caches, plan)

    numbers = make_inputs(5, [37, 0, 150], dtype=torch.bfloat16)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*numbers[:3], *inputs[3:6]), step(*numbers[:3], *inputs[3:6]))


@requires_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(
    ("tail", "dtype", "head_dim", "page_size"),
    [
        ("quadratic", torch.float16, 16, 0),
        ("tree", torch.float32, 24, 16),
        ("candidates", torch.float16, 40, 5),
        ("one token", torch.float32, 64, 0),
        ("rows that see the prefix alone", torch.float16, 96, 16),
    ],
)
def test_triton(tail: str, dtype: torch.dtype, head_dim: int, page_size: int) -> None:
    mask = TAILS[tail][-40:, -40:]
    inputs = make(mask.q_len, (37, 0, 270), page_size, slots=300, head_dim=head_dim, dtype=dtype)
    found = run("triton", inputs, mask.plan(32, 32))
    dense = mask.dense()
    exact, same = (
        reference(q, *inputs[1:6], dense, block_table=inputs.block_table) for q in (inputs.q.double(), inputs.q)
    )
    if dtype == torch.float16:  # values are rounded to the dtype of q, as those of a cache of numbers are
        numbers = (kv_dequantize(x).half() for x in inputs[1:5])
        same = reference(inputs.q, *numbers, inputs.lengths, dense, block_table=inputs.block_table)
    for name, *tensors in zip(Results._fields, found, exact, same):
        assert_within_budget(*tensors, name=name)


@requires_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_triton_stores_rows() -> None:
    inputs = make(7, (37, 0, 50), slots=64, head_dim=16, dtype=torch.float16)
    rows = make_rows(inputs, "both")
    results, *caches = run_append("triton", inputs, causal(7).plan(16, 16), rows)
    assert all(torch.equal(a, b) for a, b in zip(results, run("triton", inputs, causal(7).plan(16, 16))))
    assert_stored(caches, inputs, rows)
