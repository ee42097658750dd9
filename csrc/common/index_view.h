// Lengths, counts, row indices and block tables arrive as int32 or int64 tensors of any stride. Kernels read them
// through this view, so one kernel serves both widths.
#pragma once

#include "common/platform.h"

namespace pdkernels {

struct IndexView {
  void* data = nullptr;  // nullptr: the optional argument was not given
  int64_t stride0 = 0;   // in elements
  int64_t stride1 = 0;
  bool wide = true;  // int64 if true, int32 otherwise

  PDK_HD bool given() const { return data != nullptr; }

  PDK_HD int64_t load(int64_t i, int64_t j = 0) const {
    const int64_t at = i * stride0 + j * stride1;
    return wide ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
  }

  PDK_HD void store(int64_t value, int64_t i, int64_t j = 0) const {
    const int64_t at = i * stride0 + j * stride1;
    if (wide) {
      static_cast<int64_t*>(data)[at] = value;
    } else {
      static_cast<int32_t*>(data)[at] = static_cast<int32_t>(value);
    }
  }
};

}  // namespace pdkernels
