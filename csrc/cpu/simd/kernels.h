// The families whose kernels are compiled once for every level of CpuIsa, and what the rest of the library provides for
// them.
#pragma once

#include <cstdint>

#include "ops/feature_cache.h"
#include "ops/filter_logits.h"
#include "ops/grouped_linear.h"
#include "ops/kv_cache.h"
#include "ops/linear.h"
#include "ops/logit_divergence.h"
#include "ops/quantized_linear.h"
#include "ops/recurrence.h"
#include "ops/speculative_attention.h"
#include "ops/token_statistics.h"
#include "ops/transformer_ops.h"

namespace pdkernels::cpu {

// At least `bytes` of this thread's memory, aligned to 64 bytes. It stays with the thread; the next call may move it.
// As with the thread pool, the bindings define it.
char* thread_scratch(int64_t bytes);

}  // namespace pdkernels::cpu
