// Rows of contiguous elements.
#pragma once

#include "common/platform.h"

namespace pdkernels {

// (rows, width); strides in elements.
struct RowsView {
  void* data = nullptr;  // nullptr: the optional argument was not given
  int64_t row_stride = 0;

  PDK_HD bool given() const { return data != nullptr; }
  template <class T>
  PDK_HD T* row(int64_t i) const {
    return static_cast<T*>(data) + i * row_stride;
  }
};

// (batch, rows, width). A separate type, because most kernels have no batch and every field is passed with each launch.
struct BatchRowsView : RowsView {
  int64_t batch_stride = 0, rows = 0;

  PDK_HD bool has(int64_t i) const { return i >= 0 && i < rows; }
  template <class T>
  PDK_HD T* row(int64_t b, int64_t i) const {
    return static_cast<T*>(data) + b * batch_stride + i * row_stride;
  }
};

}  // namespace pdkernels
