// CPU implementations of the tensor ops, registered through torch's stable ABI. Schemas live in pdkernels/ops.
#include <torch/csrc/stable/ops.h>

#include "kernels.h"
#include "parallel.h"
#include "unpack.h"

void pdkernels::cpu::run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, function, context));
}

namespace {

using namespace pdkernels::bindings;
using Tensors = std::vector<Tensor>;

void kv_append(Tensors k_cache, Tensors v_cache, Tensors k_new, Tensors v_new, Tensor lengths, OptionalTensor counts,
               OptionalTensor block_table) {
  append(k_cache, v_cache, k_new, v_new, lengths, counts, block_table, pdkernels::cpu::kv_append);
}

void kv_commit(Tensors k_cache, Tensors v_cache, Tensor lengths, Tensor counts, OptionalTensor source_index,
               OptionalTensor block_table) {
  commit(k_cache, v_cache, lengths, counts, source_index, block_table, pdkernels::cpu::kv_commit);
}

void kv_trim(Tensor lengths, Tensor new_lengths) { trim(lengths, new_lengths, pdkernels::cpu::kv_trim); }

Verdict verify_draft(Tensor draft, Tensor predictions, OptionalTensor draft_lengths, OptionalTensor end_tokens,
                     OptionalTensor refill) {
  VerdictTensors out(draft);
  pdkernels::cpu::verify_draft(verify_args(draft, predictions, draft_lengths, end_tokens, refill, out));
  return out.tuple();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pdkernels, CPU, m) {
  m.impl("kv_append_", TORCH_BOX(&kv_append));
  m.impl("kv_commit_", TORCH_BOX(&kv_commit));
  m.impl("kv_trim_", TORCH_BOX(&kv_trim));
  m.impl("verify_draft", TORCH_BOX(&verify_draft));
}
