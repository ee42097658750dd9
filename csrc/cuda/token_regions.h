// The region of a row that a warp processes: its largest logit, its sums and its sampled token.
#pragma once

#include "ops/token_statistics.h"
#include "packs.h"

namespace pdkernels::cuda {

constexpr int kRegion = 2048;                 // tokens of a region
constexpr int kLogitsPerLane = kRegion / 32;  // of a region
constexpr uint32_t kNoToken = ~0u;            // no token: ids are smaller
constexpr unsigned kAll = 0xffffffffu;
constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / 32;
constexpr int kHeld = 256;  // regions that shared memory holds; of wider rows they are in memory

// Blocks on an SM. Rows of floats take more registers.
template <class T>
constexpr int kResident = sizeof(T) == 4 ? 1 : 2;

// The results of a region. The sums are of 2^x and x 2^x, x = log2(e) (logit - largest) / temperature.
struct Region {
  float largest;  // -inf if no token is possible, NaN if there is one
  float total, weighted;
  float score;       // of the sampled token in the same units, within half of margin_of
  float logit;       // its logit
  uint32_t sampled;  // the token with the best score, kNoToken for none
};
static_assert(sizeof(Region) * (kVocabularyPart / kRegion) <= sizeof(TokenPart));

__device__ inline int64_t num_regions(const TokenStatisticsArgs& args) { return (args.width + kRegion - 1) / kRegion; }
__device__ inline Region* regions_of(const TokenStatisticsArgs& args, int64_t r) {
  return reinterpret_cast<Region*>(args.parts + r * args.num_parts());
}

// 2^x in one instruction, to two units in the last place; 0 where the result is subnormal.
__device__ inline float power_of_2(float x) {
#ifdef PDKERNELS_CUDASIM
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

constexpr double kLog2E = 1.4426950408889634;

// Logits as exponents of 2 relative to the largest of a region. For large differences the rounding of the factor
// matters, so it is kept as two floats.
struct Exponents {
  float largest, factor, rest;

  __device__ Exponents(float logit, double inv_temperature)
      : largest(logit),
        factor(static_cast<float>(inv_temperature * kLog2E)),
        rest(static_cast<float>(inv_temperature * kLog2E - factor)) {}
  __device__ float of(float logit) const {
    const float distance = logit - largest;
    return fmaf(distance, factor, distance * rest);
  }
};

// Adds 2^x and x 2^x. Below -1000 both are 0; with kClamps even for x = -inf, where x 2^x would be NaN.
template <bool kClamps>
__device__ void add_power(float exponent, float& total, float& weighted) {
  const float x = kClamps ? fmaxf(exponent, -1000.0f) : exponent, power = power_of_2(x);
  total += power;
  weighted = fmaf(x, power, weighted);
}

// --- sums

// The largest x of the warp, NaN if any is NaN.
__device__ inline float warp_peak(float x) {
  const bool undefined = __any_sync(kAll, x != x);
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, lanes));
  return undefined ? NAN : x;
}

__device__ inline uint64_t warp_largest(uint64_t key) {
  const uint32_t high = static_cast<uint32_t>(key >> 32), most = __reduce_max_sync(kAll, high);
  const uint32_t low = __reduce_max_sync(kAll, high == most ? static_cast<uint32_t>(key) : 0u);
  return static_cast<uint64_t>(most) << 32 | low;
}

// One or two logits in a 32-bit word: conversion to float, and the element-wise maximum of two words in one
// instruction, which propagates NaN.
template <class T>
struct Word;
template <>
struct Word<float> {
  static constexpr uint32_t kNothing = 0xff800000u;  // -inf
  __device__ static float at(uint32_t word, int) { return __uint_as_float(word); }
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    const float x = __uint_as_float(a), y = __uint_as_float(b);
    return x != x || x > y ? a : b;  // also b if it is NaN
  }
};
template <>
struct Word<__half> {
  static constexpr uint32_t kNothing = 0xfc00fc00u;
  __device__ static float at(uint32_t word, int j) {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(word));
    return j == 0 ? both.x : both.y;
  }
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    const __half2 both = __hmax2_nan(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const uint32_t&>(both);
  }
};
template <>
struct Word<__nv_bfloat16> {
  static constexpr uint32_t kNothing = 0xff80ff80u;
  __device__ static float at(uint32_t word, int j) { return __uint_as_float(j == 0 ? word << 16 : word & 0xffff0000u); }
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    const __nv_bfloat162 both =
        __hmax2_nan(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
    return reinterpret_cast<const uint32_t&>(both);
  }
};

// A lane has every 32nd pack of a region, whether or not rows are loaded in packs. Tokens past the end of the row,
// suppressed ones and those that do not pass are -inf.
template <class T>
struct Row {
  static constexpr int kSize = 16 / sizeof(T), kPacks = kLogitsPerLane / kSize;
  const T* logits;
  int64_t width;
  Passing passing;
  bool wide;  // packs are aligned and none is partial

  __device__ static int64_t token(int64_t region, int pack) {
    return region * kRegion + (static_cast<int64_t>(pack) * 32 + threadIdx.x % 32) * kSize;
  }

  __device__ int4 load(int64_t first) const {
    if (wide && first < width) return reinterpret_cast<const int4*>(logits)[first / kSize];
    Pack<T, kSize> pack;
#pragma unroll
    for (int j = 0; j < kSize; ++j)
      pack.at[j] = !wide && first + j < width ? logits[first + j] : from_float<T>(-INFINITY);
    return reinterpret_cast<const int4&>(pack);
  }

  // A pack as floats.
  __device__ void floats(const TokenStatisticsArgs& args, int64_t first, int4 loaded, float (&values)[kSize]) const {
    const Pack<T, kSize>& pack = reinterpret_cast<const Pack<T, kSize>&>(loaded);
    const bool suppresses = args.suppresses_in(first, first + kSize);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float x = to_float(pack.at[j]);
      values[j] = passing.drops(x) || (suppresses && args.suppresses_in(first + j, first + j + 1)) ? -INFINITY : x;
    }
  }
};

// The logits of a lane, in registers.
template <class T>
struct Share {
  static constexpr int kSize = Row<T>::kSize, kPacks = Row<T>::kPacks, kInWord = 4 / sizeof(T), kWords = 4 * kPacks;
  uint32_t words[kWords];

  __device__ void load(const Row<T>& row, int64_t region) {
    if (row.wide && (region + 1) * kRegion <= row.width) {
      const int4* from = reinterpret_cast<const int4*>(row.logits) + Row<T>::token(region, 0) / kSize;
#pragma unroll
      for (int pack = 0; pack < kPacks; ++pack) put(pack, from[pack * 32]);
    } else {
#pragma unroll
      for (int pack = 0; pack < kPacks; ++pack) put(pack, row.load(Row<T>::token(region, pack)));
    }
  }

  __device__ void hide_dropped(const TokenStatisticsArgs& args, const Row<T>& row, int64_t region) {
    for (int i = 0; i < args.num_suppressed; ++i) {
      const int64_t offset = args.suppress[i] - region * kRegion;
      if (offset < 0 || offset >= kRegion) continue;
      const int pack = static_cast<int>(offset) / kSize, lane = static_cast<int>(threadIdx.x % 32);
      hide([&](int j) { return pack % 32 == lane && j == pack / 32 * kSize + static_cast<int>(offset) % kSize; });
    }
    if (!row.passing.all()) hide([&](int j) { return row.passing.drops(at(j)); });
  }

  __device__ void put(int pack, int4 loaded) {
    words[4 * pack] = static_cast<uint32_t>(loaded.x), words[4 * pack + 1] = static_cast<uint32_t>(loaded.y);
    words[4 * pack + 2] = static_cast<uint32_t>(loaded.z), words[4 * pack + 3] = static_cast<uint32_t>(loaded.w);
  }
  __device__ float at(int j) const { return Word<T>::at(words[j / kInWord], j % kInWord); }

  // Sets the logits to -inf for which hidden(j) holds.
  template <class Hidden>
  __device__ void hide(const Hidden& hidden) {
#pragma unroll
    for (int j = 0; j < kLogitsPerLane; ++j) {
      const uint32_t part = kInWord == 1 ? ~0u : j % 2 == 0 ? 0xffffu : 0xffff0000u;
      uint32_t& word = words[j / kInWord];
      if (hidden(j)) word = (word & ~part) | (Word<T>::kNothing & part);
    }
  }

  __device__ float peak() const {
    uint32_t largest = words[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) largest = Word<T>::larger(largest, words[i]);
    const float x = Word<T>::at(largest, 0), y = Word<T>::at(largest, kInWord - 1);
    return x != x || y != y ? NAN : fmaxf(x, y);
  }

  // Bit i: a logit of the i-th pack may be at least `low`. It is no NaN.
  __device__ unsigned packs_from(float low) const {
    unsigned packs = 0;
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      uint32_t largest = words[4 * pack];
#pragma unroll
      for (int i = 1; i < 4; ++i) largest = Word<T>::larger(largest, words[4 * pack + i]);
      packs |= (Word<T>::at(largest, 0) >= low || Word<T>::at(largest, kInWord - 1) >= low ? 1u : 0u) << pack;
    }
    return packs;
  }

  // Without kClamps the weighted sum is NaN if a logit is -inf.
  template <bool kClamps>
  __device__ void add(const Exponents& exponents, float& total, float& weighted) const {
    total = weighted = 0;
#pragma unroll
    for (int first = 0; first < kLogitsPerLane; first += 8) {
      float few = 0, few_weighted = 0;
#pragma unroll
      for (int j = first; j < first + 8; ++j) add_power<kClamps>(exponents.of(at(j)), few, few_weighted);
      total += few, weighted += few_weighted;
    }
  }
};

// The results of a region but for the sampled token.
template <class T>
__device__ Region sums_of(const Share<T>& share, double inv_temperature) {
  Region region = {};
  region.largest = warp_peak(share.peak());
  region.sampled = kNoToken;
  if (region.largest == -INFINITY) return region;
  const Exponents exponents(region.largest, inv_temperature);
  float total, weighted;
  share.template add<false>(exponents, total, weighted);
  if (__any_sync(kAll, weighted != weighted)) share.template add<true>(exponents, total, weighted);
  region.total = warp_sum(total), region.weighted = warp_sum(weighted);
  return region;
}

// Calls body(region's number, its logits) for every `step`-th region from `number` on, by a warp. The loads of the next
// one are under way while it computes. ready() is called before the first.
template <class T, class Ready, class Body>
__device__ void for_regions(const TokenStatisticsArgs& args, const Row<T>& row, int number, int count, int step,
                            const Ready& ready, const Body& body) {
  Share<T> ahead;
  if (number < count) ahead.load(row, number);
  ready();
#pragma unroll 1
  for (; number < count; number += step) {
    Share<T> share = ahead;
    if (number + step < count) ahead.load(row, number + step);
    share.hide_dropped(args, row, number);
    body(number, share);
  }
}

// The key of the first region of those with the largest logit.
__device__ inline uint64_t warp_largest_region(const Region* regions, int count) {
  uint64_t best = 0;
  for (int c = static_cast<int>(threadIdx.x % 32); c < count; c += 32) {
    const uint64_t key = token_key(regions[c].largest, c);
    best = key > best ? key : best;
  }
  return warp_largest(best);
}

// The difference between a region's exponents and those of the row, whose largest logit is given.
__device__ inline double drop_of(const Region& region, float largest, double inv_temperature) {
  return (static_cast<double>(region.largest) - largest) * (inv_temperature * kLog2E);
}

// Merges the sums of a row's regions in every lane.
__device__ inline DistributionSums joined(const Region* regions, int64_t count, float largest, double inv_temperature) {
  double total = 0, weighted = 0;
  for (int64_t c = threadIdx.x % 32; c < count; c += 32) {
    const Region& region = regions[c];
    const double drop = drop_of(region, largest, inv_temperature), factor = exp2(drop);
    if (factor == 0) continue;
    total += factor * region.total;
    weighted += factor * (region.weighted + drop * region.total);
  }
  return {largest, warp_sum(total), warp_sum(weighted) / kLog2E};
}

// --- sampling

// A token and its Gumbel score. On ties of the score the lower id wins.
struct Sampled {
  double score;
  uint64_t key;

  __device__ void join(double other_score, uint64_t other_key) {
    if (other_key == 0) return;
    if (key != 0 && (score > other_score || (score == other_score && key_id(key) < key_id(other_key)))) return;
    score = other_score, key = other_key;
  }
};

__device__ inline Sampled warp_winner(Sampled sampled) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sampled.join(__shfl_xor_sync(kAll, sampled.score, lanes), __shfl_xor_sync(kAll, sampled.key, lanes));
  }
  return sampled;
}

__device__ inline PhiloxWords words_at(const TokenStatisticsArgs& args, int64_t r, int64_t token) {
  const uint32_t quad = static_cast<uint32_t>((args.first_id + token) / 4);
  return philox4x32({{quad, args.position(r), args.step_of(r), 0}}, args.seeds.key(r));
}

// Not inlined: it is long, and only few tokens need it.
__attribute__((noinline)) static __device__ double exact_score(const TokenStatisticsArgs& args, int64_t r,
                                                               int64_t token, float logit) {
  return gumbel_score(logit, args.temperature, words_at(args, r, token).word[token % 4]);
}

// log2(-ln u) within 1e-5: enough to find the few tokens whose exact score matters.
__device__ inline float rough_noise(uint32_t word) {
  const uint32_t distance = ~word;
  if (distance >= 0x20000000u) return __log2f(-__logf((static_cast<float>(word) + 0.5f) * 0x1p-32f));
  const float d = (static_cast<float>(distance) + 0.5f) * 0x1p-32f;  // 1 - u
  return __log2f(d * (1.0f + d * (0.5f + d * (0.33333333f + d * (0.25f + d * (0.2f + d * 0.16666667f))))));
}

// Twice the error of rough scores: the error of the noise, of exponents down to -40 (lower ones cannot win), and of
// exact scores, which rounding makes equal at low temperatures.
__device__ inline float margin_of(const Exponents& exponents) {
  return 1e-4f + 1e-15f * fabsf(exponents.largest * exponents.factor);
}

// Samples the best token of a region. -ln u is at least 1 - u, so a token cannot win if 1 - u is above
// 2^(its exponent - the best score so far). This test takes no logarithm, and no random word either where the smallest
// possible 1 - u is above the bound. Scores that are too close to compare are computed exactly.
template <class T>
__device__ void sample(const TokenStatisticsArgs& args, int64_t r, int64_t region, const Row<T>& row, Region& found) {
  constexpr int kSize = Row<T>::kSize;
  const Exponents exponents(found.largest, 1 / args.temperature);
  const float margin = margin_of(exponents);
  const uint32_t position = args.position(r), step = args.step_of(r);
  const PhiloxKey key = args.seeds.key(r);
  // The lane's best score so far. The score of the largest logit is at least -4.6, -log2(-ln u) of the smallest u, if
  // it can be sampled.
  float best = -INFINITY, warp_best = row.passing.drops(found.largest) ? -INFINITY : -4.6f, logit = 0;
  uint32_t sampled = kNoToken;
#pragma unroll 1
  for (int pack = 0; pack < Row<T>::kPacks; ++pack) {
    const int64_t first = Row<T>::token(region, pack);
    const float reach = margin - warp_best;
    float values[kSize];
    row.floats(args, first, row.load(first), values);
#pragma unroll
    for (int quad = 0; quad < kSize; quad += 4) {
      float exponent[4], max_exponent = -INFINITY;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        exponent[j] = fmaxf(exponents.of(values[quad + j]), -1000.0f);  // for -inf it may be NaN
        max_exponent = fmaxf(max_exponent, exponent[j]);
      }
      if (max_exponent + reach < -33.1f) continue;
      const int64_t token = first + quad;
      const PhiloxWords words =
          philox4x32({{static_cast<uint32_t>((args.first_id + token) / 4), position, step, 0}}, key);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((static_cast<float>(~words.word[j]) + 0.5f) * 0x1p-32f > power_of_2(exponent[j] + reach)) continue;
        const float score = exponent[j] - rough_noise(words.word[j]), x = values[quad + j];
        if (x == -INFINITY || score + margin < best) continue;
        const uint32_t id = static_cast<uint32_t>(token + j);
        // Ids ascend, so an equal score does not replace the earlier one.
        if (sampled != kNoToken && score < best + margin &&
            !(exact_score(args, r, id, x) > exact_score(args, r, sampled, logit)))
          continue;
        best = score, sampled = id, logit = x;
      }
    }
    float all = best;
    for (int lanes = 16; lanes > 0; lanes /= 2) all = fmaxf(all, __shfl_xor_sync(kAll, all, lanes));
    warp_best = fmaxf(warp_best, all);
  }
  const bool close = sampled != kNoToken && !(best + margin < warp_best);
  const unsigned lanes = __ballot_sync(kAll, close);
  if (lanes == 0) return;
  int winner = __ffs(static_cast<int>(lanes)) - 1;
  if (__popc(lanes) > 1) {
    Sampled exact{0, 0};
    if (close) exact.join(exact_score(args, r, sampled, logit), token_key(logit, sampled));
    const uint32_t id = static_cast<uint32_t>(key_id(warp_winner(exact).key));
    winner = __ffs(static_cast<int>(__ballot_sync(kAll, close && id == sampled))) - 1;
  }
  found.score = __shfl_sync(kAll, best, winner);
  found.logit = __shfl_sync(kAll, logit, winner);
  found.sampled = __shfl_sync(kAll, sampled, winner);
}

}  // namespace pdkernels::cuda
