// Products of rows that are sorted by group, each group with a matrix of its own: the experts of a layer.
#pragma once

#include "common/index_view.h"
#include "ops/linear.h"
#include "ops/quantized_linear.h"

namespace pdkernels {

// Consecutive rows, at least one, and the number of their matrix.
struct RowGroup {
  int64_t matrix, first, count;
  int64_t slot;  // of the first row among quantised rows: groups begin at multiples of QuantizedRows::kGroup
};

struct RowGroups {
  IndexView ends;  // (groups,): where the rows of each group end
  int64_t groups;
  RowGroup* used;  // those with rows, `count` of them: the kernel fills them in; memory for min(groups, rows)
  int64_t count;
};

// out[r] = x[r] weight[g]^T + bias[g] for the rows r of group g, with the sums of `linear`.
struct GroupedLinearArgs {
  LinearArgs all;  // all rows; `weight` and `bias` are those of the first group
  RowGroups groups;
  int64_t matrix_stride;  // elements from a group's matrix to the next one's

  // Memory that the products of so many rows need.
  PDK_HD int64_t scratch_bytes(int64_t rows) const { return all.scratch_bytes(rows); }
};

// The same with quantised matrices, and the sums of `quantized_linear`. The matrices of a part follow each other.
struct QuantizedGroupedLinearArgs {
  QuantizedLinearArgs all;
  RowGroups groups;
  int64_t outputs;

  // Slots for quantised rows that suffice, however many rows a group has.
  static PDK_HD int64_t slots(int64_t rows, int64_t groups) {
    return rows + (QuantizedRows::kGroup - 1) * (groups < rows ? groups : rows);
  }
  // Memory that the products of so many rows need.
  PDK_HD int64_t scratch_bytes(int64_t rows) const { return all.quantized.bytes(slots(rows, groups.groups)); }
};

PDK_KERNEL(grouped_linear, GroupedLinearArgs)
PDK_KERNEL(quantized_grouped_linear, QuantizedGroupedLinearArgs)
PDK_BF16_KERNEL(grouped_linear, GroupedLinearArgs)
PDK_INT8_KERNEL(quantized_grouped_linear, QuantizedGroupedLinearArgs)

}  // namespace pdkernels
