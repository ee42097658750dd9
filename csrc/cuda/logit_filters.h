// Filtered logits of a piece of a row, by the threads of a block: see csrc/common/logit_filters.h.
#pragma once

#include "common/logit_filters.h"
#include "elements.h"

namespace pdkernels::cuda {

constexpr int kFilterThreads = 256;
constexpr int64_t kFilterPiece = 4096;  // tokens of a block

// Each product is rounded before it is subtracted, as PyTorch does.
__device__ inline float penalised(const LogitFilters& filters, float x, int32_t count) {
  if (count == 0) return x;
  if (filters.repetition != 1) x = x < 0 ? __fmul_rn(x, filters.repetition) : x / filters.repetition;
  if (count < 0) return x;
  return __fsub_rn(__fsub_rn(x, filters.presence), __fmul_rn(filters.frequency, static_cast<float>(count)));
}

// Writes the tokens [begin, begin + kFilterPiece) of result row r to `out`, the whole row. Ids out of range are none.
template <class T>
__device__ void filter_piece(const LogitFilters& filters, int64_t r, const T* logits, int64_t begin, int64_t width,
                             float* out) {
  const int64_t end = begin + kFilterPiece < width ? begin + kFilterPiece : width;
  const float* bias = filters.bias.given() ? filters.bias.row<float>(r) : nullptr;
  const bool penalises = filters.penalises();
  const auto biased = [&](int64_t id) { return to_float(logits[id]) + (bias != nullptr ? bias[id] : 0.0f); };
  for (int64_t id = begin + threadIdx.x; id < end; id += kFilterThreads) {
    float x = biased(id);
    if (penalises) x = penalised(filters, x, filters.count_of(r, id));
    out[id] = filters.allows(r, id) ? x : -INFINITY;
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; penalises && i < filters.recent.count; i += kFilterThreads) {
    const int64_t id = filters.id_of(filters.recent.at(r, i));
    if (id < begin || id >= end || !filters.allows(r, id)) continue;
    const int32_t count = filters.count_with_recent(r, i);  // 0 for all but the first entry of a token
    if (count != 0) out[id] = penalised(filters, biased(id), count);
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < filters.banned.count; i += kFilterThreads) {
    const int64_t id = filters.banned.at(r, i);
    if (id >= begin && id < end) out[id] = -INFINITY;
  }
}

}  // namespace pdkernels::cuda
