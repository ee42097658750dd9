// A step of the online softmax for a panel of which only a few lanes are in use, as for one new token: keys lie side by
// side in the vectors of the first product and head elements in those of the second, so that none is mostly empty.
//
// Every sum has the terms of VectorTilesOf and online_softmax in their order: a lane's bits do not depend on which of
// the two takes a chunk.
#pragma once

#include "passes.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// Lanes up to which this is faster than a vector of them.
constexpr int64_t kFewLanes = kLanes / 2;

// Elements of keys that are transposed at once.
constexpr int64_t kSpan = 32;

// Cuts n, a multiple of kLanes, into strips of so many vectors that their independent sums hide the latency of an
// addition and fit into registers; the rest into narrower ones.
template <int kLive,
          int kWide = kLive == 1   ? 8
                      : kLive <= 3 ? 4
                      : kLive == 4 ? 2
                                   : 1,
          class Body>
PDK_INLINE void in_strips(int64_t n, const Body& body, int64_t i = 0) {
  for (; i + kWide * kLanes <= n; i += kWide * kLanes) body(i, Count<kWide>{});
  if constexpr (kWide > 1) in_strips<kLive, kWide / 2>(n, body, i);
}

// Elements [first, first + kSpan) of `count` keys, as [element][kChunk]; keys that are missing are zeros.
template <class T>
PDK_INLINE void transpose_keys(const T* const* keys, int64_t count, int64_t head_dim, int64_t first, float* to) {
  for (int64_t d = first; d < smaller(first + kSpan, head_dim); d += kLanes, to += kLanes * kChunk) {
    for (int64_t key = 0; key < count; key += kLanes) {
      Ints rows[kLanes] = {};
      const int64_t rest = smaller(kLanes, count - key);
      for (int64_t i = 0; i < rest; ++i) {
        for_vectors(0, smaller(kLanes, head_dim - d),
                    [&](int64_t, auto part) { rows[i] = reinterpret_cast<Ints>(load(keys[key + i] + d, part)); });
      }
      transpose(rows);
      for (int i = 0; i < kLanes; ++i) *reinterpret_cast<Ints*>(to + i * kChunk + key) = rows[i];
    }
  }
}

// scores[lane][key], in pieces as in VectorTilesOf::scores
template <int kLive, int kPanel, class T>
void few_scores(const T* const* keys, int64_t count, const float* queries, int64_t head_dim, float* transposed,
                float* scores) {
  const int64_t size = piece_of(head_dim);
  for (int64_t span = 0; span < head_dim; span += kSpan) {
    transpose_keys(keys, count, head_dim, span, transposed);
    for (int64_t piece = span; piece < smaller(span + kSpan, head_dim); piece += size) {
      const int64_t end = smaller(piece + size, head_dim);
      const auto strip = [&](int64_t key, auto wide) {
        constexpr int kVectors = decltype(wide)::value;
        Vec sums[kLive][kVectors] = {};
        for (int64_t d = piece; d < end; ++d) {
          const Vec* row = reinterpret_cast<const Vec*>(transposed + (d - span) * kChunk + key);
#pragma GCC unroll 8
          for (int lane = 0; lane < kLive; ++lane) {
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) sums[lane][i] += row[i] * queries[d * kPanel + lane];
          }
        }
        for (int lane = 0; lane < kLive; ++lane) {
          Vec* score = reinterpret_cast<Vec*>(scores + lane * kChunk + key);
          for (int i = 0; i < kVectors; ++i) score[i] = piece == 0 ? sums[lane][i] : score[i] + sums[lane][i];
        }
      };
      in_strips<kLive>(rounded_up(count, kLanes), strip);
    }
  }
}

// scores -> weights of one lane, in place, as in online_softmax; their sum in its order
template <bool kExact>
PDK_INLINE float few_weights(float* scores, int64_t count, float scale, float origin) {
  const bool far = !kExact && is_far(origin);
  for (int64_t key = 0; far && key < count; key += kLanes) {
    Vec& at = *reinterpret_cast<Vec*>(scores + key);
    at = exponential<false>(rounded(at * scale) - origin);
  }
  for (int64_t key = 0; !far && key < count; key += kLanes) {
    Vec& at = *reinterpret_cast<Vec*>(scores + key);
    at = kExact ? exponential<true>(at - origin) : exponential<false>(at * scale - origin);
  }
  float sum = 0;
  for (int64_t key = 0; key < count; key += 2) sum += scores[key] + (key + 1 < count ? scores[key + 1] : 0.0f);
  return sum;
}

// The largest of `largest` and of a lane's scaled scores, which replace the scores if they are exact.
template <bool kExact>
PDK_INLINE float few_max(float* scores, int64_t count, float scale, float largest) {
  Vec top = splat(-kInfinity);
  for (int64_t key = 0; key < count; key += kLanes) {
    Vec& at = *reinterpret_cast<Vec*>(scores + key);
    Vec score = rounded(at * scale);
    if (kExact) at = score;
    if (count - key < kLanes) score = choose(mask_of(Part{count - key}), score, splat(-kInfinity));
    top = larger(score, top);
  }
  for (int i = 0; i < kLanes; ++i) largest = top[i] > largest ? top[i] : largest;
  return largest;
}

// sums[d][lane] = sums[d][lane] * alpha[lane] + sum over keys of values[key][d] * weights[lane][key]
template <int kLive, int kPanel, class T>
void few_accumulate(const T* const* values, int64_t count, int64_t head_dim, const float* weights, const Vec& alpha,
                    float* sums) {
  const auto strip = [&](int64_t d, auto wide, auto part) {
    constexpr int kVectors = decltype(wide)::value;
    Vec held[kLive][kVectors] = {};
    for (int64_t key = 0; key < count; ++key) {
      Vec row[kVectors];
      for (int i = 0; i < kVectors; ++i) row[i] = load(values[key] + d + i * kLanes, part);
#pragma GCC unroll 8
      for (int lane = 0; lane < kLive; ++lane) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) held[lane][i] += row[i] * weights[lane * kChunk + key];
      }
    }
    const int64_t elements = smaller(kVectors * kLanes, head_dim - d);
    for (int64_t i = 0; i < elements; ++i) {
      for (int lane = 0; lane < kLive; ++lane) {
        float& sum = sums[(d + i) * kPanel + lane];
        sum = sum * alpha[lane] + held[lane][i / kLanes][i % kLanes];
      }
    }
  };
  const int64_t whole = head_dim / kLanes * kLanes;
  in_strips<kLive>(whole, [&](int64_t d, auto wide) { strip(d, wide, Whole{}); });
  if (whole < head_dim) strip(whole, Count<1>{}, Part{head_dim - whole});
}

// A chunk of keys that every lane of the panel sees.
template <int kLive, class T, class Panel>
void few_lanes_step(const T* const* keys, const T* const* values, int64_t count, int64_t head_dim, float scale,
                    float* transposed, float* scores, Panel& panel) {
  constexpr bool kExact = sizeof(T) == 4;
  for (int64_t key = 0; key < count; ++key) {  // the values arrive while the scores are computed
    const char* row = reinterpret_cast<const char*>(values[key]);
    for (int64_t byte = 0; byte < head_dim * static_cast<int64_t>(sizeof(T)); byte += 64)
      __builtin_prefetch(row + byte);
  }
  few_scores<kLive, kLanes>(keys, count, panel.queries, head_dim, transposed, scores);
  Vec m_i = panel.m_i[0];
  for (int lane = 0; lane < kLive; ++lane) {
    m_i[lane] = few_max<kExact>(scores + lane * kChunk, count, scale, m_i[lane]);
  }
  const Vec origin = m_i == -kInfinity ? Vec{} : m_i;
  const Vec alpha = exponential<kExact>(panel.m_i[0] - origin);
  Vec sum{};
  for (int lane = 0; lane < kLive; ++lane) {
    sum[lane] = few_weights<kExact>(scores + lane * kChunk, count, scale, origin[lane]);
  }
  panel.m_i[0] = m_i;
  panel.l_i[0] = panel.l_i[0] * alpha + sum;
  few_accumulate<kLive, kLanes>(values, count, head_dim, scores, alpha, panel.sums);
}

// Whether the step was taken: not for so many lanes.
template <class T, class Panel>
bool try_few_lanes_step(const T* const* keys, const T* const* values, int64_t count, int64_t head_dim, float scale,
                        float* transposed, float* scores, Panel& panel) {
  const auto take = [&](auto live) {
    few_lanes_step<decltype(live)::value>(keys, values, count, head_dim, scale, transposed, scores, panel);
    return true;
  };
  if (panel.lanes.count > kFewLanes) return false;
  switch (panel.lanes.count) {
    case 1: return take(Count<1>{});
    case 2: return take(Count<2>{});
    case 3: return take(Count<3>{});
    case 4: return take(Count<4>{});
    default: return take(Count<kLanes / 2>{});  // the others are zeros
  }
}

}  // namespace
}  // namespace pdkernels::cpu::PDK_ISA
