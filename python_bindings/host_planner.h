// Segment masks and tile plans for Python. A header of host.cpp, because every unit with pybind11 costs much to
// compile.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "host/anchored_mask.h"
#include "host/segment_mask.h"
#include "host/tile_plan.h"

namespace py = pybind11;

namespace {

using pdkernels::Inside;
using pdkernels::SegmentMask;
using pdkernels::SegmentRange;
using pdkernels::TilePlan;

Inside parse_inside(py::handle text, size_t segment) {
  const auto name = py::cast<std::string>(text);
  if (name == "causal") return Inside::kCausal;
  if (name == "full") return Inside::kFull;
  if (name == "none") return Inside::kNone;
  pdkernels::fail_mask("SegmentMask: inside must be 'causal', 'full' or 'none', got '" + name + "' in segment " +
                       std::to_string(segment) + ".");
}

// Interned names: a mask of thousands of ranges is read attribute by attribute.
int32_t number(py::handle range, PyObject* name) {
  const auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(range.ptr(), name));
  if (!value) throw py::error_already_set();
  return py::cast<int32_t>(value);
}

// Segments as tuples (length, inside, ranges of visible segments, ..).
SegmentMask parse(const py::tuple& segments, std::pair<int64_t, int64_t> rows, std::pair<int64_t, int64_t> columns) {
  static PyObject* const start = PyUnicode_InternFromString("start");
  static PyObject* const stop = PyUnicode_InternFromString("stop");
  static PyObject* const step = PyUnicode_InternFromString("step");
  SegmentMask mask;
  std::vector<SegmentRange> sees;
  for (size_t i = 0; i < segments.size(); ++i) {
    const auto segment = py::cast<py::tuple>(segments[i]);
    sees.clear();
    for (const py::handle& range : py::cast<py::tuple>(segment[2])) {
      if (!PyRange_Check(range.ptr())) {
        const auto type = std::string(py::str(py::type::of(range)));
        throw py::type_error("pdkernels.masks.SegmentMask: sees must be a tuple of ranges, got " + type +
                             " in segment " + std::to_string(i) + ".");
      }
      if (py::len(range) == 0) continue;
      sees.push_back({number(range, start), number(range, stop), number(range, step)});
    }
    mask.add(py::cast<int64_t>(segment[0]), parse_inside(segment[1], i), sees);
  }
  mask.finish(rows.first, rows.second, columns.first, columns.second);
  return mask;
}

// A segment of a run of similar ones: repetition j attends to the segments from start + j * start_by to below
// stop + j * stop_by.
struct Repeated {
  struct Range {
    int32_t start, stop, step, start_by, stop_by;
  };
  int64_t length;
  Inside inside;
  std::vector<Range> sees;
};

// Runs as tuples (count, segments): the segments as (length, inside, ranges), in sequence, `count` times.
SegmentMask repeat(const py::sequence& runs, std::pair<int64_t, int64_t> rows, std::pair<int64_t, int64_t> columns) {
  SegmentMask mask;
  std::vector<SegmentRange> sees;
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto [count, parts] = py::cast<std::pair<int32_t, py::sequence>>(runs[i]);
    std::vector<Repeated> segments;
    for (const py::handle& part : parts) {
      const auto fields = py::cast<py::tuple>(part);
      Repeated& segment = segments.emplace_back();
      segment.length = py::cast<int64_t>(fields[0]), segment.inside = parse_inside(fields[1], i);
      for (const py::handle& range : py::cast<py::sequence>(fields[2])) {
        const auto [start, stop, step, start_by, stop_by] = py::cast<std::array<int32_t, 5>>(range);
        segment.sees.push_back({start, stop, step, start_by, stop_by});
      }
    }
    for (int32_t j = 0; j < count; ++j) {
      for (const Repeated& segment : segments) {
        sees.clear();
        for (const auto& range : segment.sees) {
          const int32_t start = range.start + j * range.start_by, stop = range.stop + j * range.stop_by;
          if (start < stop) sees.push_back({start, stop, range.step});
        }
        mask.add(segment.length, segment.inside, sees);
      }
    }
  }
  mask.finish(rows.first, rows.second, columns.first, columns.second);
  return mask;
}

// Addresses of int64 arrays in host memory, which the caller keeps alive: this module does not depend on torch.
SegmentMask anchored(std::pair<uintptr_t, size_t> documents, std::pair<uintptr_t, size_t> anchors,
                     std::pair<uintptr_t, size_t> sizes, const std::string& inside, int64_t window, bool inclusive,
                     bool causal_base, std::pair<uintptr_t, size_t> positions) {
  const auto numbers = [](std::pair<uintptr_t, size_t> array) {
    return std::span<int64_t>(reinterpret_cast<int64_t*>(array.first), array.second);
  };
  const pdkernels::AnchoredRules rules{parse_inside(py::str(inside), 0), window, inclusive, causal_base};
  const py::gil_scoped_release release;
  return pdkernels::anchored_mask(numbers(documents), numbers(anchors), numbers(sizes), rules, numbers(positions));
}

py::list listed(const SegmentMask& mask) {
  static const std::array<const char*, 3> names{"none", "causal", "full"};
  py::list segments;
  for (int32_t i = 0; i < mask.segments(); ++i) {
    py::list sees;
    for (const SegmentRange& range : mask.sees(i)) sees.append(py::make_tuple(range.start, range.stop, range.step));
    segments.append(py::make_tuple(mask.length(i), names[static_cast<int>(mask.inside(i))], sees));
  }
  return segments;
}

py::bytearray lengths(const SegmentMask& mask) {
  std::vector<int64_t> all(mask.segments());
  for (int32_t i = 0; i < mask.segments(); ++i) all[i] = mask.length(i);
  return {reinterpret_cast<const char*>(all.data()), all.size() * sizeof(int64_t)};
}

py::bytearray relation(const SegmentMask& mask) {
  const auto size = static_cast<size_t>(mask.segments()) * mask.segments();
  py::bytearray bytes(nullptr, size);
  mask.write_relation(reinterpret_cast<uint8_t*>(PyByteArray_AS_STRING(bytes.ptr())));
  return bytes;
}

void bind_planner(py::module_& m) {
  py::class_<TilePlan>(m, "TilePlan", py::module_local(), py::buffer_protocol(),
                       "One block of int32 words that holds all arrays of a tile plan.")
      .def_buffer([](TilePlan& plan) {
        return py::buffer_info(plan.words.data(), static_cast<py::ssize_t>(plan.words.size()));
      })
      .def_property_readonly(
          "extents",
          [](const TilePlan& plan) {
            std::vector<std::pair<int64_t, int64_t>> extents;
            for (const auto& extent : plan.extents) extents.emplace_back(extent.begin, extent.size);
            return extents;
          },
          "First word and size of: rows, lists, bitmaps.")
      .def_readonly("visits", &TilePlan::visits, "Tiles that hold a visible pair.")
      .def_readonly("visible_pairs", &TilePlan::visible_pairs, "Pairs that the mask shows.");

  py::class_<SegmentMask>(m, "SegmentMask", py::module_local(),
                          "Segments as the planner reads them: checked, with a window of rows and columns.")
      .def(py::init(&parse), py::arg("segments"), py::arg("rows"), py::arg("columns"))
      .def_static("repeat", &repeat, py::arg("runs"), py::arg("rows"), py::arg("columns"),
                  "From runs (count, ((length, inside, ((start, stop, step, start_by, stop_by), ..)), ..)).")
      .def_static("anchored", &anchored, py::arg("documents"), py::arg("anchors"), py::arg("sizes"), py::arg("inside"),
                  py::arg("window"), py::arg("inclusive"), py::arg("causal_base"), py::arg("positions"),
                  "From int64 arrays as (address, count); `positions` is written.")
      .def("window", &SegmentMask::window, py::arg("rows"), py::arg("columns"), "The same segments, another window.")
      .def("listed", &listed, "Segments as tuples (length, inside, [(start, stop, step), ..]).")
      .def("lengths", &lengths, "Tokens of each segment, int64 bytes.")
      .def_property_readonly("segments", &SegmentMask::segments)
      .def_property_readonly("tokens", &SegmentMask::tokens)
      .def("hash", &SegmentMask::hash)
      .def("equals", [](const SegmentMask& mask, const SegmentMask& other) { return mask == other; })
      .def("relation", &relation, "Row-major bytes, segments x segments: 0 nothing, 1 all, 2 itself causally.")
      .def("plan", &pdkernels::plan_tiles, py::arg("block_q"), py::arg("block_k"),
           py::call_guard<py::gil_scoped_release>(),
           "The tile plan. ValueError unless the tile sizes are multiples of 16 in [16, 1024].");
}

}  // namespace
