// Arguments of the second half of a low-rank product, for the CPU: it is a part of what adapters add (ops/lora.h).
#pragma once

#include "common/element.h"
#include "common/rows_view.h"

namespace pdkernels {

// out[rows[i]] += x[i] b: a sum in float32 in the order of b's rows, rounded, then added.
struct LowRankArgs {
  Element element, weight_element;  // of x and out; of b
  RowsView x, out;
  const int64_t* numbers;  // (rows,): of `out`
  const void* b;           // (rank, outputs)
  int64_t rows, rank, outputs;
};

PDK_VECTOR_KERNEL(low_rank, LowRankArgs)

}  // namespace pdkernels
