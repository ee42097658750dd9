// Tensors -> the argument structs of the kernels, shared by the bindings of all families.
//
// Shapes, dtypes and devices are checked here, where it is cheap, but without messages: the public Python functions
// catch the refusal, and the op's fake raises the error. Kernels check values.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/element.h"
#include "ops/kv_cache.h"

// A condition is its own message.
#define PDK_CHECK(...) STD_TORCH_CHECK((__VA_ARGS__), "pdkernels: arguments must fit: " #__VA_ARGS__)

namespace pdkernels::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

inline char* bytes(const Tensor& t) { return data<char>(t); }

// Whether a tensor has these sizes; -1: any.
inline bool has_shape(const Tensor& t, std::initializer_list<int64_t> sizes) {
  bool same = t.dim() == static_cast<int64_t>(sizes.size());
  int64_t d = 0;
  for (const int64_t size : sizes) same = same && (size < 0 || t.size(d) == size), ++d;
  return same;
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < t.dim(); ++d) sizes.push_back(t.size(d));
  return sizes;
}

// All sizes but the last one, followed by `last` if it is not negative.
inline std::vector<int64_t> shape_of(const Tensor& t, int64_t last) {
  std::vector<int64_t> shape = sizes_of(t);
  shape.pop_back();
  if (last >= 0) shape.push_back(last);
  return shape;
}

inline Tensor packed(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline Element row_element(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return Element::kFloat;
    case ScalarType::Half: return Element::kHalf;
    case ScalarType::BFloat16: return Element::kBfloat16;
    default: STD_TORCH_CHECK(false, "pdkernels: tensors must be float32, float16 or bfloat16");
  }
}
inline Element row_element(const Tensor& t) { return row_element(t.scalar_type()); }

// Whether a name is the second of two.
inline bool is_second(const std::string& name, const char* first, const char* second) {
  PDK_CHECK(name == first || name == second);
  return name == second;
}

// The device of the first tensor of a call; every other one must be on it too.
class SameDevice {
 public:
  explicit SameDevice(const Tensor& t) : index_(t.get_device_index()), cuda_(t.is_cuda()) {}
  void require(const Tensor& t) const {
    STD_TORCH_CHECK(t.is_cuda() == cuda_ && t.get_device_index() == index_,
                    "pdkernels: all tensors must be on one device");
  }
  void require(const Tensor& t, ScalarType dtype) const {
    require(t);
    PDK_CHECK(t.scalar_type() == dtype);
  }
  void require(const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> sizes) const {
    require(t, dtype);
    PDK_CHECK(has_shape(t, sizes));
  }

 private:
  int32_t index_;
  bool cuda_;
};

// A bias that may be absent, contiguous; it holds a copy of one that is not.
inline OptionalTensor unpack_bias(const SameDevice& device, ScalarType dtype, const OptionalTensor& bias,
                                  std::initializer_list<int64_t> sizes, const void*& values) {
  OptionalTensor held;
  if (bias.has_value()) {
    device.require(*bias, dtype, sizes);
    held = packed(*bias);
  }
  values = held ? held->data_ptr() : nullptr;
  return held;
}

inline bool is_wide(const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int,
                  "pdkernels: index tensors must be int32 or int64");
  return dtype == ScalarType::Long;
}

inline IndexView index_view(const SameDevice& device, const Tensor& t, int64_t dim, int64_t size0) {
  device.require(t);
  PDK_CHECK(t.dim() == dim && (dim == 0 || t.size(0) == size0));
  return {t.data_ptr(), dim > 0 ? t.stride(0) : 0, dim > 1 ? t.stride(1) : 0, is_wide(t)};
}

inline IndexView index_view(const SameDevice& device, const OptionalTensor& t, int64_t dim, int64_t size0) {
  return t.has_value() ? index_view(device, *t, dim, size0) : IndexView{};
}

// An index tensor with a row per sequence and `columns` columns.
inline IndexView index_table(const SameDevice& device, const Tensor& t, int64_t rows, int64_t columns) {
  PDK_CHECK(has_shape(t, {rows, columns}));
  return index_view(device, t, 2, rows);
}

inline IndexView index_table(const SameDevice& device, const OptionalTensor& t, int64_t rows, int64_t columns) {
  return t.has_value() ? index_table(device, *t, rows, columns) : IndexView{};
}

// One side of a cache: stacked tensors (layers, pages, slots, heads, dim), or separate layers without the first dim.
struct Side {
  std::vector<char*> layers;
  int64_t pages, slots;
  RowLayout row;
  ScalarType dtype;
};

inline Side unpack_side(const SameDevice& device, const std::vector<Tensor>& tensors) {
  PDK_CHECK(!tensors.empty());
  Side side;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    device.require(t);
    const int64_t d = t.dim();
    PDK_CHECK(d == 4 || d == 5);
    const int64_t size = static_cast<int64_t>(t.element_size());
    RowLayout row{t.stride(d - 4) * size, t.stride(d - 3) * size, t.stride(d - 2) * size, t.size(d - 2),
                  t.size(d - 1) * size};
    PDK_CHECK(t.stride(d - 1) == 1 || t.size(d - 1) <= 1);
    if (i == 0) {
      side.pages = t.size(d - 4);
      side.slots = t.size(d - 3);
      side.row = row;
      side.dtype = t.scalar_type();
    }
    PDK_CHECK(side.dtype == t.scalar_type() && side.pages == t.size(d - 4) && side.slots == t.size(d - 3) &&
              side.row.heads == row.heads && side.row.head_bytes == row.head_bytes &&
              side.row.page_stride == row.page_stride && side.row.slot_stride == row.slot_stride &&
              side.row.head_stride == row.head_stride);
    const int64_t layers = d == 5 ? t.size(0) : 1;
    const int64_t layer_stride = d == 5 ? t.stride(0) * size : 0;
    for (int64_t layer = 0; layer < layers; ++layer) side.layers.push_back(bytes(t) + layer * layer_stride);
  }
  PDK_CHECK(!side.layers.empty());
  return side;
}

inline bool heads_adjacent(const RowLayout& row) { return row.heads <= 1 || row.head_stride == row.head_bytes; }

inline void merge_heads(RowLayout& row) {
  row.head_bytes *= row.heads;
  row.heads = 1;
  row.head_stride = row.head_bytes;
}

// A cache and, for appends, the new rows. Heads become one run if they are adjacent on both sides of the copy.
struct Cache {
  SameDevice device;
  Side sides[2];
  std::optional<Side> sources[2];
  PageMap pages;
  int64_t batch;

  Cache(const std::vector<Tensor>& k, const std::vector<Tensor>& v, const OptionalTensor& block_table,
        const Tensor& lengths)
      : device(lengths),
        sides{unpack_side(device, k), unpack_side(device, v)},
        batch(lengths.dim() == 1 ? lengths.size(0) : -1) {
    PDK_CHECK(sides[0].layers.size() == sides[1].layers.size() && sides[0].pages == sides[1].pages &&
              sides[0].slots == sides[1].slots);
    PDK_CHECK(block_table.has_value() ? sides[0].slots > 0 : sides[0].pages == batch);
    pages.block_table = index_view(device, block_table, 2, batch);
    pages.num_pages = sides[0].pages;
    pages.page_size = sides[0].slots;
    pages.pages_per_sequence = block_table.has_value() ? block_table->size(1) : 1;
  }

  void add_rows(const std::vector<Tensor>& k, const std::vector<Tensor>& v) {
    const std::vector<Tensor>* given[2] = {&k, &v};
    for (int s = 0; s < 2; ++s) {
      sources[s] = unpack_side(device, *given[s]);
      PDK_CHECK(sources[s]->layers.size() == sides[s].layers.size() && sources[s]->pages == batch &&
                sources[s]->dtype == sides[s].dtype && sources[s]->row.heads == sides[s].row.heads &&
                sources[s]->row.head_bytes == sides[s].row.head_bytes);
    }
    PDK_CHECK(sources[0]->slots == sources[1]->slots);
  }

  // Runs `call(CacheView, first_layer)` for as many layers at a time as a launch can carry: one call up to 128 layers.
  template <class Call>
  void for_launches(const Call& call) {
    for (int s = 0; s < 2; ++s) {
      const bool merge = heads_adjacent(sides[s].row) && (!sources[s] || heads_adjacent(sources[s]->row));
      if (!merge) continue;
      merge_heads(sides[s].row);
      if (sources[s]) merge_heads(sources[s]->row);
    }
    const int64_t total = static_cast<int64_t>(sides[0].layers.size());
    for (int64_t first = 0; first < total; first += kMaxBuffers / 2) {
      CacheView view;
      view.layers = static_cast<int32_t>(total - first < kMaxBuffers / 2 ? total - first : kMaxBuffers / 2);
      fill(view.buffers, view.layers, first, sides[0], sides[1]);
      view.rows[0] = sides[0].row;
      view.rows[1] = sides[1].row;
      view.pages = pages;
      view.batch = batch;
      call(view, first);
    }
  }

  static void fill(BufferTable& table, int64_t layers, int64_t first, const Side& k, const Side& v) {
    for (int64_t i = 0; i < layers; ++i) {
      table.base[i] = k.layers[first + i];
      table.base[layers + i] = v.layers[first + i];
    }
  }
};

}  // namespace pdkernels::bindings
