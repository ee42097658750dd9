// Tensors -> rows of contiguous elements.
#pragma once

#include "common/rows_view.h"
#include "unpack.h"

namespace pdkernels::bindings {

// A tensor (..., width) as rows. A layout without a single row stride is copied.
struct FlatRows {
  Tensor held;
  int64_t count = 1, width, stride = 0;

  explicit FlatRows(const Tensor& t) : held(t) {
    PDK_CHECK(t.dim() > 0);
    width = t.size(t.dim() - 1);
    if (!describe()) held = torch::stable::contiguous(t), stride = width;
  }
  RowsView view() const { return {held.data_ptr(), stride}; }

 private:
  bool describe() {
    bool fits = width <= 1 || held.stride(held.dim() - 1) == 1;
    for (int64_t d = held.dim() - 2; d >= 0; --d) {
      const int64_t size = held.size(d);
      if (size != 1) {
        if (count == 1) stride = held.stride(d);
        fits = fits && (count == 1 || held.stride(d) == stride * count);
      }
      count *= size;
    }
    return fits;
  }
};

// The rows of a tensor that must have the shape of another tensor.
inline std::optional<FlatRows> rows_like(const SameDevice& device, const OptionalTensor& t, const Tensor& other) {
  if (!t.has_value()) return std::nullopt;
  device.require(*t, other.scalar_type());
  PDK_CHECK(sizes_of(*t) == sizes_of(other));
  return FlatRows(*t);
}

// A tensor (batch, rows, ...) with contiguous rows; any other is copied.
inline Tensor with_whole_rows(const Tensor& t) {
  int64_t step = 1;
  for (int64_t d = t.dim() - 1; d > 1; --d) {
    if (t.size(d) != 1 && t.stride(d) != step) return torch::stable::contiguous(t);
    step *= t.size(d);
  }
  return t;
}

// A tensor (batch, rows, ...) with contiguous rows, in units of so many elements.
inline BatchRowsView rows_view(const Tensor& t, int64_t unit = 1) {
  return {{t.data_ptr(), t.stride(1) * unit}, t.stride(0) * unit, t.size(1)};
}

// The same of a tensor (batch, any number, size) of a given dtype.
inline BatchRowsView rows_view(const SameDevice& device, const Tensor& t, ScalarType dtype, int64_t batch,
                               int64_t size) {
  device.require(t, dtype, {batch, -1, size});
  PDK_CHECK(size <= 1 || t.stride(2) == 1);
  return rows_view(t);
}

inline BatchRowsView rows_view(const SameDevice& device, const OptionalTensor& t, ScalarType dtype, int64_t batch,
                               int64_t size) {
  if (!t.has_value()) return {};
  BatchRowsView view = rows_view(device, *t, dtype, batch, size);
  // Not nullptr even if it has no bytes, so that it counts as given.
  static char nothing;
  if (view.data == nullptr) view.data = &nothing;
  return view;
}

}  // namespace pdkernels::bindings
