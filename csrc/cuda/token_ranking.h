// The first tokens of a row, whose regions' largest logits are known. The k largest logits are in the k regions with
// the largest maxima, so only these are read again, by all threads of a block.
#pragma once

#include "token_regions.h"

namespace pdkernels::cuda {

constexpr int kListed = 64;  // keys, two for each lane of a warp

struct RankingScratch {
  uint64_t keys[kListed];
  uint64_t largest[kRowWarps];
  int listed;
};

// The `count` largest of the keys that the lanes hold, the i-th in lane i, padded with 0. `head` is a lane's largest
// key, next(key) its next smaller one.
template <class Next>
__device__ uint64_t warp_first(int count, uint64_t head, const Next& next) {
  uint64_t mine = 0;
  for (int i = 0; i < count; ++i) {
    const uint64_t key = warp_largest(head);
    if (key == 0) break;
    if (key == head) head = next(key);
    if (static_cast<int>(threadIdx.x % 32) == i) mine = key;
  }
  return mine;
}

// The first `ranked` regions by their largest logits, the i-th in lane i.
__device__ inline uint64_t first_regions(const Region* regions, int count, int ranked) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint64_t larger = 0, smaller = 0;  // the lane's first two
  for (int c = lane; c < count; c += 32) {
    const uint64_t key = token_key(regions[c].largest, c);
    smaller = key > larger ? larger : key > smaller ? key : smaller;
    larger = key > larger ? key : larger;
  }
  return warp_first(ranked, larger, [&](uint64_t taken) {
    if (taken == larger) return smaller;
    uint64_t best = 0;
    for (int c = lane; c < count; c += 32) {
      const uint64_t key = token_key(regions[c].largest, c);
      if (key < taken && key > best) best = key;
    }
    return best;
  });
}

// Calls body(key) for the tokens of a pack that begins at token `begin`.
template <class T, class Body>
__device__ void for_keys(const TokenStatisticsArgs& args, const Passing& passing, int64_t begin, int4 pack,
                         const Body& body) {
  float values[Row<T>::kSize];
  Row<T>{nullptr, 0, passing, true}.floats(args, begin, pack, values);
#pragma unroll
  for (int j = 0; j < Row<T>::kSize; ++j) body(token_key(values[j], begin + j));
}

// Lists the keys of a pack from min_key on, as far as there is room. Not inlined: it is long, and few packs need it.
template <class T>
__attribute__((noinline)) static __device__ void list_keys(const TokenStatisticsArgs& args, RankingScratch& scratch,
                                                           Passing passing, int64_t begin, int4 pack,
                                                           uint64_t min_key) {
  for_keys<T>(args, passing, begin, pack, [&](uint64_t key) {
    if (key == 0 || key < min_key) return;
    const int at = atomicAdd(&scratch.listed, 1);
    if (at < kListed) scratch.keys[at] = key;
  });
}

// The tokens of the regions `first`, by the threads of a block. A thread has the same packs of each region.
template <class T>
struct Ranking {
  static constexpr int kSize = Row<T>::kSize, kTurns = kRegion / kSize / kRowThreads, kAbreast = 8;
  static_assert(kTurns > 0 && kAbreast % kTurns == 0);

  const TokenStatisticsArgs& args;
  Row<T> row;
  uint64_t first;  // regions, the i-th in lane i
  int ranked;

  __device__ int64_t token(uint64_t region_key, int turn) const {
    return key_id(region_key) * kRegion + (turn * kRowThreads + static_cast<int64_t>(threadIdx.x)) * kSize;
  }
  __device__ uint64_t region(int i) const { return __shfl_sync(kAll, first, i); }

  // Lists the keys from min_key on. The last warp does something else while its loads are under way.
  template <class Meanwhile>
  __device__ void list(RankingScratch& scratch, uint64_t min_key, const Meanwhile& meanwhile) const {
    for (int begin = 0; begin < ranked * kTurns; begin += kAbreast) {
      int4 packs[kAbreast];
      uint64_t keys[kAbreast];
#pragma unroll
      for (int i = 0; i < kAbreast; ++i) {
        keys[i] = region((begin + i) / kTurns);  // 0 from `ranked` on
        if (keys[i] != 0) packs[i] = row.load(token(keys[i], i % kTurns));
      }
      if (begin == 0 && threadIdx.x / 32 == kRowWarps - 1) meanwhile();
#pragma unroll
      for (int i = 0; i < kAbreast; ++i) {
        if (keys[i] == 0 || token_key(peak(packs[i]), 0) < min_key) continue;
        list_keys<T>(args, scratch, row.passing, token(keys[i], i % kTurns), packs[i], min_key);
      }
    }
  }

  __device__ static float peak(int4 pack) {
    const uint32_t larger =
        Word<T>::larger(Word<T>::larger(static_cast<uint32_t>(pack.x), static_cast<uint32_t>(pack.y)),
                        Word<T>::larger(static_cast<uint32_t>(pack.z), static_cast<uint32_t>(pack.w)));
    const float x = Word<T>::at(larger, 0), y = Word<T>::at(larger, 4 / sizeof(T) - 1);
    return x != x || y != y ? NAN : fmaxf(x, y);
  }

  // The first tokens where too many may be among them, such as equal ones: one after the other.
  __device__ uint64_t one_by_one(RankingScratch& scratch) const {
    uint64_t mine = 0, max_key = ~uint64_t{0};  // which a NaN of token 0 has
#pragma unroll 1
    for (int i = 0; i < ranked; ++i) {
      uint64_t best = 0;
#pragma unroll 1
      for (int pack = 0; pack < ranked * kTurns; ++pack) {
        const uint64_t place = region(pack / kTurns);
        if (place == 0) break;
        const int64_t begin = token(place, pack % kTurns);
        for_keys<T>(args, row.passing, begin, row.load(begin), [&](uint64_t key) {
          if (key <= max_key && key > best) best = key;
        });
      }
      best = warp_largest(best);
      if (threadIdx.x % 32 == 0) scratch.largest[threadIdx.x / 32] = best;
      __syncthreads();
      best = warp_largest(scratch.largest[threadIdx.x % kRowWarps]);
      __syncthreads();  // it is overwritten next
      if (best == 0) break;
      max_key = best - 1;
      if (static_cast<int>(threadIdx.x % 32) == i) mine = best;
    }
    return mine;
  }

  // The first tokens, the i-th in lane i of every warp. Two of the listed keys are in each lane. A counter into a list
  // of a lane's own would be simpler, but ptxas (12.0 to 13.5) adds its increment twice to the address:
  // tests/harness/increments.py.
  template <class Meanwhile>
  __device__ uint64_t tokens(RankingScratch& scratch, const Meanwhile& meanwhile) const {
    // At least as many tokens as requested reach the largest logit of the last region, so no smaller one is among the
    // first.
    const uint64_t min_key = __shfl_sync(kAll, first, ranked - 1) >> 32 << 32;
    list(scratch, min_key, meanwhile);
    __syncthreads();
    if (scratch.listed > kListed) return one_by_one(scratch);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint64_t a = lane < scratch.listed ? scratch.keys[lane] : 0;
    const uint64_t b = lane + 32 < scratch.listed ? scratch.keys[lane + 32] : 0;
    const uint64_t larger = a > b ? a : b, smaller = a > b ? b : a;
    return warp_first(ranked, larger, [&](uint64_t key) { return key == larger ? smaller : 0; });
  }
};

}  // namespace pdkernels::cuda
