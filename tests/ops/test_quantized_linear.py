"""quantized_linear and quantized_embedding: bit for bit as the formula says, at every level; GGUF's codes as its own package reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdkernels as pd
from pdkernels import _host, _quantized_formats
from pdkernels.ops import library as _library
from pdkernels.reference import gguf_blocks
from pdkernels.reference import quantized_linear as reference
from pdkernels.reference.quantized_linear import Layout, Quantized
from tests.harness.triton_interpreter import dot_dtypes, requires_triton, triton_device
from tests.ops.implementations import LEVELS, Public, Simulated, implementation

gguf = pytest.importorskip("gguf")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALL_LEVELS = [*LEVELS, "avx2_vnni", "avx512_vnni"]
LAYOUTS = {
    **gguf_blocks.LAYOUTS,
    "int8": Layout("float", 8, 0),
    "int4": Layout("float", 4, 1),
    "int4 of 64": Layout("float", 4, 2),
    "zeros, float16": Layout("half_zero", 4, 4),
    "zeros, float32": Layout("float_zero", 8, 4),
    "zeros of 8 bits, float16": Layout("half_zero", 8, 2),
    "zeros of 4 bits, float32": Layout("float_zero", 4, 0),
}
WIDTHS = {name: [256, 768] if layout.scales.startswith("super") else [32, 96, 576] for name, layout in LAYOUTS.items()}


def matrix(layout: Layout, outputs: int, width: int, seed: int = 0) -> Quantized:
    """Any codes, and scales of both signs."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**layout.bits, (outputs, layout.blocks(width) * 32), generator=draw, dtype=torch.uint8)
    fields = {}
    for name, dtype, count in layout.header():
        shape = (outputs, layout.groups(width), count)
        if dtype == torch.uint8:
            most = 2**layout.bits if name == "zero" else 256
            fields[name] = torch.randint(0, most, shape, generator=draw, dtype=dtype)
        else:
            fields[name] = torch.randn(shape, generator=draw).to(dtype)
    return Quantized(codes, fields)


def weight(name: str, outputs: int, width: int, seed: int = 0) -> pd.QuantizedWeight:
    return pd.QuantizedWeight.pack(name, LAYOUTS[name], matrix(LAYOUTS[name], outputs, width, seed), width)


def numbers(w: pd.QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix as the reference has it."""
    parts = zip(w.layouts, w.data, w.outputs)
    return torch.cat(
        [reference.dequantize(Layout.of(layout), data, count, w.width) for layout, data, count in parts]
    ).to(dtype)


def rows(count: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN where the other is."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_round_trip(name: str) -> None:
    for width in WIDTHS[name]:
        made = matrix(LAYOUTS[name], 37, width)
        data = reference.pack(LAYOUTS[name], made)
        back = reference.unpack(LAYOUTS[name], data, 37, width)
        assert data.shape == (LAYOUTS[name].nbytes(37, width),)
        assert torch.equal(back.codes, made.codes) and back.fields.keys() == made.fields.keys()
        assert all(torch.equal(back.fields[field], made.fields[field]) for field in made.fields)


def test_the_tables_are_those_of_the_reference() -> None:
    assert tuple(_quantized_formats.FIELDS) == reference.SCALES
    for name, scales, bits, group_bytes in _host.QUANTIZED_FORMATS:
        layout = gguf_blocks.LAYOUTS[name]
        assert layout == Layout(scales, bits, _quantized_formats.GGUF_LAYOUTS[name].group_blocks)
        kind = gguf.GGMLQuantizationType[name]
        assert gguf.GGML_QUANT_SIZES[kind] == (32 * layout.group_blocks, group_bytes)
    assert [*_quantized_formats.GGUF_LAYOUTS] == [*gguf_blocks.LAYOUTS]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("outputs", [0, 1, 16, 37])
def test_packing_writes_the_bytes_of_the_reference(name: str, outputs: int) -> None:
    layout = _quantized_formats.Layout.of(LAYOUTS[name].number)
    assert (layout.number, layout.zero) == (LAYOUTS[name].number, LAYOUTS[name].zero)
    assert [tuple(field) for field in _quantized_formats.FIELDS[layout.scales]] == LAYOUTS[name].header()
    for width in (0, *WIDTHS[name]):
        made = matrix(LAYOUTS[name], outputs, width)
        packed = _quantized_formats.pack(layout, made)
        assert torch.equal(packed, reference.pack(LAYOUTS[name], made))
        assert len(packed) == layout.nbytes(outputs, width) == LAYOUTS[name].nbytes(outputs, width)
        back = _quantized_formats.unpack(layout, packed, outputs, width)
        assert torch.equal(back.codes, made.codes) and back.fields.keys() == made.fields.keys()
        assert all(torch.equal(back.fields[field], made.fields[field]) for field in made.fields)
        weight = pd.QuantizedWeight.pack(name, layout, made, width)
        for dtype in (*DTYPES, torch.float64):
            assert same_bits(weight.dequantize(dtype), numbers(weight, dtype))


def test_packing_refuses_what_does_not_fit() -> None:
    data, number = bytearray(16 * 34 + 32), Layout("half", 8, 1).number
    with pytest.raises(ValueError, match="sizes must fit"):
        _host.pack_quantized(number, bytes(31), [bytes(2)], 1, 32, data)
    with pytest.raises(ValueError, match="sizes must fit"):
        _host.pack_quantized(number, bytes(32), [bytes(4)], 1, 32, data)
    with pytest.raises(ValueError, match="fields must be"):
        _host.pack_quantized(number, bytes(32), [], 1, 32, data)
    with pytest.raises(ValueError, match="layout and the shape"):
        _host.pack_quantized(7, bytes(32), [bytes(2)], 1, 32, data)
    with pytest.raises(ValueError, match="layout and the shape"):
        _host.unpack_quantized(number, data, -1, 32, bytearray(32), [bytearray(2)])


@pytest.mark.parametrize("level_ops", ALL_LEVELS, indirect=True)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_level_has_the_bits_of_the_formula(level_ops: Any, name: str) -> None:
    for width in WIDTHS[name]:
        w = weight(name, 37, width)
        # Groups of rows of every size; many rows in pieces, or by the units that multiply matrices where there are some.
        for count in (1, 2, 3, 4, 5, 6, 7, 11, 21, 75):
            x, bias = rows(count, width), rows(1, 37)[0]
            for dtype in DTYPES:
                arguments = x.to(dtype), w.data, w.layouts, w.outputs, bias.to(dtype)
                assert same_bits(level_ops.quantized_linear(*arguments), reference.quantized_linear(*arguments))
        ids = torch.tensor([[0, 36, 5]])
        for dtype in DTYPES:
            found = level_ops.quantized_embedding(ids, w.data, w.layouts, w.outputs, width, dtype)
            assert same_bits(found, numbers(w, dtype)[ids])


@requires_triton
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("Q4_0", "Q4_K", "Q6_K", "int4 of 64") else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_triton_has_the_bits_of_the_formula(name: str) -> None:
    """Each tiling: up to 8 rows, up to 32, more; an odd number of blocks, and a width that is no whole number of blocks."""
    from pdkernels.triton.quantized_linear import forward, rows_of

    device = triton_device()
    widths = (256, 512, 256) if name in gguf_blocks.LAYOUTS and name.endswith("K") else (96, 64, 32)
    if name not in gguf_blocks.LAYOUTS:
        widths = (96, 70, 32)
    for width, count, dtypes in zip(widths, (7, 20, 40), (dot_dtypes(), DTYPES[:1], DTYPES[:1])):
        w, x, bias = weight(name, 37, width), rows(count, width), rows(1, 37)[0]
        x[0], x[1, 0] = 0, float("inf")
        for dtype in dtypes:
            arguments = x.to(dtype), w.data, w.layouts, w.outputs, bias.to(dtype)
            moved = [[data.to(device) for data in w.data], w.layouts, w.outputs]
            found = forward(arguments[0].to(device), *moved, arguments[4].to(device))
            assert same_bits(found.cpu(), reference.quantized_linear(*arguments))
            ids = torch.tensor([0, 36, 5], dtype=torch.int32)
            found = rows_of(ids.to(device), *moved, width, dtype)
            assert same_bits(found.cpu(), numbers(w, dtype)[ids])


@requires_triton
def test_triton_on_parts_and_strided_rows() -> None:
    from pdkernels.triton.quantized_linear import forward, rows_of

    device = triton_device()
    parts = [weight("Q4_K", 24, 256), weight("Q6_K", 0, 256), weight("Q6_K", 16, 256), weight("Q8_0", 21, 256)]
    joined = pd.QuantizedWeight.join(parts)
    wide, bias = rows(9, 600), rows(1, 2 * 61)[0, ::2]
    x = wide[:, 100:356]
    expected = pd.quantized_linear(x, joined, bias)
    joined = joined.to(device)
    given = joined.data, joined.layouts, joined.outputs
    assert same_bits(forward(wide.to(device)[:, 100:356], *given, bias.to(device)).cpu(), expected)
    turned = x.T.contiguous().T.to(device)
    assert same_bits(forward(turned, *given, bias.to(device)).cpu(), expected)
    ids = torch.tensor([60, 0, 23, 24, 39, 40], device=device)
    assert torch.equal(rows_of(ids, *given, 256, torch.float32), numbers(joined.cpu())[ids.cpu()].to(device))


@pytest.mark.parametrize("name", LAYOUTS)
def test_cuda_has_the_bits_of_the_formula(device_impl: Public | Simulated, name: str) -> None:
    """Each tiling: up to 8 rows, up to 16, more than its groups hold; widths that end within a chunk, and one longer than all chunks."""
    short, long = WIDTHS[name][0], 1280 if name.endswith("K") else 1072
    for count, width, dtypes in (
        (7, long, DTYPES),
        (1, short, DTYPES[:1]),
        (13, long, DTYPES[:1]),
        (41, 768, DTYPES[:1]),
    ):
        w, x, bias = weight(name, 37, width), rows(count, width), rows(1, 37)[0]
        x[0, :40], x[count // 2, 1] = 0, float("inf")
        for dtype in dtypes:
            found = device_impl.quantized_linear(
                x.to(device_impl.device, dtype), w.to(device_impl.device), bias.to(device_impl.device, dtype)
            )
            expected = pd.quantized_linear(x.to(dtype), w, bias.to(dtype), backend="reference")
            assert same_bits(found.cpu(), expected)


def test_every_kind_of_matrix_is_tried() -> None:
    from tests.harness.specialisations import MATRICES

    tried = {(layout.scales, layout.bits) for layout in LAYOUTS.values()}
    assert tried == {kind[:2] for kind in MATRICES} == set(_host.QUANTIZED_KINDS)


def test_debug_checks_leave_packed_matrices_alone() -> None:
    """Their stand-ins would be no matrices. Caches have some."""
    w = weight("Q8_0", 20, 32)
    packed = rows(2, 32), w.data, w.layouts, w.outputs, None
    assert not _library._has_stand_ins(_library.OPS["quantized_linear"], packed)
    cache = [torch.zeros(1, 4, 1, 8)]
    assert _library._has_stand_ins(_library.OPS["kv_append_"], (cache, cache))


def test_cuda_on_parts_and_strided_rows(device_impl: Public | Simulated) -> None:
    parts = [weight("Q4_K", 24, 256), weight("Q6_K", 0, 256), weight("Q6_K", 16, 256), weight("Q8_0", 21, 256)]
    joined, device = pd.QuantizedWeight.join(parts), device_impl.device
    wide, bias = rows(9, 600), rows(1, 2 * 61)[0, ::2]
    expected = pd.quantized_linear(wide[:, 100:356], joined, bias, backend="reference")
    joined = joined.to(device)
    x = wide.to(device)[:, 100:356]
    assert same_bits(device_impl.quantized_linear(x, joined, bias.to(device)).cpu(), expected)
    assert same_bits(device_impl.quantized_linear(x.T.contiguous().T, joined, bias.to(device)).cpu(), expected)
    alone = [device_impl.quantized_linear(x[i : i + 1], joined, bias.to(device)).cpu() for i in range(9)]
    assert same_bits(torch.cat(alone), expected)


@pytest.mark.parametrize("rows_, outputs, width", [(0, 3, 32), (2, 0, 32), (2, 3, 0)])
def test_cuda_on_nothing(device_impl: Public | Simulated, rows_: int, outputs: int, width: int) -> None:
    device = device_impl.device
    w = weight("Q8_0", outputs, width).to(device)
    x, bias = torch.zeros(rows_, width, device=device), torch.ones(outputs, device=device)
    assert torch.equal(device_impl.quantized_linear(x, w, bias).cpu(), torch.ones(rows_, outputs))
    assert torch.equal(device_impl.quantized_linear(x, w).cpu(), torch.zeros(rows_, outputs))


def test_cuda_in_any_order_of_threads() -> None:
    """The sums are handed from warp to warp, chunk by chunk."""
    impl = implementation("cudasim")
    w, x = weight("Q4_1", 37, 2144), rows(7, 2144)
    expected = pd.quantized_linear(x, w, backend="reference")
    for schedule in impl.schedules():
        with schedule:
            assert torch.equal(impl.quantized_linear(x, w), expected)


@requires_triton
@pytest.mark.parametrize("rows_, outputs, width", [(0, 3, 32), (2, 0, 32), (2, 3, 0)])
def test_triton_on_nothing(rows_: int, outputs: int, width: int) -> None:
    from pdkernels.triton.quantized_linear import forward, rows_of

    device = triton_device()
    w = weight("Q8_0", outputs, width).to(device)
    x, bias = torch.zeros(rows_, width, device=device), torch.ones(outputs, device=device)
    given = w.data, w.layouts, w.outputs
    assert torch.equal(forward(x, *given, bias).cpu(), torch.ones(rows_, outputs))
    assert torch.equal(forward(x, *given, None).cpu(), torch.zeros(rows_, outputs))
    ids = torch.zeros(min(rows_, outputs), dtype=torch.int64, device=device)
    assert rows_of(ids, *given, width, torch.float32).shape == (len(ids), width)


def check_batches(data: st.DataObject, taken: str, counts: list[int]) -> None:
    """A row has the same bits in any batch and on any number of threads; `taken`: how products take rows."""
    name = data.draw(st.sampled_from(list(LAYOUTS)))
    width, outputs = data.draw(st.sampled_from(WIDTHS[name])), data.draw(st.integers(1, 80) | st.just(600))
    dtype, count = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(counts))
    w, x = weight(name, outputs, width).with_rows(taken), rows(count, width).to(dtype)
    whole = pd.quantized_linear(x, w)
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    assert torch.equal(pd.quantized_linear(x[first:last], w), whole[first:last])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.integers(1, 4)))
        assert torch.equal(pd.quantized_linear(x, w), whole)
    finally:
        torch.set_num_threads(threads)


@given(data=st.data())
@settings(max_examples=60)
def test_a_row_has_the_same_bits_in_any_batch(data: st.DataObject) -> None:
    check_batches(data, "int8", [40, 150])


@pytest.mark.parametrize("name", LAYOUTS)
def test_close_to_the_product_of_the_numbers(name: str) -> None:
    """The codes of x have 8 bits: what is lost is noise of a few thousandths."""
    width = WIDTHS[name][-1]
    w, x = weight(name, 48, width), rows(9, width)
    exact = x.double() @ numbers(w).double().T
    error = pd.quantized_linear(x, w).double() - exact
    assert error.norm() < 0.012 * exact.norm()


def test_any_size_of_values() -> None:
    w = weight("Q8_0", 20, 96)
    x = rows(8, 96)
    x[1] *= 1e30
    x[2] *= 1e-30
    x[3] *= 1e-37  # counts as zero
    x[4, :32] = 0
    x[5, 40], x[6, 0] = float("inf"), float("nan")
    found = pd.quantized_linear(x, w)
    assert same_bits(found, pd.quantized_linear(x, w, backend="reference"))
    assert found[[5, 6]].isnan().all() and found[[0, 1, 2, 4, 7]].isfinite().all() and (found[3] == 0).all()


@pytest.mark.parametrize("name", gguf_blocks.LAYOUTS)
def test_gguf_numbers_are_those_of_its_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    size, bytes_each = gguf.GGML_QUANT_SIZES[kind]
    draw = torch.Generator().manual_seed(2)
    raw = torch.randint(0, 256, (37, 1024 // size, bytes_each), generator=draw, dtype=torch.uint8)
    halves = {"Q6_K": [208], "Q8_0": [0], "Q4_0": [0], "Q5_0": [0]}.get(name, [0, 2])
    for at in halves:
        scales = torch.randn(*raw.shape[:2], 1, generator=draw).half()
        raw[..., at : at + 2] = scales.view(torch.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(raw.flatten(1).numpy(), kind))
    slow = pd.QuantizedWeight.pack(
        name, gguf_blocks.LAYOUTS[name], gguf_blocks.unpack(name, raw.view(-1), 37, 1024), 1024
    )
    found = pd.QuantizedWeight.from_gguf(name, raw.numpy().tobytes(), 37, 1024)
    assert torch.equal(found.part0, slow.part0)
    order = torch.randperm(37, generator=draw)
    turned = pd.QuantizedWeight.from_gguf(name, raw.numpy().tobytes(), 37, 1024, order.tolist())
    assert torch.equal(turned.dequantize(), expected[order])
    assert torch.equal(found.dequantize(), expected)
    ids = torch.tensor([36, 0, 17])
    assert torch.equal(pd.quantized_embedding(ids, found), expected[ids])


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_quantize_writes_the_codes_of_the_package(name: str) -> None:
    values = rows(40, 256)
    values[3] = 0
    values[4, :32] = 1
    kind = gguf.GGMLQuantizationType[name.upper()]
    raw = gguf.quants.quantize(values.numpy(), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    assert torch.equal(pd.quantize(values, name).dequantize(), expected)


@pytest.mark.parametrize("name, group", [("int8", 0), ("int8", 64), ("int4", 32), ("int4", 128), ("int4", 0)])
@pytest.mark.parametrize("width", [64, 70, 200])
def test_whole_numbers_are_within_half_a_step(name: str, group: int, width: int) -> None:
    values = rows(20, width)
    values[3] = 0
    made = pd.quantize(values, name, group=group)
    groups = values.split(group or width, 1)
    steps = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in groups], 1)
    steps = steps / (2 ** (int(name[3:]) - 1) - 1)
    assert ((made.dequantize() - values).abs() <= 0.5001 * steps).all()
    assert same_bits(pd.quantized_linear(values, made), pd.quantized_linear(values, made, backend="reference"))


def test_parts_are_one_matrix() -> None:
    parts = [weight("Q4_K", 24, 256), weight("Q6_K", 16, 256), weight("Q8_0", 21, 256)]
    joined, x = pd.QuantizedWeight.join(parts), rows(5, 256)
    alone = torch.cat([pd.quantized_linear(x, part) for part in parts], 1)
    assert torch.equal(pd.quantized_linear(x, joined), alone)
    assert joined.shape == (61, 256) and joined.format == "Q4_K, Q6_K, Q8_0"
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert torch.equal(pd.quantized_linear(x, joined[24:]), alone[:, 24:])
    with pytest.raises(ValueError, match="must be whole parts"):
        joined[:20]


def test_a_module_with_buffers() -> None:
    w = weight("Q4_0", 20, 64)
    holder = torch.nn.ModuleDict({"w": w})
    other = torch.nn.ModuleDict({"w": weight("Q4_0", 20, 64, seed=9)})
    other.load_state_dict(holder.state_dict())
    x = rows(2, 64)
    expected = pd.quantized_linear(x, w)
    assert torch.equal(pd.quantized_linear(x, other["w"]), expected)
    assert list(w.parameters()) == [] and w.to(torch.bfloat16).part0.dtype == torch.uint8
    compiled = torch.compile(lambda x: pd.quantized_linear(x, w) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected + 1)


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: pd.quantize(torch.ones(2, 33), "q4_0"), ValueError, "multiple of 32"),
    (lambda: pd.quantize(torch.ones(2, 32), "q2_k"), ValueError, "must be one of int8, int4, q8_0"),
    (lambda: pd.quantize(torch.ones(32), "int8"), ValueError, "must have shape (outputs, width)"),
    (lambda: pd.quantize(torch.full((2, 32), float("nan"))), ValueError, "must be finite"),
    (lambda: pd.quantize(torch.ones(2, 32), "int4", group=20), ValueError, "multiple of 32"),
    (lambda: pd.quantize(torch.ones(2, 32), "int4", group=64.0), TypeError, "group must be an int, got float"),  # type: ignore[call-overload]
    (lambda: pd.quantize(torch.ones(2, 32), "int4", group=True), TypeError, "group must be an int, got bool"),
    (lambda: weight("Q8_0", 3, 32)[0], TypeError, "rows must be a slice, got int"),  # type: ignore[index]
    (lambda: pd.quantize(torch.ones(2, 32), "q8_0", group=32), ValueError, "must be None for q8_0"),
    (lambda: pd.quantized_linear(torch.ones(2, 64), weight("Q8_0", 3, 32)), ValueError, "for rows of width 64"),
    (lambda: pd.quantized_linear(torch.ones(2, 32), torch.ones(3, 32)), TypeError, "must be a QuantizedWeight"),  # type: ignore[arg-type]
    (lambda: pd.quantized_linear(torch.ones(2, 32).double(), weight("Q8_0", 3, 32)), TypeError, "float64"),
    (lambda: pd.quantized_embedding(torch.tensor([3]), weight("Q8_0", 3, 32)), ValueError, "be in [0, 2], got 3"),
    (lambda: pd.quantized_embedding(torch.tensor([-1]), weight("Q8_0", 3, 32)), ValueError, "be in [0, 2], got -1"),
    (
        lambda: pd.quantized_embedding(None, weight("Q8_0", 3, 32)),
        TypeError,
        "ids must be an int32 or int64 tensor, got NoneType",
    ),  # type: ignore[arg-type]
    (
        lambda: pd.quantized_embedding(torch.tensor([0]), weight("Q8_0", 3, 32), 3),
        TypeError,
        "dtype must be a torch.dtype, got int",
    ),  # type: ignore[arg-type]
    (lambda: pd.quantized_embedding(torch.tensor([0.0]), weight("Q8_0", 3, 32)), TypeError, "int32 or int64"),
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("id", [-1, 3])
def test_ids_out_of_range_are_refused_by_the_reference_too(backend: Any, id: int) -> None:
    text = rf"quantized_embedding: ids must be in \[0, 2\], got {id}"
    with pytest.raises(ValueError, match=text):
        pd.quantized_embedding(torch.tensor([0, id]), weight("Q8_0", 3, 32), backend=backend)


@pytest.mark.parametrize("run, error, text", ERRORS)
def test_errors(run: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        run()
    assert text in str(caught.value)


@pytest.mark.parametrize("name", gguf_blocks.LAYOUTS)
@pytest.mark.parametrize("bits", [0x7C00, 0xFE00])
def test_a_file_with_scales_that_are_not_finite_is_refused(name: str, bits: int) -> None:
    size, bytes_each = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = bytearray(512 // size * bytes_each)
    at = len(raw) - 2 if name == "Q6_K" else len(raw) - bytes_each
    raw[at : at + 2] = bits.to_bytes(2, "little")
    with pytest.raises(ValueError, match="scales must be finite, got 1 others"):
        pd.QuantizedWeight.from_gguf(name, raw, 1, 512)


def test_scales_that_are_not_finite_are_refused() -> None:
    made = matrix(LAYOUTS["Q4_K"], 4, 256)
    made.fields["minimum"][1, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="minimums must be finite, got 1 others"):
        pd.QuantizedWeight.pack("Q4_K", LAYOUTS["Q4_K"], made, 256)


@pytest.mark.parametrize("rows_, outputs, width", [(0, 3, 32), (2, 0, 32), (2, 3, 0)])
def test_nothing(rows_: int, outputs: int, width: int) -> None:
    w = weight("Q8_0", outputs, width)
    for backend in ("auto", "reference"):
        found = pd.quantized_linear(torch.zeros(rows_, width), w, torch.ones(outputs), backend=backend)
        assert torch.equal(found, torch.ones(rows_, outputs))
        assert pd.quantized_embedding(torch.zeros(0).long(), w, backend=backend).shape == (0, width)


@pytest.mark.parametrize("name", ["int8", "int4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_nothing_is_quantised_to_nothing(name: str) -> None:
    made = pd.quantize(torch.ones(0, 64), name)
    assert made.shape == (0, 64) and made.dequantize().shape == (0, 64)
    assert pd.quantized_linear(torch.ones(3, 64), made).shape == (3, 0)
