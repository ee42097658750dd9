// The tensor ops of one device, registered through torch's stable ABI: this file is compiled for the CPU and, with
// PDKERNELS_DEVICE_CUDA, for CUDA. A family's bindings are in the header of its name; schemas live in pdkernels/ops.
#include "block_sparse_attention.h"
#include "draft_chain.h"
#include "draft_lengths.h"
#include "feature_cache.h"
#include "filter_logits.h"
#include "greedy_steps.h"
#include "grouped_linear.h"
#include "kv_cache.h"
#include "linear.h"
#include "log_step.h"
#include "logit_divergence.h"
#include "lookup_draft.h"
#include "next_token.h"
#include "quantized_linear.h"
#include "recurrence.h"
#include "recurrent_state.h"
#include "speculative_attention.h"
#include "state_mixer.h"
#include "token_statistics.h"
#include "transformer_layers.h"
#include "transformer_ops.h"
#include "unmask.h"
#include "verify_draft.h"

#ifndef PDKERNELS_DEVICE_CUDA  // what the CPU's kernels expect of this library

#include <algorithm>
#include <memory>
#include <new>

#include "parallel.h"
#include "simd/kernels.h"

int64_t pdkernels::cpu::max_threads() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return threads;
}

// A thread keeps the memory of its last call, or up to kKept, so that one call with very long rows does not hold memory
// forever.
char* pdkernels::cpu::thread_scratch(int64_t bytes) {
  constexpr int64_t kKept = int64_t{1} << 22;
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes || (size > kKept && size / 4 > bytes)) {
    memory.reset();
    memory.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{64})));
    size = bytes;
  }
  return memory.get();
}

// Makes the system provide the pages of fresh memory, each next to the thread that touches it: where a machine has
// several memories, those who read a matrix find its parts spread over all of them. Cut as a kernel cuts the matrix.
extern "C" __attribute__((visibility("default"))) void pdkernels_touch(char* memory, int64_t bytes) {
  constexpr int64_t kHuge = int64_t{1} << 21, kPage = int64_t{1} << 12;
  pdkernels::cpu::parallel_for(0, (bytes + kHuge - 1) / kHuge, 1, [&](int64_t from, int64_t to) {
    const int64_t end = std::min(to * kHuge, bytes);
    for (int64_t at = from * kHuge; at < end; at += kPage) *static_cast<volatile char*>(memory + at) = 0;
  });
}

#endif
