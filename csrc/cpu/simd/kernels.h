// The kernels of this folder, each compiled once for every level of CpuIsa, and what the rest of the library gives
// them.
#pragma once

#include <cstdint>

#include "pdkernels/feature_cache.h"
#include "pdkernels/logit_divergence.h"
#include "pdkernels/recurrence.h"
#include "pdkernels/speculative_attention.h"
#include "pdkernels/token_statistics.h"
#include "pdkernels/transformer_ops.h"

namespace pdkernels::cpu {

// At least `bytes` of this thread's memory, aligned to 64 bytes. It stays with the thread; the next call may move it.
// As with the thread pool, the bindings define it.
char* thread_scratch(int64_t bytes);

#define PDK_DECLARE_SIMD_KERNELS(isa)                                  \
  namespace isa {                                                      \
  void recurrence_inject(const InjectArgs& args);                      \
  void recurrence_exit(const ExitArgs& args);                          \
  void block_sparse_attention(const AttentionArgs& args);              \
  void block_sparse_attention_backward(const AttentionGradArgs& args); \
  void speculative_attention(const SpeculativeArgs& args);             \
  void add_rms_norm(const AddRmsNormArgs& args);                       \
  void silu_and_mul(const SiluAndMulArgs& args);                       \
  void apply_rope_append(const ApplyRopeAppendArgs& args);             \
  void apply_rope(const ApplyRopeArgs& args);                          \
  void logit_divergence(const LogitDivergenceArgs& args);              \
  void select_stale_rows(const StaleRowsArgs& args);                   \
  void add_cached_rows(const AddCachedArgs& args);                     \
  void token_statistics(const TokenStatisticsArgs& args);              \
  }
PDK_DECLARE_SIMD_KERNELS(portable)
PDK_DECLARE_SIMD_KERNELS(avx2)
PDK_DECLARE_SIMD_KERNELS(avx512)
#undef PDK_DECLARE_SIMD_KERNELS

// AMX multiplies tiles for attention. Its other kernels are those of AVX-512 (`simd_units` in setup.py).
namespace amx {
void block_sparse_attention(const AttentionArgs& args);
void block_sparse_attention_backward(const AttentionGradArgs& args);
void speculative_attention(const SpeculativeArgs& args);
using avx512::add_cached_rows;
using avx512::add_rms_norm;
using avx512::apply_rope;
using avx512::apply_rope_append;
using avx512::logit_divergence;
using avx512::recurrence_exit;
using avx512::recurrence_inject;
using avx512::select_stale_rows;
using avx512::silu_and_mul;
using avx512::token_statistics;
}  // namespace amx

}  // namespace pdkernels::cpu
