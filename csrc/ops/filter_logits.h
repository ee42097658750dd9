// Arguments of the kernels that filter logits.
#pragma once

#include "common/element.h"
#include "common/logit_filters.h"
#include "common/rows_view.h"

namespace pdkernels {

struct FilterLogitsArgs {
  Element element;
  RowsView logits;
  int64_t rows, width;
  LogitFilters filters;
  float* out;  // (rows, width)
};

PDK_KERNEL(filter_logits, FilterLogitsArgs)
PDK_VECTOR_KERNEL(filter_logits, FilterLogitsArgs)

}  // namespace pdkernels
