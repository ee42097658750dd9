"""Products of packed matrices with rows that stay numbers: the bits of the formula on the CPU, the bound of its sums on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdkernels as pd
from pdkernels.ops.grouped_linear import _quantized_triton as grouped_triton
from pdkernels.ops.library import OPS
from pdkernels.ops.quantized_linear import _triton as triton
from tests.harness.triton_interpreter import requires_triton, triton_device
from tests.ops.implementations import Public, Simulated, implementation
from tests.ops.test_quantized_linear import (
    ALL_LEVELS,
    DTYPES,
    LAYOUTS,
    WIDTHS,
    check_batches,
    matrix,
    numbers,
    rows,
    same_bits,
    weight,
)

OF_EACH_KIND = ("Q4_0", "Q5_1", "Q4_K", "Q6_K", "zeros of 8 bits, float16", "zeros of 4 bits, float32")
WIDE = {name: 2048 if layout.scales.startswith("super") else 1880 for name, layout in LAYOUTS.items()}
"""A width with blocks for all eight warps of CUDA, the last of whole blocks or not."""


def numbered(name: str, outputs: int, width: int, seed: int = 0) -> pd.QuantizedWeight:
    return weight(name, outputs, width, seed).with_rows("numbers")


def check_sums(found: Tensor, x: Tensor, w: pd.QuantizedWeight, bias: Tensor | None) -> None:
    """Within what float32 sums of these terms, in whatever order, may lose; 16 bits then round once."""
    values = numbers(w).double()
    exact, terms = x.double() @ values.T, x.double().abs() @ largest(w).T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    steps = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[x.dtype]
    error = (found.double() - exact).abs()
    assert (error <= 6 * 2.0**-24 * terms + steps * exact.abs() + 2.0**-24).all()


def largest(w: pd.QuantizedWeight) -> Tensor:
    """The magnitudes that are added up for an element of the matrix: of its code and of its minimum."""
    (part,) = w.parts()
    made = part.unpacked(w.width)
    whole = {name: field.float().abs() for name, field in made.fields.items()}
    minimum = whole.get("minimum", torch.zeros(1)).amax() * (whole["multiples"].amax() if "multiples" in whole else 1)
    return numbers(w).double().abs() + 2 * minimum.double()


def test_it_is_said_by_the_layout() -> None:
    w = weight("Q4_0", 20, 64)
    other = w.with_rows("numbers")
    assert (w.rows, other.rows, other.with_rows("int8").layouts) == ("int8", "numbers", w.layouts)
    assert other.layouts != w.layouts and other.data[0].data_ptr() == w.data[0].data_ptr()
    assert torch.equal(other.dequantize(), w.dequantize())
    both = pd.QuantizedWeight.join([w, other])
    assert both.rows == "int8, numbers" and both[20:].rows == "numbers"
    assert pd.QuantizedWeight.stack([other, other]).rows == "numbers"
    x = rows(3, 64)
    alone = torch.cat([pd.quantized_linear(x, w), pd.quantized_linear(x, other)], 1)
    assert torch.equal(pd.quantized_linear(x, both), alone)
    assert not torch.equal(alone[:, :20], alone[:, 20:])
    with pytest.raises(ValueError, match="rows must be one of int8, numbers, got 'int4'"):
        w.with_rows("int4")


@pytest.mark.parametrize("level_ops", ALL_LEVELS, indirect=True)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_level_has_the_bits_of_the_formula(level_ops: Any, name: str) -> None:
    for width in WIDTHS[name]:
        check_bits(level_ops, name, width, (1, 2, 3, 5, 7, 67))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_processor_has_the_bits_of_the_formula(name: str) -> None:
    width = WIDTHS[name][-1] if name in ("Q4_K", "Q5_K", "Q6_K") or LAYOUTS[name].group_blocks == 1 else 70
    check_bits(torch.ops.pdkernels, name, width, (1, 6, 67))


def check_bits(ops: Any, name: str, width: int, counts: tuple[int, ...]) -> None:
    w = numbered(name, 37, width)
    for count in counts:
        x, bias = rows(count, width) / 64, rows(1, 37)[0]  # as float16 has the products of any scales
        x[count // 2, 5] = float("inf")
        for dtype in DTYPES:
            arguments = x.to(dtype), w.data, w.layouts, w.outputs, bias.to(dtype)
            found, expected = ops.quantized_linear(*arguments), OPS["quantized_linear"].reference(*arguments)
            assert same_bits(found, expected)
            others = [row for row in range(count) if row != count // 2]
            assert not found[count // 2].isfinite().any() and found[others].isfinite().all()
            check_sums(found[others], x.to(dtype)[others], w, bias.to(dtype))


@given(data=st.data())
@settings(max_examples=40)
def test_a_row_has_the_same_bits_in_any_batch(data: st.DataObject) -> None:
    check_batches(data, "numbers", [9, 130])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OF_EACH_KIND else pytest.mark.slow) for name in LAYOUTS]
)
def test_cuda_has_the_sums_of_the_formula(device_impl: Public | Simulated, name: str) -> None:
    """Each tiling and dtype; widths that end within a chunk, within a block, and before most warps have one."""
    device, bias = device_impl.device, rows(1, 37)[0]
    short = 256 if name.endswith("K") else 70 if LAYOUTS[name].scales.endswith("zero") else 96
    for width, dtypes in ((WIDE[name], DTYPES if name == "Q4_0" else DTYPES[2:]), (short, DTYPES)):
        w, x = numbered(name, 37, width), rows(41, width) / 64
        x[3, 9] = float("inf")
        others = [row for row in range(41) if row != 3]
        for dtype in dtypes:
            typed, added = x.to(device, dtype), bias.to(device, dtype)
            found = device_impl.quantized_linear(typed, w.to(device), added).cpu()
            check_sums(found[others], typed.cpu()[others], w, added.cpu())
            assert not found[3].isfinite().any()
            for first, last in ((0, 1), (7, 15), (20, 33)):
                few = device_impl.quantized_linear(typed[first:last], w.to(device), added).cpu()
                assert same_bits(few, found[first:last])


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q6_K"])
def test_cuda_rounds_a_row_alike_in_any_batch(device_impl: Public | Simulated, name: str) -> None:
    """Halves of the width that cancel each other leave nothing but the rounding of sums, whose order the bits show."""
    made = matrix(LAYOUTS[name], 37, 1536)
    for whole in (made.codes, *made.fields.values()):
        whole[:, whole.shape[1] // 2 :] = whole[:, : whole.shape[1] // 2]
    w = pd.QuantizedWeight.pack(name, LAYOUTS[name], made, 1536).with_rows("numbers").to(device_impl.device)
    half = rows(41, 768)
    x = torch.cat((half, -half), 1).to(device_impl.device, torch.bfloat16)
    found = device_impl.quantized_linear(x, w)
    assert found.abs().max() > 0
    for first, last in ((0, 1), (7, 15), (20, 33)):
        assert torch.equal(device_impl.quantized_linear(x[first:last], w), found[first:last])


def test_cuda_takes_float32_whole(device_impl: Public | Simulated) -> None:
    """A single column, whose codes are one: nothing is rounded before the scale."""
    made = matrix(LAYOUTS["Q4_0"], 37, 64)
    made.codes[:] = 9
    w, x = pd.QuantizedWeight.pack("Q4_0", LAYOUTS["Q4_0"], made, 64).with_rows("numbers"), torch.zeros(9, 64)
    x[:, 7] = 1 + torch.arange(9) * 2.0**-23
    found = device_impl.quantized_linear(x.to(device_impl.device), w.to(device_impl.device)).cpu()
    assert torch.equal(found, pd.quantized_linear(x, w, backend="reference"))


def test_cuda_with_many_outputs(device_impl: Public | Simulated) -> None:
    """Tilings of their own: two tiles for a block of threads, the last without a second one; with rows in 8 bits a tile for each warp."""
    w, x = numbered("Q4_0", 16 * 528 + 5, 64), rows(2, 64)
    typed = x.to(device_impl.device, torch.bfloat16)
    check_sums(device_impl.quantized_linear(typed, w.to(device_impl.device)).cpu(), x.bfloat16(), w, None)
    w = weight("Q4_1", 16 * 1584 + 21, 320)
    x = rows(3, 320)
    found = device_impl.quantized_linear(x.to(device_impl.device), w.to(device_impl.device)).cpu()
    assert same_bits(found, pd.quantized_linear(x, w))


def test_cuda_on_parts_and_strided_rows(device_impl: Public | Simulated) -> None:
    """Rows that cannot be read in eights of bytes, and parts with rows in 8 bits beside those with numbers."""
    parts = [numbered("Q4_K", 24, 256), weight("Q8_0", 21, 256), numbered("Q6_K", 0, 256), numbered("Q4_0", 16, 256)]
    joined, device = pd.QuantizedWeight.join(parts), device_impl.device
    wide, bias = (rows(9, 601) / 64).to(torch.float16), rows(1, 61)[0].to(torch.float16)
    for x in (wide[:, 101:357], wide[:, 100:356], wide[:, :256].T.contiguous().T, wide[:, 100:356].clone()):
        moved = x.to(device)
        found = device_impl.quantized_linear(moved, joined.to(device), bias.to(device)).cpu()
        for (part, first), last in zip(((parts[0], 0), (parts[3], 45)), (24, 61)):
            check_sums(found[:, first:last], x, part, bias[first:last])
        expected = pd.quantized_linear(x, parts[1], bias[24:45], backend="reference")
        assert same_bits(found[:, 24:45], expected)


@pytest.mark.parametrize("rows_, outputs, width", [(0, 3, 32), (2, 0, 32), (2, 3, 0)])
def test_nothing(device_impl: Public | Simulated, rows_: int, outputs: int, width: int) -> None:
    w, x = numbered("Q8_0", outputs, width), torch.zeros(rows_, width)
    expected = torch.ones(rows_, outputs)
    for backend in ("auto", "reference"):
        assert torch.equal(pd.quantized_linear(x, w, torch.ones(outputs), backend=backend), expected)
    device = device_impl.device
    found = device_impl.quantized_linear(x.to(device), w.to(device), torch.ones(outputs, device=device))
    assert torch.equal(found.cpu(), expected)


def test_cuda_in_any_order_of_threads() -> None:
    impl = implementation("cudasim")
    w, x = numbered("Q4_1", 37, 2144), rows(11, 2144).to(torch.bfloat16)
    expected = impl.quantized_linear(x, w)
    for schedule in impl.schedules():
        with schedule:
            assert torch.equal(impl.quantized_linear(x, w), expected)


def test_experts() -> None:
    made = [matrix(LAYOUTS["Q4_0"], 20, 64, seed) for seed in range(3)]
    experts = pd.QuantizedWeight.stack(
        [pd.QuantizedWeight.pack("Q4_0", LAYOUTS["Q4_0"], own, 64).with_rows("numbers") for own in made]
    )
    x, ends, bias = rows(9, 64), torch.tensor([2, 2, 9]), rows(3, 20)
    found = pd.quantized_grouped_linear(x, experts, ends, bias)
    assert torch.equal(found, pd.quantized_grouped_linear(x, experts, ends, bias, backend="reference"))
    assert torch.equal(found[2:], pd.quantized_linear(x[2:], experts[2], bias[2]))


def test_triton_refuses_by_name() -> None:
    w, x = numbered("Q4_0", 20, 64), rows(2, 64)
    packed = w.data, w.layouts, w.outputs
    with pytest.raises(NotImplementedError, match="quantized_linear: Triton has no product of rows that stay numbers"):
        triton(x, *packed)
    with pytest.raises(NotImplementedError, match="quantized_grouped_linear: Triton has no product of rows"):
        grouped_triton(x, *packed, torch.tensor([2]))


@requires_triton
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_triton_takes_rows_of_the_matrix(name: str) -> None:
    """An embedding on CUDA is Triton's, in all builds."""
    from pdkernels.triton.quantized_linear import rows_of

    w, device, ids = numbered(name, 40, 512), triton_device(), torch.tensor([39, 0, 7])
    found = rows_of(ids.to(device), [x.to(device) for x in w.data], w.layouts, w.outputs, w.width, torch.float32)
    assert torch.equal(found.cpu(), w.dequantize()[ids])


def test_names_of_one_matrix_and_what_is_no_model() -> None:
    both, shared = torch.nn.Module(), pd.quantize(torch.randn(32, 32), "q8_0")
    both.first, both.second = shared, shared
    pd.models.packed_rows_(both, "numbers")
    assert both.first is both.second and both.first.rows == "numbers" and shared.rows == "int8"
    head = torch.nn.Module()
    head.matrix = shared
    both.drafters = {"eagle": head}
    pd.models.packed_rows_(both, "numbers")
    assert head.matrix.rows == "numbers"
    with pytest.raises(TypeError, match="model must be a module, got object"):
        pd.models.packed_rows_(object(), "numbers")  # type: ignore[type-var]
    for rows_, options in (("int4", {}), ("numbers", {"packed": False}), ("numbers", {"adapter": "x"})):
        with pytest.raises((ValueError, NotImplementedError), match="packed_rows"):
            pd.models.load("tiny-code", packed_rows=rows_, **options)


def test_codes_of_zero_that_no_code_can_reach() -> None:
    codes, scales = torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1)
    zeros = torch.tensor([[16], [17]], dtype=torch.uint8)
    assert pd.QuantizedWeight.from_integers("int4", codes, scales, zeros[:1].expand(2, 1), 4, 32).shape == (2, 32)
    with pytest.raises(ValueError, match="zeros must be at most 16 for 4 bits, got 17"):
        pd.QuantizedWeight.from_integers("int4", codes, scales, zeros, 4, 32)


def test_a_model_says_it_of_all_its_matrices() -> None:
    """Whole steps and layers alike; the logits are those of a model of the numbers, up to rounding."""
    exact = pd.models.load("tiny-code")
    assert isinstance(exact, pd.models.Transformer)
    packed = pd.quantize(exact, "q8_0")
    tokens = torch.tensor([[5, 9, 2, 40]])
    with torch.inference_mode():
        for path, module in packed.named_modules():
            if isinstance(module, pd.QuantizedWeight):
                exact.get_parameter(path).copy_(module.dequantize())
        before, expected = packed(tokens), exact(tokens)
        assert pd.models.packed_rows_(packed, "numbers") is packed
        assert {w.rows for w in packed.modules() if isinstance(w, pd.QuantizedWeight)} == {"numbers"}
        after, cache = packed(tokens), packed.new_cache(batch=1, capacity=8)
        together, alone = packed(tokens, cache=packed.new_cache(batch=1, capacity=8)), []
        for token in tokens[0]:
            alone.append(packed(token.view(1, 1), cache=cache))
            cache.commit_(torch.ones(1, dtype=torch.int64))
    assert torch.equal(together, torch.cat(alone, 1))
    assert (together - expected).norm() < 1e-5 * expected.norm()
    assert (after - expected).norm() < 1e-5 * expected.norm() < (before - expected).norm()
    with pytest.raises(ValueError, match="model must have packed matrices, got none"):
        pd.models.packed_rows_(pd.models.load("tiny-code"), "numbers")
