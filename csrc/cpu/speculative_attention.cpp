// Speculative attention on the CPU: checks lengths, pages and the plan, then calls the kernel compiled for this processor.
#include "pdkernels/speculative_attention.h"

#include "check_plan.h"
#include "kernels.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {

void speculative_attention(const SpeculativeArgs& args) {
  const char* op = "speculative_attention";
  const PageMap& pages = args.pages;
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.lengths.load(b), capacity = pages.capacity();
    if (length < 0 || length > capacity) {
      fail(op, b, "cache_lengths", "be in [0, " + std::to_string(capacity) + "]", length,
           "The cache holds " + std::to_string(capacity) + " rows a sequence.");
    }
    for (int64_t page = 0; pages.block_table.given() && page * pages.page_size < length; ++page) {
      const int64_t id = pages.block_table.load(b, page);
      if (id < 0 || id >= pages.num_pages) {
        fail(op, b, "block_table[" + std::to_string(b) + ", " + std::to_string(page) + "]",
             "be in [0, " + std::to_string(pages.num_pages - 1) + "]", id, "Every page of the prefix must exist.");
      }
    }
  }
  check_lists(op, args.of_q, args.batch, (args.kv_len + args.block_k - 1) / args.block_k, args.bitmaps.count);
  PDK_DISPATCH(speculative_attention, args)
}

}  // namespace pdkernels::cpu
