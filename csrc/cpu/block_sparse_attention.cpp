// Block-sparse attention on the CPU: checks the plan, then calls the kernel that was compiled for this processor.
#include "ops/block_sparse_attention.h"

#include "check_plan.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

void check_plan(const AttentionArgs& args) {
  const char* op = "block_sparse_attention";
  check_lists(op, args.of_q, args.batch, args.of_k.num_tiles, args.kv_len / args.block_k, args.bitmaps.count);
  check_lists(op, args.of_k, args.batch, args.of_q.num_tiles, args.q_len / args.block_q, args.bitmaps.count);
}

}  // namespace

void block_sparse_attention(const AttentionArgs& args) {
  check_plan(args);
  PDK_DISPATCH(block_sparse_attention, args)
}

void block_sparse_attention_backward(const AttentionGradArgs& args) {
  check_plan(args);
  PDK_DISPATCH(block_sparse_attention_backward, args)
}

}  // namespace pdkernels::cpu
