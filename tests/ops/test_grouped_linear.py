"""grouped_linear: the bits that linear and quantized_linear give a row with the matrix of its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdkernels as pd
from pdkernels.reference import grouped_linear as reference
from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import dot_dtypes, interpreted, requires_triton, triton_device
from tests.ops.implementations import LEVELS
from tests.ops.test_linear import DTYPES
from tests.ops.test_linear import FLOATS as KINDS
from tests.ops.test_quantized_linear import ALL_LEVELS, LAYOUTS, WIDTHS, same_bits
from tests.ops.test_quantized_linear import weight as packed_matrix

Product = Callable[[Tensor, Any, Tensor | None], Tensor]
# How many rows each of the groups has.
COUNTS = ([3], [0, 4, 0, 0, 1, 2], [9, 0, 20, 1], [0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 40])


def ends_of(counts: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(dtype)


def inputs(
    counts: Sequence[int], outputs: int, width: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(sum(counts) * 101 + outputs + width)
    shapes = (sum(counts), width), (len(counts), outputs, width), (len(counts), outputs)
    x, weight, bias = (torch.randn(shape, generator=draw) for shape in shapes)
    return x.to(dtypes[0]), weight.to(dtypes[1]), bias.to(dtypes[0])


def by_loop(product: Product, x: Tensor, weight: Any, counts: Sequence[int], bias: Tensor | None) -> Tensor:
    """What users write otherwise."""
    parts = x.split(list(counts))
    return torch.cat([product(rows, weight[g], None if bias is None else bias[g]) for g, rows in enumerate(parts)])


def packed(name: str, groups: int, outputs: int, width: int) -> pd.QuantizedWeight:
    return pd.QuantizedWeight.stack([packed_matrix(name, outputs, width, seed) for seed in range(groups)])


@pytest.mark.parametrize("level_ops", [*LEVELS, "avx512_bf16"], indirect=True)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_level_has_the_bits_of_linear(level_ops: Any, counts: list[int]) -> None:
    for outputs, width in ((1, 1), (37, 33), (200, 96), (26, 2100)):
        for dtypes in DTYPES:
            x, weight, bias = inputs(counts, outputs, width, dtypes)
            for added in (bias, None):
                expected = by_loop(level_ops.linear, x, weight, counts, added)
                assert torch.equal(level_ops.grouped_linear(x, weight, ends_of(counts), added), expected)


@pytest.mark.covering
@pytest.mark.parametrize("level_ops", ALL_LEVELS, indirect=True)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_level_has_the_bits_of_the_formula(level_ops: Any, name: str) -> None:
    for counts, width in zip(([0, 4, 0, 9, 1], [2, 0, 17]), WIDTHS[name][-2:]):
        x, _, bias = inputs(counts, 37, width, (torch.float32, torch.float32))
        w = packed(name, len(counts), 37, width)
        for dtype in KINDS:
            arguments = x.to(dtype), w.data, w.layouts, w.outputs, ends_of(counts, torch.int32), bias.to(dtype)
            found = level_ops.quantized_grouped_linear(*arguments)
            assert same_bits(found, reference.quantized_grouped_linear(*arguments))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bits_of_quantized_linear(name: str) -> None:
    width = WIDTHS[name][0]
    counts = [5, 0, 1, 13]
    x, _, bias = inputs(counts, 40, width, (torch.bfloat16, torch.bfloat16))
    w = packed(name, 4, 40, width)
    for added in (bias, None):
        expected = by_loop(pd.quantized_linear, x, w, counts, added)
        assert same_bits(pd.grouped_linear(x, w, ends_of(counts), added), expected)


@given(data=st.data())
@settings(max_examples=60)
def test_a_row_has_the_same_bits_in_any_batch(data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 9))
    counts = data.draw(st.lists(st.integers(0, 12), min_size=groups, max_size=groups))
    outputs, width = data.draw(st.integers(1, 300)), data.draw(st.sampled_from([32, 96, 576]))
    dtypes = data.draw(st.sampled_from(DTYPES))
    x, weight, bias = inputs(counts, outputs, width, dtypes)
    w = packed(data.draw(st.sampled_from(["Q4_0", "Q8_0", "int8", "int4 of 64"])), groups, outputs, width)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.integers(1, 4)))
        found = pd.grouped_linear(x, weight, ends_of(counts), bias)
        quantised = pd.grouped_linear(x, w, ends_of(counts), bias)
    finally:
        torch.set_num_threads(threads)
    for row, group in enumerate(torch.arange(groups).repeat_interleave(torch.tensor(counts)).tolist()):
        assert torch.equal(found[row], pd.linear(x[row], weight[group], bias[group]))
        assert torch.equal(quantised[row], pd.linear(x[row], w[group], bias[group]))


def test_within_the_error_budget() -> None:
    counts = [4, 0, 30]
    for dtypes in DTYPES:
        x, weight, bias = inputs(counts, 40, 500, dtypes)
        exact = reference.grouped_linear(x.double(), weight.double(), ends_of(counts), bias.double())
        plain = reference.grouped_linear(x, weight, ends_of(counts), bias)
        assert_within_budget(pd.grouped_linear(x, weight, ends_of(counts), bias), exact, plain, name="grouped_linear")


def test_matrices_of_several_formats_are_one() -> None:
    counts = [3, 0, 6]
    parts = [packed("Q4_K", 3, 24, 256), packed("Q6_K", 3, 7, 256), packed("Q8_0", 3, 20, 256)]
    x, _, bias = inputs(counts, 51, 256, (torch.float32, torch.float32))
    joined = pd.QuantizedWeight.join(parts)
    assert joined.shape == (3, 51, 256)
    apart = torch.cat([pd.grouped_linear(x, part, ends_of(counts)) for part in parts], 1)
    assert same_bits(pd.grouped_linear(x, joined, ends_of(counts)), apart)
    biased = apart + bias.repeat_interleave(torch.tensor(counts), 0)
    for backend in ("auto", "reference"):
        assert same_bits(pd.grouped_linear(x, joined, ends_of(counts), bias, backend=backend), biased)


def test_any_layout() -> None:
    counts = [5, 0, 4]
    x, weight, bias = inputs(counts, 40, 64, (torch.float32, torch.float32))
    expected = pd.grouped_linear(x, weight, ends_of(counts), bias)
    wide_x, wide = torch.full((9, 100), float("nan")), torch.full((3, 40, 90), float("nan"))
    wide_x[:, 3:67], wide[..., 5:69] = x, weight
    ends = torch.stack((ends_of(counts), torch.zeros(3, dtype=torch.int64)), 1)[:, 0]
    assert torch.equal(pd.grouped_linear(wide_x[:, 3:67], wide[..., 5:69], ends, bias.T.contiguous().T), expected)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(pd.grouped_linear(x.T.contiguous().T, turned, ends, bias), expected)
    one = weight[:1].expand(3, 40, 64)
    assert torch.equal(pd.grouped_linear(x, one, ends), pd.linear(x, weight[0]))


@requires_triton
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_triton_has_the_bits_of_its_linear(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU for any two tilings. The interpreter multiplies with BLAS, which rounds by the number of outputs in a tile."""
    from pdkernels.triton import linear
    from pdkernels.triton.grouped_linear import HALF
    from pdkernels.triton.grouped_linear import forward as grouped
    from pdkernels.triton.linear import forward

    if interpreted():
        monkeypatch.setitem(linear.TABLE, "16-bit", HALF)
    device = triton_device()
    for dtypes in ((torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float16)):
        x, weight, bias = (t.to(device) for t in inputs(counts, 50, 70, dtypes))
        for added in (bias, None):
            expected = by_loop(forward, x, weight, counts, added)
            assert torch.equal(grouped(x, weight, ends_of(counts, torch.int32).to(device), added), expected)


@requires_triton
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("Q4_0", "Q6_K") else pytest.mark.slow) for name in LAYOUTS]
)
def test_triton_has_the_bits_of_the_formula(name: str) -> None:
    """The smallest tiling and the largest."""
    from pdkernels.triton.grouped_linear import quantized_forward as grouped

    device = triton_device()
    for counts, dtype in (([0, 4, 3], torch.float32), ([35, 6], dot_dtypes()[0])):
        width, outputs = WIDTHS[name][0], 21
        x, _, bias = inputs(counts, outputs, width, (torch.float32, torch.float32))
        w = packed(name, len(counts), outputs, width)
        arguments = x.to(dtype), w.data, w.layouts, w.outputs, ends_of(counts), bias.to(dtype)
        moved = [[data.to(device) for data in w.data], w.layouts, w.outputs]
        ends = ends_of(counts, torch.int32).to(device)
        found = grouped(arguments[0].to(device), *moved, ends, arguments[5].to(device))
        assert same_bits(found.cpu(), reference.quantized_grouped_linear(*arguments))


@requires_triton
def test_triton_on_nothing() -> None:
    from pdkernels.triton.grouped_linear import forward, quantized_forward

    device = triton_device()
    ends = torch.tensor([0, 2], device=device)
    for rows, groups, outputs, width in ((0, 2, 3, 32), (2, 2, 0, 32), (2, 2, 3, 0), (0, 0, 3, 32)):
        x, bias = torch.ones(rows, width, device=device), torch.arange(groups * outputs, device=device).float()
        bias, own = bias.view(groups, outputs), ends[:groups] * (rows > 0)
        weight = torch.zeros(groups, outputs, width, device=device)
        expected = bias[1].expand(rows, outputs) if groups else bias.new_empty(0, outputs)
        assert torch.equal(forward(x, weight, own, bias), expected)
        if groups:
            w = packed("Q8_0", groups, outputs, width).to(device)
            given = w.data, w.layouts, w.outputs, own
            if rows == 0 or outputs == 0 or width == 0:
                assert torch.equal(quantized_forward(x, *given, bias), expected)


@requires_triton
@pytest.mark.parametrize("ends", [[5, 2, 9], [-3, 4, 9], [0, 4, 20], [4, 4, 6], [9, -1, 30]])
def test_triton_stays_inside_with_ends_that_are_wrong(ends: list[int]) -> None:
    """A GPU does not check them."""
    from pdkernels.triton import grouped_linear

    device = triton_device()
    x, weight, _ = (t.to(device) for t in inputs([9, 0, 0], 20, 40, (torch.float32, torch.float32)))
    out = torch.full((9 + 64, 20), 7.0, device=device)
    tiles = grouped_linear.row_tiles_of(9, 3, 16)
    grouped_linear._grouped_linear[(tiles,)](
        x, weight, torch.tensor(ends, device=device), None, out[32:41], 9, 3, 20, 40, tiles, 40, 40, 800,
        ROWS=16, OUTPUTS=32, DEPTH=64, GROUPS=4,
    )  # fmt: skip
    assert (out[:32] == 7).all() and (out[41:] == 7).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "ends, text",
    [
        ([1, 0, 3], "ends must ascend from 0 to the number of rows (3), got 0 after 1 for group 1."),
        ([-1, 0, 3], "ends must ascend from 0 to the number of rows (3), got -1 after 0 for group 0."),
        ([0, 1, 4], "ends must ascend from 0 to the number of rows (3), got 4 after 1 for group 2."),
        ([1, 2, 2], "ends must ascend to the number of rows (3), got 2 for the last group."),
    ],
)
def test_wrong_ends(backend: Any, ends: list[int], text: str) -> None:
    for op, weight in (
        ("grouped_linear", torch.ones(3, 2, 32)),
        ("quantized_grouped_linear", pd.quantize(torch.ones(3, 2, 32))),
    ):
        with pytest.raises(ValueError) as caught:
            pd.grouped_linear(torch.ones(3, 32), weight, torch.tensor(ends), backend=backend)
        assert f"pdkernels.{op}: {text}" in str(caught.value)


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weight": torch.zeros(3, 5)}, ValueError, "grouped_linear: weight must have shape (groups, outputs, 4), got (3, 5)."),
    ({"weight": torch.zeros(2, 3, 5)}, ValueError, "grouped_linear: weight must have shape (groups, outputs, 4)"),
    ({"x": torch.zeros(2, 2, 4)}, ValueError, "grouped_linear: x must have shape (rows, width), got (2, 2, 4)."),
    ({"x": torch.zeros(2, 4).half()}, TypeError, "grouped_linear: weight must have dtype torch.float16 like x"),
    ({"ends": torch.zeros(3).long()}, ValueError, "grouped_linear: ends must have shape (2), got (3,)."),
    ({"ends": torch.zeros(2)}, TypeError, "grouped_linear: ends must be an int32 or int64 tensor, got torch.float32."),
    ({"bias": torch.zeros(3)}, ValueError, "grouped_linear: bias must have shape (2, 3), got (3,)."),
    ({"weight": pd.quantize(torch.ones(3, 32))}, ValueError, "weight must have shape (groups, outputs, width), got (3, 32)."),
    ({"weight": pd.quantize(torch.ones(2, 3, 64))}, ValueError, "for rows of width 4"),
    ({"weight": pd.quantize(torch.ones(3, 3, 4))}, ValueError, "weights[0] must have shape"),
]  # fmt: skip


@pytest.mark.parametrize("wrong, error, text", ERRORS)
def test_errors(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {
        "x": torch.zeros(2, 4),
        "weight": torch.zeros(2, 3, 4),
        "ends": torch.tensor([1, 2]),
        "bias": torch.zeros(2, 3),
    } | wrong
    with pytest.raises(error) as caught:
        pd.grouped_linear(**arguments)
    assert text in str(caught.value)


def test_several_matrices_are_not_one() -> None:
    experts = pd.quantize(torch.ones(1, 3, 32))
    for run in (
        lambda: pd.linear(torch.ones(2, 32), experts),
        lambda: pd.quantized_embedding(torch.tensor([0]), experts),
        lambda: pd.linear_token_statistics(torch.ones(2, 32), experts),
    ):
        with pytest.raises(ValueError, match=r"weight must have shape .*, got \(1, 3, 32\)"):
            run()


def test_stacked_matrices() -> None:
    values = torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(0))
    w = pd.quantize(values, "q4_0")
    assert w.shape == (3, 20, 64) and len(w) == 3 and w.matrices == 3
    for i, matrix in enumerate(values):
        alone = pd.quantize(matrix, "q4_0")
        assert torch.equal(w[i].part0, alone.part0)
        assert torch.equal(w.dequantize()[i], alone.dequantize())
    assert torch.equal(w[-1].part0, w[2].part0)
    with pytest.raises(IndexError, match=r"matrix must be in \[-3, 3\), got 3"):
        w[3]
    with pytest.raises(TypeError, match="matrix must be an int, got slice"):
        w[:2]
    with pytest.raises(ValueError, match=r"weights\[1\] must have the format and shape of weights\[0\]"):
        pd.QuantizedWeight.stack([w[0], pd.quantize(values[0], "q8_0")])
    with pytest.raises(ValueError, match=r"weights\[1\] must hold 3 matrices like weights\[0\], got None"):
        pd.QuantizedWeight.join([w, w[0]])
    holder = torch.nn.ModuleDict({"w": pd.quantize(torch.zeros(3, 20, 64), "q4_0")})
    holder.load_state_dict(torch.nn.ModuleDict({"w": w}).state_dict())
    assert torch.equal(holder["w"].part0, w.part0)
