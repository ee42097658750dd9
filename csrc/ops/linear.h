// Arguments of products with few rows.
#pragma once

#include "common/element.h"
#include "common/rows_view.h"

namespace pdkernels {

// out[r] = x[r] weight^T + bias, sums in float32. An element of `out` has the same bits however many rows there are.
struct LinearArgs {
  Element element, weight_element;  // of x, out and bias; of weight
  RowsView x, out;
  const void* weight;  // (outputs, width)
  int64_t weight_stride;
  const void* bias;  // (outputs,), or nullptr
  float* wide;       // (rows, padded_width()): x as the kernel reads it
  int64_t rows, width, outputs;

  static constexpr int64_t kPadding = 32;
  PDK_HD int64_t padded_width() const { return (width + kPadding - 1) / kPadding * kPadding; }
  // Rows are read directly if they consist of whole vectors of floats in the order of the weights.
  PDK_HD bool reads_rows() const {
    return element == Element::kFloat && weight_element == Element::kFloat && width % kPadding == 0;
  }
  // Memory that the product of so many rows needs.
  PDK_HD int64_t scratch_bytes(int64_t count) const {
    return reads_rows() ? 0 : count * padded_width() * static_cast<int64_t>(sizeof(float));
  }
  PDK_HD void set_rows(const RowsView& from, int64_t count, void* to, void* scratch) {
    x = from, rows = count, out = {to, outputs}, wide = reads_rows() ? nullptr : static_cast<float*>(scratch);
  }
};

PDK_BF16_KERNEL(linear, LinearArgs)

}  // namespace pdkernels
