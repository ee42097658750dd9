// Logits of a row as floats, filtered: see csrc/common/logit_filters.h.
#pragma once

#include "common/logit_filters.h"
#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {

typedef int32_t LooseInts __attribute__((vector_size(4 * PDK_LANES), may_alias, aligned(4)));

PDK_INLINE Ints load_ints(const int32_t* from, Whole) { return *reinterpret_cast<const LooseInts*>(from); }
PDK_INLINE Ints load_ints(const int32_t* from, Part part) {
  Ints x{};
  for (int64_t i = 0; i < part.count; ++i) x[i] = from[i];
  return x;
}

// `counts` as in LogitFilters, where -1 and the numbers above 0 are seen tokens. Products are rounded before they are
// subtracted, as PyTorch does.
PDK_INLINE Vec penalised(const LogitFilters& filters, Vec x, Ints counts) {
  const Vec zero{};
  if (filters.repetition != 1) {
    const Vec changed = choose(x < 0, x * filters.repetition, x / filters.repetition);
    x = choose(counts != 0, changed, x);
  }
  const Ints generated = counts > 0;
  if (filters.presence != 0) x -= choose(generated, splat(filters.presence), zero);
  if (filters.frequency != 0) {
    const Vec often = choose(generated, __builtin_convertvector(counts, Vec), zero);
    x -= rounded(often * filters.frequency);
  }
  return x;
}

// Writes the tokens [begin, end) of result row r to `to`. `begin` is a multiple of 32.
template <class T>
PDK_INLINE void filter_range(const LogitFilters& filters, int64_t r, const T* logits, int64_t begin, int64_t end,
                             float* to) {
  const float* bias = filters.bias.given() ? filters.bias.row<float>(r) : nullptr;
  const int32_t* counts = filters.penalises() && filters.counts.given() ? filters.counts.row<int32_t>(r) : nullptr;
  const uint32_t* allowed = filters.allowed.given() ? filters.allowed.row<uint32_t>(r) : nullptr;
  Words bit{};
  for (int lane = 0; lane < kLanes; ++lane) bit[lane] = uint32_t{1} << lane;
  for_vectors(begin, end, [&](int64_t at, auto lanes) {
    Vec x = load(logits + at, lanes);
    if (bias != nullptr) x += load(bias + at, lanes);
    if (counts != nullptr) {
      const Ints count = load_ints(counts + at, lanes);
      if (bits_of(count != 0) != 0) x = penalised(filters, x, count);
    }
    if (allowed != nullptr) {
      const uint32_t bits = allowed[at / 32] >> (at % 32);
      x = choose(reinterpret_cast<Ints>((bits + Words{}) & bit) != 0, x, splat(-kInfinity));
    }
    store(to + (at - begin), x, lanes);
  });
  for (int64_t i = 0; filters.penalises() && i < filters.recent.count; ++i) {
    const int64_t id = filters.id_of(filters.recent.at(r, i));
    if (id < begin || id >= end || !filters.allows(r, id)) continue;
    const int32_t count = filters.count_with_recent(r, i);
    const Vec x = splat(to_float(logits[id])) + (bias != nullptr ? bias[id] : 0.0f);
    if (count != 0) to[id - begin] = penalised(filters, x, splat(count))[0];
  }
  for (int64_t i = 0; i < filters.banned.count; ++i) {
    const int64_t id = filters.banned.at(r, i);
    if (id >= begin && id < end) to[id - begin] = -kInfinity;
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
