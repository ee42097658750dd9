// The filters of vocabulary statistics: a block finds the smallest and the largest logit of a row that pass them.
#pragma once

#include "token_regions.h"

namespace pdkernels::cuda {
constexpr int kCutThreads = kRowThreads;
constexpr int kBins = 2048;

// Masses are integer multiples of 2^-40 of the largest token's mass, so the order of additions does not matter.
using Mass = unsigned long long;
constexpr float kMass = 0x1p40f;

// A mass that many threads add to. Shared memory has native 32-bit atomics; 64-bit ones are compiled to a retry loop.
struct Bin {
  unsigned low, high;

  __device__ void add(Mass mass) {
    const unsigned part = static_cast<unsigned>(mass), carry = atomicAdd(&low, part) > ~part ? 1 : 0;
    const unsigned rest = static_cast<unsigned>(mass >> 32) + carry;
    if (rest != 0) atomicAdd(&high, rest);
  }
  __device__ Mass mass() const { return static_cast<Mass>(high) << 32 | low; }
};

// The most logits of the cut's bin that are kept, to avoid another read of the row. With more, the row is read again.
constexpr int kKept = 2048;

struct CutScratch {
  Region regions[kHeld];
  Bin bins[kBins];
  float kept[kKept];
  float largest[kCutThreads / 32], smallest[kCutThreads / 32];
  double sums[kCutThreads / 32];
  Mass before, target;
  int bin, found;
};

// Calls body(pack) for this thread's part of a row. Suppressed tokens are -inf.
template <class T, int kSize, class Body>
__device__ void for_packs(const TokenStatisticsArgs& args, const T* row, const Body& body) {
  for (int64_t pack = threadIdx.x; pack < args.width / kSize; pack += kCutThreads) {
    Pack<T, kSize> values = Pack<T, kSize>::load(row, pack);
#pragma unroll 1
    for (int i = 0; i < args.num_suppressed; ++i) {
      const int64_t offset = args.suppress[i] - pack * kSize;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (offset == j) values.at[j] = from_float<T>(-INFINITY);
      }
    }
    body(values);
  }
}

// Calls body(logit) for this thread's part of a row.
template <class T, int kSize, class Body>
__device__ void for_share(const TokenStatisticsArgs& args, const T* row, const Body& body) {
  for_packs<T, kSize>(args, row, [&](const Pack<T, kSize>& values) {
    for (int j = 0; j < kSize; ++j) body(to_float(values.at[j]));
  });
}

// Finds the first bin at which the running mass reaches the target. Called by a warp; each lane scans adjacent bins.
__device__ void find_bin(CutScratch& scratch, double share) {
  constexpr int kPerLane = kBins / 32;
  const int lane = threadIdx.x;
  Mass sum = 0;
  for (int i = 0; i < kPerLane; ++i) sum += scratch.bins[lane * kPerLane + i].mass();
  Mass until = sum;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const Mass other = __shfl_up_sync(kAll, until, lanes);
    if (lane >= lanes) until += other;
  }
  const Mass all = __shfl_sync(kAll, until, 31);
  if (share >= 0 && lane == 0)
    scratch.target = 1 + static_cast<Mass>(share * static_cast<double>(all - 1));  // at least the first token's
  __syncwarp();
  const Mass target = scratch.target, before = scratch.before;
  const unsigned reached = __ballot_sync(kAll, before + until >= target);
  if (lane != (reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : 31)) return;
  Mass sofar = before + until - sum;
  int bin = lane * kPerLane;
  for (; bin < lane * kPerLane + kPerLane - 1 && sofar + scratch.bins[bin].mass() < target; ++bin)
    sofar += scratch.bins[bin].mass();
  scratch.bin = bin, scratch.before = sofar;
}

// A block's search among the masses of a row's tokens.
struct Search {
  CutScratch& scratch;

  __device__ void empty_bins() const {
    for (int bin = threadIdx.x; bin < kBins; bin += kCutThreads) scratch.bins[bin] = {0, 0};
    __syncthreads();
  }
  // The first bin at which the running mass reaches the target, which is a share of all masses, or that of the last
  // call if the share is negative.
  __device__ int find(double share) const {
    __syncthreads();
    if (threadIdx.x < 32) find_bin(scratch, share);
    __syncthreads();
    const int bin = scratch.bin;
    __syncthreads();  // the bins are emptied next
    return bin;
  }
  __device__ void restart(Mass target) const {
    __syncthreads();
    if (threadIdx.x == 0) scratch.before = 0, scratch.target = target;
    __syncthreads();
  }
};

__device__ inline uint32_t rank_of(float x) { return static_cast<uint32_t>(token_key(x, 0) >> 32); }

// With 16-bit elements the low bits of a rank carry no information: zeros, or ones if the number is negative.
template <class T>
__device__ float logit_of_rank(uint32_t rank) {
  if (rank == 0) return -INFINITY;
  if (sizeof(T) == 2 && rank >> 31 == 0) rank |= 0x3ffu;
  return key_logit(static_cast<uint64_t>(rank) << 32);
}

// The logit of rank keep_top_k, by the bits of its key.
template <class T, int kSize>
__device__ float kth_largest(const TokenStatisticsArgs& args, const T* row, const Search& search) {
  uint32_t rank = 0;
  search.restart(static_cast<Mass>(args.keep_top_k));
  constexpr int kLevels = sizeof(T) == 2 ? 2 : 3;
  for (int level = 0; level < kLevels; ++level) {
    const int shift = level == 2 ? 0 : level == 1 ? 10 : 21, known = level == 2 ? 10 : level == 1 ? 21 : 32;
    search.empty_bins();
    for_share<T, kSize>(args, row, [&](float x) {
      const uint32_t mine = rank_of(x);
      if (level == 0 || mine >> known == rank >> known)
        search.scratch.bins[kBins - 1 - (mine >> shift & (level == 2 ? 1023 : 2047))].add(1);
    });
    rank |= static_cast<uint32_t>(kBins - 1 - search.find(-1.0)) << shift;
  }
  return logit_of_rank<T>(rank);
}

// A row whose regions' largest logits are measured. Passes over the logits from a bound on skip regions that have none.
template <class T>
struct MeasuredRow {
  const TokenStatisticsArgs& args;
  Row<T> row;
  const Region* regions;
  int count;

  // Calls body(logit) for the logits that are at least `low`.
  template <class Body>
  __device__ void for_from(float low, const Body& body) const {
    const auto next = [&](int number) {
      while (number < count && regions[number].largest < low) number += kRowWarps;
      return number;
    };
    Share<T> ahead;
    int number = next(static_cast<int>(threadIdx.x / 32));
    if (number < count) ahead.load(row, number);
#pragma unroll 1
    while (number < count) {
      const int here = number;
      unsigned packs = ahead.packs_from(low);
      number = next(here + kRowWarps);
      if (number < count) ahead.load(row, number);
      // Few packs are left, and they are in the first-level cache.
      while (packs != 0) {
        const int64_t first = Row<T>::token(here, __ffs(static_cast<int>(packs)) - 1);
        packs &= packs - 1;
        float values[Row<T>::kSize];
        row.floats(args, first, row.load(first), values);
        for (int j = 0; j < Row<T>::kSize; ++j) {
          if (values[j] >= low && values[j] != -INFINITY) body(values[j]);
        }
      }
    }
  }
};

// The most tokens that one would like to look at one by one.
constexpr int kFewTokens = 1024;

// The smallest logit with less than top_p of the mass above it, of the tokens from `least` on. `total` is the mass of
// all tokens relative to the largest one's, 0 if it is that of the tokens from `least` on.
template <class T>
__device__ float nucleus_of(const MeasuredRow<T>& measured, float largest, float least, double total,
                            const Search& search) {
  CutScratch& scratch = search.scratch;
  const TokenStatisticsArgs& args = measured.args;
  const double temperature = args.softmax_temperature();
  const Exponents exponents(largest, 1 / temperature);
  const auto mass_of = [&](float x) { return static_cast<Mass>(power_of_2(exponents.of(x)) * kMass); };
  // A token with less than (1 - top_p) / V of the mass is outside the nucleus. Most often the cut is far above that,
  // among fewer tokens, so those with more than (1 - top_p) / kFewTokens are tried before.
  const auto reach_of = [&](double tokens) {
    return fmin(-1e-5, log((1 - args.top_p) * fmax(total, 1.0) / tokens)) * temperature - 1e-5 * temperature;
  };
  const bool has_total = total > 0, narrow = has_total && (1 - args.top_p) * total < kFewTokens / 4;
  float bins_per_logit;
  int cut_bin;
  for (bool first = narrow;; first = false) {
    const double reach = reach_of(first ? kFewTokens : static_cast<double>(args.width));
    bins_per_logit = static_cast<float>((kBins - 1) / -reach);
    const float low = has_total ? fmaxf(least, static_cast<float>(largest + reach)) : least;
    search.restart(has_total ? 1 + static_cast<Mass>(args.top_p * (total * static_cast<double>(kMass) - 1)) : 0);
    // The first level: bins by the distance to the largest logit, which spreads the masses. What is beyond shares the
    // last.
    search.empty_bins();
    if (threadIdx.x == 0) scratch.found = 0;
    __syncthreads();
    measured.for_from(low, [&](float x) {
      scratch.bins[static_cast<int>(fminf((largest - x) * bins_per_logit, static_cast<float>(kBins - 1)))].add(
          mass_of(x));
      const int at = atomicAdd(&scratch.found, 1);
      if (at < kKept) scratch.kept[at] = x;
    });
    cut_bin = search.find(has_total ? -1.0 : args.top_p);
    if (cut_bin < kBins - 1) break;
    if (!first) return has_total ? low : -INFINITY;
  }

  // The next levels: bins by the bits of the cut's key, so that any number of equal logits fit. Few logits are left,
  // and the order in which they are kept does not matter.
  const auto is_left = [&](float x) {  // whether x is in the bin of the cut
    const float distance = (largest - x) * bins_per_logit;
    return x >= least && distance >= static_cast<float>(cut_bin) && distance < static_cast<float>(cut_bin + 1);
  };
  const float lowest = fmaxf(least, largest - (static_cast<float>(cut_bin) + 2) / bins_per_logit);
  if (scratch.found > kKept) {
    __syncthreads();
    if (threadIdx.x == 0) scratch.found = 0;
    __syncthreads();
    measured.for_from(lowest, [&](float x) {
      if (!is_left(x)) return;
      const int at = atomicAdd(&scratch.found, 1);
      if (at < kKept) scratch.kept[at] = x;
    });
  }
  uint32_t rank = 0;
  constexpr int kLevels = sizeof(T) == 2 ? 3 : 4;
  for (int level = 1; level < kLevels; ++level) {
    const int shift = level == 3 ? 0 : level == 2 ? 10 : 21;
    const int above = level == 1 ? 32 : level == 2 ? 21 : 10;  // the bits from here up are found
    search.empty_bins();
    const auto add = [&](float x) {
      const uint32_t mine = rank_of(x);
      if (is_left(x) && (above == 32 || mine >> above == rank >> above))
        scratch.bins[kBins - 1 - (mine >> shift & (level == 3 ? 1023 : 2047))].add(mass_of(x));
    };
    if (scratch.found <= kKept) {
      for (int at = threadIdx.x; at < scratch.found; at += kCutThreads) add(scratch.kept[at]);
    } else {
      measured.for_from(lowest, add);
    }
    rank |= static_cast<uint32_t>(kBins - 1 - search.find(-1.0)) << shift;
  }
  return logit_of_rank<T>(rank);
}

// The smallest and the largest typical logit of the tokens from `least` on: those closest to the entropy, by the bits
// of their distance to it.
template <class T, int kSize>
__device__ Passing typical_of(const TokenStatisticsArgs& args, const T* row, float largest, float least,
                              const Search& search) {
  CutScratch& scratch = search.scratch;
  const double temperature = args.softmax_temperature();
  const auto exponent_of = [&](float x) { return (static_cast<double>(x) - largest) / temperature; };
  double total = 0, weighted = 0;
  for_share<T, kSize>(args, row, [&](float x) {
    if (x < least || x == -INFINITY) return;
    const double exponent = exponent_of(x), e = exp(exponent);
    total += e;
    if (e > 0) weighted += e * exponent;
  });
  total = block_sum<kCutThreads>(total, scratch.sums);
  weighted = block_sum<kCutThreads>(weighted, scratch.sums);
  const double log_total = log(total), entropy = log_total - weighted / total;
  const auto distance_of = [&](float x) {
    return static_cast<uint64_t>(__double_as_longlong(fabs(log_total - exponent_of(x) - entropy)));
  };
  uint64_t reach = 0;
  search.restart(0);
#pragma unroll 1
  for (int level = 0; level < 6; ++level) {
    // 11 bits at a time, from the exponent down, and at last 8.
    const int shift = level == 5 ? 0 : 52 - 11 * level, known = 63 - 11 * level;
    const uint64_t mask = level == 5 ? 255 : 2047;
    search.empty_bins();
    for_share<T, kSize>(args, row, [&](float x) {
      if (x < least || x == -INFINITY) return;
      const uint64_t distance = distance_of(x);
      if (level != 0 && distance >> known != reach >> known) return;
      scratch.bins[distance >> shift & mask].add(static_cast<Mass>(exp(exponent_of(x)) * kMass));
    });
    reach |= static_cast<uint64_t>(search.find(level == 0 ? args.typical_p : -1.0)) << shift;
  }
  Passing passing{INFINITY, -INFINITY};
  for_share<T, kSize>(args, row, [&](float x) {
    if (x < least || x == -INFINITY || distance_of(x) > reach) return;
    passing.low = fminf(passing.low, x), passing.high = fmaxf(passing.high, x);
  });
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    passing.low = fminf(passing.low, __shfl_xor_sync(kAll, passing.low, lanes));
    passing.high = fmaxf(passing.high, __shfl_xor_sync(kAll, passing.high, lanes));
  }
  if (threadIdx.x % 32 == 0) {
    scratch.smallest[threadIdx.x / 32] = passing.low, scratch.largest[threadIdx.x / 32] = passing.high;
  }
  __syncthreads();
  for (int warp = 0; warp < kCutThreads / 32; ++warp) {
    passing.low = fminf(passing.low, scratch.smallest[warp]), passing.high = fmaxf(passing.high, scratch.largest[warp]);
  }
  return passing;
}

template <class T, int kSize>
__global__ void __launch_bounds__(kCutThreads, kResident<T>)
    token_cut_kernel(const __grid_constant__ TokenStatisticsArgs args) {
  __shared__ CutScratch scratch;
  const int64_t r = blockIdx.x;
  if (args.source(r) < 0) return;
  const T* logits = args.logits_of<T>(r);
  const Row<T> row{logits, args.width, all_pass(), kSize > 1};
  const int count = static_cast<int>(num_regions(args)), warp = static_cast<int>(threadIdx.x / 32);
  Region* const regions = count <= kHeld ? scratch.regions : regions_of(args, r);
  const double inv_temperature = 1 / args.softmax_temperature();
  for_regions(
      args, row, warp, count, kRowWarps, [] {},
      [&](int number, const Share<T>& share) {
        const Region region = sums_of(share, inv_temperature);
        if (threadIdx.x % 32 == 0) regions[number] = region;
      });
  __syncthreads();
  const uint64_t first = warp_largest_region(regions, count);
  const float largest = key_logit(first);
  if (first == 0 || !(largest < INFINITY)) {
    if (threadIdx.x == 0) args.passing[r] = all_pass();
    return;
  }
  const Search search{scratch};
  const double floor = args.min_p > 0 ? largest + args.softmax_temperature() * log(args.min_p) : -INFINITY;
  Passing passing{-INFINITY, INFINITY};
  if (args.keeps_top_k()) passing.low = kth_largest<T, kSize>(args, logits, search);
  if (args.top_p < 1) {
    const MeasuredRow<T> measured{args, row, regions, count};
    const double total = args.keeps_top_k() ? 0 : joined(regions, count, largest, inv_temperature).total;
    passing.low = fmaxf(passing.low, nucleus_of(measured, largest, passing.low, total, search));
  }
  passing.low = fmaxf(passing.low, at_least(floor));
  if (args.typical_p < 1) passing = typical_of<T, kSize>(args, logits, largest, passing.low, search);
  if (threadIdx.x == 0) args.passing[r] = passing;
}

}  // namespace pdkernels::cuda
