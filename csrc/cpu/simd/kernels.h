// The kernels of this folder, each compiled once for every level of CpuIsa, and what the rest of the library gives them.
#pragma once

#include <cstdint>

#include "pdkernels/speculative_attention.h"

namespace pdkernels::cpu {

// At least `bytes` of this thread's memory, aligned to 64 bytes. It stays with the thread; the next call may move it. As with the
// thread pool, the bindings define it.
char* thread_scratch(int64_t bytes);

#define PDK_DECLARE_SIMD_KERNELS(isa)                                  \
  namespace isa {                                                      \
  void block_sparse_attention(const AttentionArgs& args);              \
  void block_sparse_attention_backward(const AttentionGradArgs& args); \
  void speculative_attention(const SpeculativeArgs& args);             \
  }
PDK_DECLARE_SIMD_KERNELS(portable)
PDK_DECLARE_SIMD_KERNELS(avx2)
PDK_DECLARE_SIMD_KERNELS(avx512)
PDK_DECLARE_SIMD_KERNELS(amx)
#undef PDK_DECLARE_SIMD_KERNELS

}  // namespace pdkernels::cpu
