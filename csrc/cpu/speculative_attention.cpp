// Speculative attention on the CPU: checks lengths, pages, rows and the plan, then calls the kernel compiled for this
// processor.
#include "pdkernels/speculative_attention.h"

#include "check_plan.h"
#include "check_rows.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {

void speculative_attention(const SpeculativeArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.lengths.load(b), count = args.count(b);
    report(args.op, check_extent(args.pages, length, count, args.append_rows), args.pages, b, length, count,
           args.append_rows, "lengths");
    require_pages(args.op, args.pages, b, 0, length, "Every page of the prefix must exist.");
    require_pages(args.op, args.pages, b, length, count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t source = args.source(b, i);
      if (source >= 0 && source < args.q_len) continue;
      fail(args.op, b, "source_index[" + std::to_string(b) + ", " + std::to_string(i) + "]", range(0, args.q_len - 1),
           source, "It names one of the new tokens.");
    }
  }
  check_lists(args.op, args.of_q, args.batch, args.of_k.num_tiles, args.kv_len / args.block_k, args.bitmaps.count);
  PDK_DISPATCH(speculative_attention, args)
}

}  // namespace pdkernels::cpu
