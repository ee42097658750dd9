// The kernel of vocabulary statistics alone, for bf16 in packs and clusters of a size of the caller's choice.
#include "token_rows.h"

#include <vector>

#include "c_abi.h"

using namespace pdkernels;
using namespace pdkernels::cuda;

// Integers of a row: the id, then top_k ids. Floats: probability, margin, entropy, log-sum-exp, then top_k
// probabilities.
FIXTURE run_token_rows(const __nv_bfloat16* logits, int64_t* ids, float* numbers, int rows, int width, int blocks,
                       int top_k, int draws) {
  TokenStatisticsArgs args = {};
  args.element = Element::kBfloat16;
  args.logits = {const_cast<__nv_bfloat16*>(logits), width};
  args.rows = args.source_rows = rows, args.width = width, args.top_k = top_k;
  args.temperature = draws != 0 ? 0.8 : 0, args.top_p = args.typical_p = 1;
  args.ids = ids, args.top_ids = ids + rows;
  args.probs = numbers, args.margin = numbers + rows, args.entropy = numbers + 2 * rows;
  args.logsumexp = numbers + 3 * rows, args.top_probs = numbers + 4 * rows;
  std::vector<TokenPart> parts(static_cast<size_t>(rows * args.num_parts()));
  args.parts = parts.data();
  return guarded([&] {
    if (draws != 0) {
      PDK_LAUNCH_CLUSTERS((token_row_kernel<__nv_bfloat16, true, true>), blocks, rows * blocks, kRowThreads, 0, nullptr,
                          args);
    } else {
      PDK_LAUNCH_CLUSTERS((token_row_kernel<__nv_bfloat16, true, false>), blocks, rows * blocks, kRowThreads, 0,
                          nullptr, args);
    }
  });
}
