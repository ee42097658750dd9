// Arguments of rows that are multiplied by a number, for the CPU: it is a part of transformer_layers_.
#pragma once

#include "common/element.h"
#include "common/rows_view.h"

namespace pdkernels {

// x *= factor, in float32, rounded once.
struct ScaledRowsArgs {
  Element element;
  RowsView x;
  float factor;
  bool rounds_factor;  // to the element type
  int64_t rows, width;
};

PDK_VECTOR_KERNEL(scaled_rows, ScaledRowsArgs)

}  // namespace pdkernels
