// Products of rows sorted by group on the CPU: numbers are checked here, simd/linear.cpp and simd/quantized_linear.cpp
// compute.
#include "ops/grouped_linear.h"
#include "fault.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

// The groups that have rows. Ends must ascend to the number of rows.
RowGroups with_rows(const char* op, RowGroups groups, int64_t rows) {
  int64_t first = 0, slot = 0;
  groups.count = 0;
  for (int64_t g = 0; g < groups.groups; ++g) {
    const int64_t end = groups.ends.load(g);
    if (end < first || end > rows) {
      fail(op, "ends must ascend from 0 to the number of rows (" + std::to_string(rows) + "), got " +
                   std::to_string(end) + " after " + std::to_string(first) + " for group " + std::to_string(g) + ".");
    }
    if (end > first) {
      groups.used[groups.count++] = {g, first, end - first, slot};
      slot += (end - first + QuantizedRows::kGroup - 1) / QuantizedRows::kGroup * QuantizedRows::kGroup;
    }
    first = end;
  }
  if (first != rows) {
    fail(op, "ends must ascend to the number of rows (" + std::to_string(rows) + "), got " + std::to_string(first) +
                 " for the last group.");
  }
  return groups;
}

}  // namespace

void grouped_linear(const GroupedLinearArgs& args) {
  GroupedLinearArgs checked = args;
  checked.groups = with_rows("grouped_linear", args.groups, args.all.rows);
  if (checked.groups.count > 0 && args.all.outputs > 0) PDK_DISPATCH(grouped_linear, checked)
}

void quantized_grouped_linear(const QuantizedGroupedLinearArgs& args) {
  QuantizedGroupedLinearArgs checked = args;
  checked.groups = with_rows("quantized_grouped_linear", args.groups, args.all.rows);
  if (checked.groups.count > 0 && args.outputs > 0) PDK_DISPATCH(quantized_grouped_linear, checked)
}

}  // namespace pdkernels::cpu
