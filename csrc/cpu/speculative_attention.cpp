// Speculative attention on the CPU: checks lengths, pages, rows and the plan, then calls the kernel compiled for this
// processor.
#include "ops/speculative_attention.h"

#include "check_plan.h"
#include "check_rows.h"
#include "check_steps.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

void require_packed(const SpeculativeArgs& args) {
  const auto require = [&](bool fits, int64_t at, const std::string& what, int64_t found) {
    if (fits) return;
    fail(args.op, at, "cu_seqlens[" + std::to_string(at) + "]", what, found,
         "It counts the rows before each sequence, and all rows at its end.");
  };
  for (int64_t b = 0; b <= args.batch; ++b) {
    const int64_t here = args.row_begins.load(b), before = b == 0 ? 0 : args.row_begins.load(b - 1);
    require(b > 0 || here == 0, b, "be 0", here);
    require(b == 0 || (here >= before && here - before <= args.q_len), b, range(before, before + args.q_len), here);
    require(b < args.batch || here == args.lse_stride, b, "be " + std::to_string(args.lse_stride), here);
  }
}

}  // namespace

void require_rows(const SpeculativeArgs& args) {
  if (args.packed()) require_packed(args);
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.lengths.load(b), count = args.count(b);
    report(args.op, check_extent(args.pages, length, count, args.append_rows), args.pages, b, length, count,
           args.append_rows, "lengths");
    require_pages(args.op, args.pages, b, 0, length, "Every page of the prefix must exist.");
    require_pages(args.op, args.pages, b, length, count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t source = args.source(b, i);
      if (source >= 0 && source < args.tokens(b)) continue;
      fail(args.op, b, "source_index[" + std::to_string(b) + ", " + std::to_string(i) + "]",
           range(0, args.tokens(b) - 1), source, "It names one of the new tokens.");
    }
    for (int64_t row = 0; args.starts.given() && row < args.tokens(b); ++row) {
      if (args.start(b, row) >= 0) continue;
      fail(args.op, b, "starts", "be at least 0", args.start(b, row), "It is a position of the sequence.");
    }
  }
  check_lists(args.op, args.of_q, args.batch, args.of_k.num_tiles, args.kv_len / args.block_k, args.bitmaps.count);
}

void speculative_attention(const SpeculativeArgs& args) {
  require_rows(args);
  PDK_DISPATCH(speculative_attention, args)
}

}  // namespace pdkernels::cpu
