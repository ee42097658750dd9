// The tables of quantised formats, and packing, for pdkernels._host.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "host/gguf_blocks.h"
#include "host/quantized_packing.h"

namespace pdkernels {

namespace py = pybind11;

// Its memory, which must be contiguous and of this size.
inline uint8_t* memory_of(const py::buffer& buffer, int64_t bytes, bool writable) {
  const py::buffer_info info = buffer.request(writable);
  if (info.size * info.itemsize != bytes) throw std::invalid_argument("pdkernels: sizes must fit the format.");
  return static_cast<uint8_t*>(info.ptr);
}

// A matrix in buffers; `unpacks`: whether they are written.
inline QuantizedMatrixView matrix_of(int64_t number, const py::buffer& codes, const std::vector<py::buffer>& fields,
                                     int64_t outputs, int64_t width, bool unpacks) {
  QuantizedMatrixView matrix{{}, outputs, width, nullptr, {}};
  const bool known = QuantizedLayout::unpack(number, matrix.layout) && outputs >= 0 && width >= 0;
  if (!known) throw std::invalid_argument("pdkernels: the layout and the shape must be those of a matrix.");
  matrix.codes = memory_of(codes, matrix.code_bytes(), unpacks);
  const std::vector<QuantizedField> expected = fields_of(matrix.layout.fields());
  if (fields.size() != expected.size()) throw std::invalid_argument("pdkernels: fields must be those of the layout.");
  for (size_t i = 0; i < fields.size(); ++i) {
    matrix.fields.push_back(memory_of(fields[i], matrix.field_bytes(expected[i]), unpacks));
  }
  return matrix;
}

inline void bind_quantized(py::module_& m) {
  py::list scales, kinds, formats;
  for (const QuantizedScales& row : kQuantizedScales) {
    py::list fields;
    for (const QuantizedField& field : fields_of(row))
      fields.append(py::make_tuple(field.name, field.bytes, field.count));
    scales.append(py::make_tuple(row.name, row.group_blocks, fields, row.halves));
  }
  for (const QuantizedKind& kind : kQuantizedKinds) {
    kinds.append(py::make_tuple(kQuantizedScales[kind.scales].name, kind.bits));
  }
  for (const QuantizedFormat& format : kQuantizedFormats) {
    formats.append(py::make_tuple(format.name, kQuantizedScales[format.scales].name, format.bits, format.group_bytes));
  }
  m.attr("QUANTIZED_SCALES") = scales;
  m.attr("QUANTIZED_KINDS") = kinds;
  m.attr("QUANTIZED_FORMATS") = formats;

  m.def(
      "pack_quantized",
      [](int64_t layout, const py::buffer& codes, const std::vector<py::buffer>& fields, int64_t outputs, int64_t width,
         const py::buffer& target) {
        const QuantizedMatrixView matrix = matrix_of(layout, codes, fields, outputs, width, false);
        uint8_t* to = memory_of(target, matrix.packed_bytes(), true);
        const py::gil_scoped_release release;
        matrix.pack(to);
      },
      py::arg("layout"), py::arg("codes"), py::arg("fields"), py::arg("outputs"), py::arg("width"), py::arg("target"),
      R"(Writes a matrix of codes and scales to `target` as QuantizedWeight holds it.

Args:
    layout: its number, as the schemas of ops take it.
    codes: (outputs, blocks * 32), a byte each.
    fields: the numbers of the headers, (outputs, groups, count) each, in the order of QUANTIZED_SCALES.
    outputs, width: its shape.
    target: a writable buffer.
)");

  m.def(
      "unpack_quantized",
      [](int64_t layout, const py::buffer& source, int64_t outputs, int64_t width, const py::buffer& codes,
         const std::vector<py::buffer>& fields) {
        const QuantizedMatrixView matrix = matrix_of(layout, codes, fields, outputs, width, true);
        const uint8_t* from = memory_of(source, matrix.packed_bytes(), false);
        const py::gil_scoped_release release;
        matrix.unpack(from);
      },
      py::arg("layout"), py::arg("source"), py::arg("outputs"), py::arg("width"), py::arg("codes"), py::arg("fields"),
      "The inverse of pack_quantized: writes `codes` and `fields`.");

  m.def(
      "pack_gguf",
      [](const std::string& format, py::buffer source, const std::vector<int64_t>& order, int64_t outputs,
         int64_t width, py::buffer target) {
        const GgufBlocks blocks(format);
        const py::buffer_info from = source.request(), to = target.request(true);
        const bool fits = outputs >= 0 && width >= 0 && width % (32 * blocks.layout.group_blocks) == 0 &&
                          from.size * from.itemsize == blocks.source_bytes(outputs, width) &&
                          to.size * to.itemsize == blocks.target_bytes(outputs, width) &&
                          (order.empty() || static_cast<int64_t>(order.size()) == outputs);
        if (!fits) throw std::invalid_argument("pdkernels: sizes must fit the format.");
        for (const int64_t row : order) {
          if (row < 0 || row >= outputs) throw std::invalid_argument("pdkernels: order must hold rows.");
        }
        const py::gil_scoped_release release;
        return blocks.pack(static_cast<const uint8_t*>(from.ptr), order.empty() ? nullptr : order.data(), outputs,
                           width, static_cast<uint8_t*>(to.ptr));
      },
      py::arg("format"), py::arg("source"), py::arg("order"), py::arg("outputs"), py::arg("width"), py::arg("target"),
      R"(Writes a matrix of a GGUF format to `target` as QuantizedWeight holds it. How many scales are not finite.

Args:
    format: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K.
    source: its bytes in the file.
    order: for each output the row of the source that it is; empty: the same.
    outputs, width: its shape.
    target: a writable buffer.

Example:
    >>> from pdkernels._host import pack_gguf
    >>> target = bytearray(16 * 34 + 32)
    >>> pack_gguf("Q8_0", bytes(34), [], 1, 32, target)
    Traceback (most recent call last):
    ValueError: pdkernels: sizes must fit the format.
)");
}

}  // namespace pdkernels
