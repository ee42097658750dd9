// Arguments of the sum of experts' outputs, for the CPU: it is a part of transformer_layers_.
#pragma once

#include "common/element.h"
#include "common/rows_view.h"

namespace pdkernels {

// out = the sum of `count` rows of x with weights, in this order and float32, and `plus` added to it if given.
struct WeightedRowsArgs {
  Element element;
  RowsView x, plus, out;
  const int64_t* slots;  // (rows, count): the rows of x that each adds up
  const float* weights;  // (rows, count)
  bool rounds_weights;   // to the element type
  int64_t rows, count, width;
};

PDK_VECTOR_KERNEL(weighted_rows, WeightedRowsArgs)

}  // namespace pdkernels
