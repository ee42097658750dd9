// What lies between the matrix products of a sandwich block, on the CPU: values are checked here, simd/sandwich.cpp computes.
#include "check_rows.h"
#include "kernels.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {

void add_rms_norm(const AddRmsNormArgs& args) { PDK_DISPATCH(add_rms_norm, args) }

void silu_gate(const SiluGateArgs& args) { PDK_DISPATCH(silu_gate, args) }

void rotate_append(const RotateAppendArgs& args) {
  const char* op = "rotate_append_";
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.lengths.load(b), count = args.count(b);
    report(op, check_extent(args.pages, length, count, args.rows), args.pages, b, length, count, args.rows);
    if (!args.in_tables(length, count)) {
      fail(op, b, "lengths + counts", "be at most the " + std::to_string(args.positions) + " positions of the tables", length + count,
           "Make longer tables.");
    }
    require_pages(op, args.pages, b, length, count);
  }
  PDK_DISPATCH(rotate_append, args)
}

}  // namespace pdkernels::cpu
