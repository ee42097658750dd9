// Filtered logits, in parts of a row.
#include "kernels.h"
#include "logit_filters.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

constexpr int64_t kPart = 8192;  // tokens of a work item

template <class T>
void filter_logits_of(const FilterLogitsArgs& args) {
  const int64_t parts = (args.width + kPart - 1) / kPart;
  for_rows(args.rows * parts, smaller(args.width, kPart), [&](int64_t item) {
    const int64_t r = item / parts, begin = item % parts * kPart, end = smaller(begin + kPart, args.width);
    filter_range(args.filters, r, args.logits.row<const T>(r), begin, end, args.out + r * args.width + begin);
  });
}

}  // namespace

void filter_logits(const FilterLogitsArgs& args) { PDK_BY_ELEMENT(filter_logits_of, args) }

}  // namespace pdkernels::cpu::PDK_ISA
