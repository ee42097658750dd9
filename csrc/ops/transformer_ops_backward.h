// Arguments of the gradients of the norms and of the gate.
#pragma once

#include "common/element.h"
#include "common/rows_view.h"

namespace pdkernels {

// Gradients of y = rms_norm(x + residual) * weight, next = rms_norm(y) * next_weight. The gradients of the weights are
// sums over rows: first over the adjacent rows of a part in float32, then over the parts in double precision. The parts
// depend only on the number of rows, so the sums do not depend on threads.
struct AddRmsNormBackwardArgs {
  Element element;
  RowsView grad, grad_next;    // of y and next: at least one of them
  RowsView x, residual, dx;    // dx is the gradient of the residual too
  void *weight, *next_weight;  // at least one of them, the second where grad_next is
  void *dweight, *dnext;       // (width), where there is a weight
  float *parts, *parts_next;   // (norm_parts(rows), width), where there is a weight
  int64_t rows, width;
  float eps;
};

PDK_HD int64_t rows_of_part(int64_t rows) { return rows <= 2048 ? 4 : rows <= 16384 ? (rows + 511) / 512 : 32; }
PDK_HD int64_t norm_parts(int64_t rows) { return (rows + rows_of_part(rows) - 1) / rows_of_part(rows); }

// dx[j] and dx[width + j], from the gradient of out[j].
struct SiluAndMulBackwardArgs {
  Element element;
  RowsView grad, x, dx;
  int64_t rows, width;
};

PDK_VECTOR_KERNEL(add_rms_norm_backward, AddRmsNormBackwardArgs)
PDK_VECTOR_KERNEL(silu_and_mul_backward, SiluAndMulBackwardArgs)

}  // namespace pdkernels
