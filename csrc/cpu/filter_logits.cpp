// Filtered logits on the CPU: checks the values, and has simd/filter_logits.cpp compute them.
#include "ops/filter_logits.h"
#include "check_filters.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {

void filter_logits(const FilterLogitsArgs& args) {
  check_filters("filter_logits", args.filters, args.rows, args.width);
  PDK_DISPATCH(filter_logits, args)
}

}  // namespace pdkernels::cpu
