// The statistics of a row, by a cluster of blocks. A warp reads a region of the row once, keeps its logits in
// registers, and stores the largest logit, float sums relative to it, and the token that it sampled, without any
// barrier. When all warps have met, the first block merges the regions in double precision and ranks tokens. A region's
// results do not depend on who computed it, nor does the order in which they are merged, so a row gets the same bits
// from any number of blocks.
#pragma once

#include "cluster.h"
#include "token_ranking.h"

namespace pdkernels::cuda {

struct RowScratch {
  Region regions[kHeld];
  RankingScratch ranking;
  DistributionSums sums;
  uint64_t sampled;
};

// The sampled token: the best exact score among the regions whose rough scores are close to the best.
__device__ inline Sampled sampled_of(const TokenStatisticsArgs& args, int64_t r, const Region* regions, int64_t count,
                                     float largest) {
  const double inv_temperature = 1 / args.temperature;
  const auto score_of = [&](const Region& region) { return drop_of(region, largest, inv_temperature) + region.score; };
  double best = -INFINITY;
  for (int64_t c = threadIdx.x % 32; c < count; c += 32) {
    if (regions[c].sampled != kNoToken) best = fmax(best, score_of(regions[c]));
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) best = fmax(best, __shfl_xor_sync(kAll, best, lanes));
  const float margin = margin_of(Exponents(largest, inv_temperature));
  Sampled sampled{0, 0};
  for (int64_t c = threadIdx.x % 32; c < count; c += 32) {
    const Region& region = regions[c];
    if (region.sampled == kNoToken || score_of(region) + margin < best) continue;
    sampled.join(exact_score(args, r, region.sampled, region.logit), token_key(region.logit, region.sampled));
  }
  return warp_winner(sampled);
}

// What is stored for a row. `top`: its first tokens, the i-th in lane i; `chosen`: the token of its result.
struct RowResults {
  const TokenStatisticsArgs& args;
  int64_t r;
  bool missing, undefined;  // no token is possible; there is no distribution
  DistributionSums sums;
  uint64_t top, chosen;

  __device__ double exponent(uint64_t key) const {
    return (static_cast<double>(key_logit(key)) - sums.largest) * args.inv_temperature();
  }
  __device__ float probability(uint64_t key) const {
    if (undefined) return NAN;
    return key == 0 ? 0.0f : static_cast<float>(exp(exponent(key)) / sums.total);
  }
  __device__ float number(double x) const { return static_cast<float>(undefined ? NAN : missing ? 0.0 : x); }

  __device__ void store_tokens() const {
    const int lane = static_cast<int>(threadIdx.x % 32), top_k = args.top_k;
    // The possible tokens are followed by the dropped ones, the lowest id first.
    const int possible = __popc(__ballot_sync(kAll, top != 0));
    int64_t id = key_id(top);
    int filled = possible;
    for (int64_t other = 0; filled < top_k; ++other) {
      if (__any_sync(kAll, lane < possible && id == other)) continue;
      if (lane == filled) id = other;
      ++filled;
    }
    const float prob = probability(lane < top_k ? top : chosen);
    if (lane < top_k) {
      args.top_ids[r * top_k + lane] = missing ? -1 : id;
      args.top_probs[r * top_k + lane] = prob;
    } else if (lane == top_k) {
      args.ids[r] = missing ? -1 : key_id(chosen);
      args.probs[r] = prob;
    }
  }
  __device__ void store_margin() const {
    const uint64_t second = __shfl_sync(kAll, top, 1);
    if (threadIdx.x % 32 == 0) args.margin[r] = number((0 - expm1(exponent(second))) / sums.total);
  }
  __device__ void store_sums() const {
    if (threadIdx.x % 32 != 0) return;
    const double log_total = log(sums.total);
    args.entropy[r] = number(log_total - sums.weighted / sums.total);
    args.logsumexp[r] = missing ? -INFINITY : number(sums.largest * args.inv_temperature() + log_total);
  }
};

template <class T, bool kPacks, bool kDraws>
__global__ void __launch_bounds__(kRowThreads, kResident<T>)
    token_row_kernel(const __grid_constant__ TokenStatisticsArgs args) {
  __shared__ RowScratch scratch;
  const Cluster cluster;
  cluster.start();
  const int64_t r = blockIdx.x / cluster.size;
  const int count = args.source(r) < 0 ? 0 : static_cast<int>(num_regions(args)), warp = threadIdx.x / 32;
  Region* const regions = count <= kHeld ? cluster.shared_of(scratch.regions, 0) : regions_of(args, r);
  const Passing passing = count != 0 && args.filtered() ? args.passing[r] : all_pass();
  const Row<T> row{count != 0 ? args.logits_of<T>(r) : nullptr, args.width, args.sampling ? passing : all_pass(),
                   kPacks};

  const int size = static_cast<int>(cluster.size), rank = static_cast<int>(cluster.rank);
  const auto start = [&] { cluster.started(); };
  for_regions(args, row, warp * size + rank, count, kRowWarps * size, start, [&](int number, const Share<T>& share) {
    Region region = sums_of(share, args.inv_temperature());
    if (kDraws && region.largest > -INFINITY && region.largest < INFINITY && !(region.largest < passing.low))
      sample(args, r, number, Row<T>{row.logits, row.width, passing, kPacks}, region);
    if (threadIdx.x % 32 == 0) regions[number] = region;
  });
  if (threadIdx.x == 0) scratch.ranking.listed = 0;
  cluster.meet();
  if (cluster.rank != 0) return;

  const Ranking<T> ranking{args, row, first_regions(regions, count, args.num_ranked()), args.num_ranked()};
  const uint64_t first_region = __shfl_sync(kAll, ranking.first, 0);
  const bool missing = first_region == 0, undefined = !missing && !(key_logit(first_region) < INFINITY);
  const bool defined = !missing && !undefined;
  const uint64_t top = ranking.tokens(scratch.ranking, [&] {
    const float largest = key_logit(first_region);
    DistributionSums sums{-INFINITY, 0, 0};
    uint64_t sampled = 0;
    if (defined) {
      sums = joined(regions, count, largest, args.inv_temperature());
      if (kDraws) sampled = sampled_of(args, r, regions, count, largest).key;
    }
    if (threadIdx.x % 32 == 0) scratch.sums = sums, scratch.sampled = sampled;
  });
  const uint64_t chosen = kDraws && defined ? scratch.sampled : __shfl_sync(kAll, top, 0);
  const RowResults results{args, r, missing, undefined, scratch.sums, top, chosen};
  if (warp == 0) results.store_tokens();
  if (warp == 1) results.store_margin();
  if (warp == 2) results.store_sums();
}

}  // namespace pdkernels::cuda
