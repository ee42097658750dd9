// A step of the online softmax for a panel of which only a few lanes are in use, as for one new token: keys lie side by
// side in the vectors of the first product and head elements in those of the second, so that none is mostly empty.
//
// Every sum has the terms of VectorTilesOf and online_softmax in their order: a lane's bits do not depend on which of
// the two takes a chunk.
#pragma once

#include "passes.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// How products of queries and keys become scores.
struct Scoring {
  float scale, softcap;

  float scale_left() const { return softcap == 0 ? scale : 1; }  // after cap()
};

// Capped scores of products, in place; nothing without a cap. For whole vectors.
PDK_APART void cap(float* products, int64_t count, Scoring scoring) {
  if (scoring.softcap == 0) return;
  const float factor = scoring.scale / scoring.softcap;
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec& at = *reinterpret_cast<Vec*>(products + i);
    at = rounded(hyperbolic_tangent(rounded(at * factor)) * scoring.softcap);
  }
}

// Lanes up to which this is faster than a vector of them.
constexpr int64_t kFewLanes = kLanes / 2;

// Elements of keys that are transposed at once, unless a vector of words holds more.
constexpr int64_t kSpan = 32;

// From lane to lane in sums that have head elements side by side.
constexpr int64_t kSumStride = 512;

// Vectors side by side, so that their independent sums hide the latency of an addition and fit into registers.
template <int kLive>
constexpr int kStripVectors = kLive == 1                   ? 8
                              : kLive <= 3                 ? 4
                              : kLanes == 16 && kLive == 4 ? 4
                              : kLanes == 16 || kLive == 4 ? 2
                                                           : 1;

// Cuts n, a multiple of kLanes, into strips of so many vectors; the rest into narrower ones.
template <int kLive, int kWide = kStripVectors<kLive>, class Body>
PDK_INLINE void in_strips(int64_t n, const Body& body, int64_t i = 0) {
  for (; i + kWide * kLanes <= n; i += kWide * kLanes) body(i, Count<kWide>{});
  if constexpr (kWide > 1) in_strips<kLive, kWide / 2>(n, body, i);
}

// Elements that lie in one word of 32 bits, the first in its low bits.
template <class T>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
// The same where values are read: some are cheaper to widen in their order.
template <class T>
constexpr int kValuesPerWord = kPerWord<T>;
template <>
inline constexpr int kValuesPerWord<Code> = 1;
template <>
inline constexpr int kValuesPerWord<Half> = 1;

template <class T>
constexpr int64_t kSpanOf = larger(kSpan, kLanes* kPerWord<T>);

template <int kElement>
PDK_INLINE Vec element_of(Words words, float) {
  return reinterpret_cast<Vec>(words);
}
template <int kElement>
PDK_INLINE Vec element_of(Words words, Bfloat16) {
  return reinterpret_cast<Vec>(kElement == 0 ? words << 16 : words & 0xffff0000u);
}
template <int kElement>
PDK_INLINE Vec element_of(Words words, Code) {
  return __builtin_convertvector(reinterpret_cast<Ints>(words << (24 - 8 * kElement)) >> 24, Vec);
}

// Words of 16-bit floats with the first elements of all words side by side, and then the second ones: there is an
// instruction that widens neighbours.
PDK_INLINE Words sorted(Words words) {
  typedef uint16_t Shorts __attribute__((vector_size(4 * PDK_LANES)));
  Shorts order;
  for (int i = 0; i < 2 * kLanes; ++i) order[i] = static_cast<uint16_t>(i < kLanes ? 2 * i : 2 * (i - kLanes) + 1);
  return reinterpret_cast<Words>(__builtin_shuffle(reinterpret_cast<Shorts>(words), order));
}

// An element of the keys whose words transpose_keys put there.
template <int kElement, class T>
PDK_INLINE Vec keys_of(const Words* words) {
  if constexpr (kPerWord<T> == 2 && kValuesPerWord<T> == 1) {
    return load(reinterpret_cast<const T*>(words) + kElement * kLanes, Whole{});
  } else {
    return element_of<kElement>(*words, T{});
  }
}

// Elements [first, first + kSpanOf) of `count` keys, as [word][kChunk]; keys that are missing are zeros. The same
// elements of the values are on their way meanwhile: a burst of prefetches would fill the processor's queues and stall
// it.
template <class T>
PDK_APART void transpose_keys(const T* const* keys, const T* const* values, int64_t count, int64_t head_dim,
                              int64_t first, Words* to) {
  constexpr int64_t kStep = kLanes * kPerWord<T>;
  const auto put = [&](Ints(&rows)[kLanes], int64_t key) {
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const Words words = reinterpret_cast<Words>(rows[i]);
      to[(i * kChunk + key) / kLanes] = kPerWord<T> == 2 && kValuesPerWord<T> == 1 ? sorted(words) : words;
    }
  };
  for (int64_t d = first; d < smaller(first + kSpanOf<T>, head_dim); d += kStep, to += kChunk) {
    const int64_t elements = smaller(kStep, head_dim - d);
    int64_t key = 0;
    for (; key + kLanes <= count && elements == kStep; key += kLanes) {
      Ints rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        prefetch(values[key + i] + d, 1);
        rows[i] = reinterpret_cast<Ints>(Words(*reinterpret_cast<const LooseWords*>(keys[key + i] + d)));
      }
      put(rows, key);
    }
    for (; key < count; key += kLanes) {
      Ints rows[kLanes] = {};
      for (int64_t i = 0; i < smaller(kLanes, count - key); ++i) {
        __builtin_memcpy(&rows[i], keys[key + i] + d, elements * static_cast<int64_t>(sizeof(T)));
      }
      put(rows, key);
    }
  }
}

// The factors of a row's vectors, one of each lane. They are held and the vectors pass: the other way round, three
// lanes would need a register more than AVX2 has, and sums that go through memory wait twice as long.
template <int kLive>
struct Factors {
  Vec of[kLive];
};
template <int kLive>
PDK_INLINE Factors<kLive> splats(const float* first, int64_t stride) {
  Factors<kLive> factors;
#pragma GCC unroll 8
  for (int lane = 0; lane < kLive; ++lane) factors.of[lane] = splat(first[lane * stride]);
  return factors;
}

// scores[lane][key], in pieces as in VectorTilesOf::scores
template <int kLive, int kPanel, class T>
void few_scores(const T* const* keys, const T* const* values, int64_t count, const float* queries, int64_t head_dim,
                float* transposed, float* scores) {
  const int64_t size = piece_of(head_dim);
  for (int64_t span = 0; span < head_dim; span += kSpanOf<T>) {
    transpose_keys(keys, values, count, head_dim, span, reinterpret_cast<Words*>(transposed));
    for (int64_t piece = span; piece < smaller(span + kSpanOf<T>, head_dim); piece += size) {
      const int64_t end = smaller(piece + size, head_dim);
      const auto strip = [&](int64_t key, auto wide) {
        constexpr int kVectors = decltype(wide)::value;
        Vec sums[kLive][kVectors] = {};
        for (int64_t d = piece; d < end; d += kPerWord<T>) {
          const Words* row = reinterpret_cast<const Words*>(transposed + (d - span) / kPerWord<T> * kChunk + key);
          const auto add = [&](auto element) {
            constexpr int kElement = decltype(element)::value;
            const auto factors = splats<kLive>(queries + (d + kElement) * kPanel, 1);
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) {
              const Vec numbers = keys_of<kElement, T>(row + i);
#pragma GCC unroll 8
              for (int lane = 0; lane < kLive; ++lane) sums[lane][i] += numbers * factors.of[lane];
            }
          };
          add(Count<0>{});
          if constexpr (kPerWord<T> > 1) add(Count<1>{});
          if constexpr (kPerWord<T> > 2) add(Count<2>{}), add(Count<3>{});
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

// Multiplies the values [lane][key] by the scales of the keys' codes.
template <int kLive>
PDK_INLINE void scale_by_codes(const Code* const* keys, int64_t count, int64_t head_dim, float* values) {
  Vec scales[kChunk / kLanes];
  float* const numbers = reinterpret_cast<float*>(scales);
  for (int64_t key = 0; key < count; ++key) numbers[key] = scale_of_codes(keys[key], head_dim);
  for (int64_t key = count; key % kLanes != 0; ++key) numbers[key] = 0;
  for (int lane = 0; lane < kLive; ++lane) {
    for (int64_t key = 0; key < count; key += kLanes) {
      Vec& at = *reinterpret_cast<Vec*>(values + lane * kChunk + key);
      at = rounded(at * scales[key / kLanes]);
    }
  }
}

// scores -> weights of one lane, in place, as in online_softmax
template <bool kExact>
PDK_INLINE void few_weights(float* scores, int64_t count, float scale, float origin) {
  const bool far = !kExact && is_far(origin);
  for (int64_t key = 0; far && key < count; key += kLanes) {
    Vec& at = *reinterpret_cast<Vec*>(scores + key);
    at = exponential<false>(rounded(at * scale) - origin);
  }
  for (int64_t key = 0; !far && key < count; key += kLanes) {
    Vec& at = *reinterpret_cast<Vec*>(scores + key);
    at = kExact ? exponential<true>(at - origin) : exponential<false>(at * scale - origin);
  }
}

// The sums of the lanes' weights in the order of online_softmax; side by side, since each waits for its last addition.
template <int kLive>
PDK_INLINE Vec few_sums(const float* weights, int64_t count) {
  Vec all{};
  float* const sums = reinterpret_cast<float*>(&all);
  int64_t key = 0;
  for (; key + 1 < count; key += 2) {
#pragma GCC unroll 8
    for (int lane = 0; lane < kLive; ++lane) {
      const float* pair = weights + lane * kChunk + key;
      sums[lane] += pair[0] + pair[1];
    }
  }
  for (int lane = 0; key < count && lane < kLive; ++lane) sums[lane] += weights[lane * kChunk + key];
  return all;
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

// The element of a head that is `place`-th in sums of few lanes. Where two share a word, those in low bits come first,
// vector by vector.
template <class T>
PDK_INLINE int64_t element_at(int64_t place, int64_t head_dim) {
  constexpr int64_t kSplit = kLanes * kValuesPerWord<T>;
  if (kValuesPerWord<T> == 1 || place >= head_dim / kSplit * kSplit) return place;
  const int64_t inside = place % kSplit;
  return place - inside + inside % kLanes * kValuesPerWord<T> + inside / kLanes;
}

// sums[d][lane] <-> rows[lane][place of d]
template <class T, int kPanel>
void rows_to_sums(const float* rows, int64_t lanes, int64_t head_dim, float* sums) {
  for (int64_t place = 0; place < head_dim; place += kLanes) {
    Ints square[kLanes] = {};
    for (int64_t lane = 0; lane < lanes; ++lane) {
      square[lane] = *reinterpret_cast<const Ints*>(rows + lane * kSumStride + place);
    }
    transpose(square);
    for (int64_t i = 0; i < smaller(kLanes, head_dim - place); ++i) {
      *reinterpret_cast<Ints*>(sums + element_at<T>(place + i, head_dim) * kPanel) = square[i];
    }
  }
}
template <class T, int kPanel>
void sums_to_rows(const float* sums, int64_t lanes, int64_t head_dim, float* rows) {
  for (int64_t place = 0; place < head_dim; place += kLanes) {
    Ints square[kLanes] = {};
    for (int64_t i = 0; i < smaller(kLanes, head_dim - place); ++i) {
      square[i] = *reinterpret_cast<const Ints*>(sums + element_at<T>(place + i, head_dim) * kPanel);
    }
    transpose(square);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      *reinterpret_cast<Ints*>(rows + lane * kSumStride + place) = square[lane];
    }
  }
}

// rows[lane][d] = rows[lane][d] * alpha[lane] + sum over keys of values[key][d] * weights[lane][key]
//
// Meanwhile the next chunk's keys are prefetched. A wrong guess costs a little bandwidth, in a paged cache for
// instance.
template <int kLive, class T>
void few_accumulate(const T* const* keys, const T* const* values, int64_t count, int64_t head_dim, const float* weights,
                    const Vec& alpha, float* rows) {
  const int64_t ahead = bytes_to_next(keys, count);
  const auto strip = [&](int64_t d, auto wide, const auto& load_vectors) {
    constexpr int kVectors = decltype(wide)::value;
    Vec held[kLive][kVectors] = {};
    for (int64_t key = 0; key < count; ++key) {
      prefetch_row(keys[key] + d, kVectors * kLanes, ahead);
      const auto factors = splats<kLive>(weights + key, kChunk);
      load_vectors(values[key] + d, [&](int i, Vec numbers) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int lane = 0; lane < kLive; ++lane) held[lane][i] += numbers * factors.of[lane];
      });
    }
    for (int lane = 0; lane < kLive; ++lane) {
      Vec* sum = reinterpret_cast<Vec*>(rows + lane * kSumStride + d);
      for (int i = 0; i < kVectors; ++i) sum[i] = sum[i] * alpha[lane] + held[lane][i];
    }
  };
  constexpr int64_t kWhole = kLanes * kValuesPerWord<T>;
  const int64_t whole = head_dim / kWhole * kWhole;
  in_strips<kLive>(whole, [&](int64_t d, auto wide) {
    constexpr int kVectors = decltype(wide)::value;
    if constexpr (kVectors % kValuesPerWord<T> == 0) {
      strip(d, wide, [](const T* from, const auto& add) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; i += kValuesPerWord<T>) {
          if constexpr (kValuesPerWord<T> == 1) {
            add(i, load(from + i * kLanes, Whole{}));
          } else {
            const Words words = *reinterpret_cast<const LooseWords*>(from + i * kLanes);
            add(i, element_of<0>(words, T{})), add(i + 1, element_of<1>(words, T{}));
          }
        }
      });
    }
  });
  for_vectors(whole, head_dim, [&](int64_t d, auto part) {
    strip(d, Count<1>{}, [&](const T* from, const auto& add) { add(0, load(from, part)); });
  });
}

// A panel with few lanes: the parts of Panel that its steps read and write.
struct FewRows {
  const float* queries;
  Vec *m_i, *l_i;
  int64_t count;
};

// A chunk of keys that every lane of the panel sees.
template <int kLive, bool kExact, class T>
void few_lanes_step(const T* const* keys, const T* const* values, int64_t count, int64_t head_dim, Scoring scoring,
                    float* transposed, float* scores, float* rows, FewRows panel) {
  few_scores<kLive, kLanes>(keys, values, count, panel.queries, head_dim, transposed, scores);
  if constexpr (kIsCode<T>) scale_by_codes<kLive>(keys, count, head_dim, scores);
  for (int lane = 0; lane < kLive; ++lane) cap(scores + lane * kChunk, rounded_up(count, kLanes), scoring);
  const float scale = scoring.scale_left();
  Vec m_i = *panel.m_i;
  for (int lane = 0; lane < kLive; ++lane) {
    m_i[lane] = few_max<kExact>(scores + lane * kChunk, count, scale, m_i[lane]);
  }
  const Vec origin = m_i == -kInfinity ? Vec{} : m_i;
  const Vec alpha = exponential<kExact>(*panel.m_i - origin);
  for (int lane = 0; lane < kLive; ++lane) { few_weights<kExact>(scores + lane * kChunk, count, scale, origin[lane]); }
  // First of all: compilers fuse a product only with a sum in the same basic block.
  const Vec sum = few_sums<kLive>(scores, count);
  *panel.m_i = m_i;
  *panel.l_i = *panel.l_i * alpha + sum;
  if constexpr (kIsCode<T>) scale_by_codes<kLive>(values, count, head_dim, scores);
  few_accumulate<kLive>(keys, values, count, head_dim, scores, alpha, rows);
}

// The same for a number of lanes that is known when it runs.
template <bool kExact, class T>
void few_lanes_step(const T* const* keys, const T* const* values, int64_t count, int64_t head_dim, Scoring scoring,
                    float* transposed, float* scores, float* rows, FewRows panel) {
  const auto take = [&](auto live) {
    few_lanes_step<decltype(live)::value, kExact>(keys, values, count, head_dim, scoring, transposed, scores, rows,
                                                  panel);
  };
  switch (panel.count) {
    case 1: return take(Count<1>{});
    case 2: return take(Count<2>{});
    case 3: return take(Count<3>{});
    case 4: return take(Count<4>{});
    default:  // the others are zeros
      if constexpr (kFewLanes > 6) {
        if (panel.count <= 6) return take(Count<6>{});
      }
      return take(Count<kFewLanes>{});
  }
}

}  // namespace
}  // namespace pdkernels::cpu::PDK_ISA
