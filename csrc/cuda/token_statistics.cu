// Vocabulary statistics on CUDA. A warp reads a region of a row once, keeps its logits in registers, and stores the
// largest logit, float sums relative to it, and the token that it sampled, without any barrier. One block per row then
// merges the regions in double precision and ranks tokens. The k largest logits are in the k regions with the largest
// maxima, so only these are read again. With filters of the distribution, another kernel first finds the logits that
// pass them; before that, one writes rows whose logits are filtered themselves.
#include "launch.h"
#include "logit_filters.h"
#include "token_cut.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps * kRegion == kVocabularyPart);

// Writes the filtered rows to the workspace, from which the other kernels then read them.
template <class T>
__global__ void __launch_bounds__(kFilterThreads)
    token_filter_kernel(const __grid_constant__ TokenStatisticsArgs args) {
  const int64_t pieces = (args.width + kFilterPiece - 1) / kFilterPiece;
  const int64_t r = blockIdx.x / pieces, begin = blockIdx.x % pieces * kFilterPiece;
  if (args.source(r) < 0) return;
  filter_piece(args.filters, r, args.logits_of<T>(r), begin, args.width, args.workspace + r * args.width);
}

template <class T, bool kPacks, bool kDraws>
__global__ void __launch_bounds__(kThreads) token_region_kernel(const __grid_constant__ TokenStatisticsArgs args) {
  const unsigned num_parts = static_cast<unsigned>(args.num_parts());
  const int64_t r = blockIdx.x / num_parts;
  const int64_t region = static_cast<int64_t>(blockIdx.x % num_parts) * kWarps + threadIdx.x / 32;
  if (args.source(r) < 0 || region >= num_regions(args)) return;
  const Passing passing = args.filtered() ? args.passing[r] : all_pass();
  const Row<T> row{args.logits_of<T>(r), args.width, args.sampling ? passing : all_pass(), kPacks};
  const Share<T> share(args, row, region);
  Region found = {};
  found.largest = warp_peak(share.peak());
  found.sampled = kNoToken;
  if (found.largest != -INFINITY) {
    const Exponents exponents(found.largest, args.inv_temperature());
    float total, weighted;
    share.template add<false>(exponents, total, weighted);
    if (__any_sync(kAll, weighted != weighted)) share.template add<true>(exponents, total, weighted);
    found.total = warp_sum(total), found.weighted = warp_sum(weighted);
    if constexpr (kDraws) {
      const Row<T> possible{row.logits, row.width, passing, kPacks};
      if (found.largest < INFINITY && !(found.largest < passing.low)) sample(args, r, region, possible, found);
    }
  }
  if (threadIdx.x % 32 == 0) regions_of(args, r)[region] = found;
}

// --- a row

// The difference between a region's exponents and those of the row, whose largest logit is given.
__device__ double drop_of(const Region& region, float largest, double inv_temperature) {
  return (static_cast<double>(region.largest) - largest) * (inv_temperature * kLog2E);
}

// Merges the sums of a row's regions in every lane.
__device__ DistributionSums joined(const Region* regions, int64_t count, float largest, double inv_temperature) {
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

// The sampled token: the best exact score among the regions whose rough scores are close to the best.
__device__ Sampled sampled_of(const TokenStatisticsArgs& args, int64_t r, const Region* regions, int64_t count,
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

// As warp_first, over the keys `found` so far, one per lane, and the lanes' own keys.
template <class Next>
__device__ uint64_t warp_first_with(int count, uint64_t found, uint64_t offered, const Next& next) {
  return warp_first(count, found > offered ? found : offered, [&](uint64_t key) {
    if (key == found) found = 0;
    if (key == offered) offered = next(key);
    return found > offered ? found : offered;
  });
}

// The first tokens of a row. Warps share the regions that may hold one of them.
template <class T, bool kPacks>
__device__ uint64_t ranked_tokens(const TokenStatisticsArgs& args, int64_t r, const Region* regions, int64_t count,
                                  uint64_t (&scratch)[kWarps][kMaxTopK]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ranked = args.num_ranked();
  uint64_t first = 0;  // regions by their largest logits, the i-th in lane i
  for (int64_t c = 0; c < count; c += 32) {
    const uint64_t key = c + lane < count ? token_key(regions[c + lane].largest, c + lane) : 0;
    first = warp_first_with(ranked, first, key, [](uint64_t) { return uint64_t{0}; });
  }
  // At least as many tokens as requested reach the largest logit of the last region, so no smaller one is among the
  // first.
  const uint64_t min_key = __shfl_sync(kAll, first, ranked - 1) >> 32 << 32;
  const Passing passing = args.sampling && args.filtered() ? args.passing[r] : all_pass();
  const Row<T> row{args.logits_of<T>(r), args.width, passing, kPacks};
  uint64_t top = 0;
  for (int i = warp; i < ranked; i += kWarps) {
    const uint64_t key = __shfl_sync(kAll, first, i);
    if (key == 0) break;
    const int64_t region = key_id(key);
    const Share<T> share(args, row, region);  // all loads at once: one after the other took most of the time
    const auto next = [&](uint64_t taken) { return share.largest_key(region, taken - 1, min_key); };
    top = warp_first_with(ranked, top, share.largest_key(region, ~uint64_t{0}, min_key), next);
  }
  if (lane < kMaxTopK) scratch[warp][lane] = top;
  __syncthreads();
  // Two of the warps' keys in each lane. A counter into a list of its own would be simpler, but ptxas (12.0 to 13.5)
  // adds its increment twice to the address: tests/harness/increments.py.
  static_assert(kWarps * kMaxTopK == 64);
  const uint64_t* const keys = scratch[0];
  return warp_first_with(ranked, keys[lane], keys[lane + 32], [](uint64_t) { return uint64_t{0}; });
}

template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 4)
    token_row_kernel(const __grid_constant__ TokenStatisticsArgs args) {
  __shared__ uint64_t scratch[kWarps][kMaxTopK];
  const int64_t r = blockIdx.x, count = args.source(r) < 0 ? 0 : num_regions(args);
  const Region* regions = regions_of(args, r);
  const uint64_t top =
      ranked_tokens<T, kPacks>(args, r, regions, count, scratch);  // the i-th token of the row in lane i
  if (threadIdx.x >= 32) return;

  const int lane = threadIdx.x, top_k = args.top_k;
  const uint64_t first = __shfl_sync(kAll, top, 0), second = __shfl_sync(kAll, top, 1);
  const bool missing = first == 0, undefined = !missing && !(key_logit(first) < INFINITY);
  const double inv_temperature = args.inv_temperature();
  const bool defined = !missing && !undefined;
  const DistributionSums sums =
      defined ? joined(regions, count, key_logit(first), inv_temperature) : DistributionSums{-INFINITY, 0, 0};
  const uint64_t chosen =
      args.samples_token() && defined ? sampled_of(args, r, regions, count, sums.largest).key : first;
  const auto probability = [&](uint64_t key) -> float {
    if (undefined) return NAN;
    return key == 0 ? 0.0f
                    : static_cast<float>(exp((static_cast<double>(key_logit(key)) - sums.largest) * inv_temperature) /
                                         sums.total);
  };
  // The possible tokens are followed by the dropped ones, the lowest id first.
  const int possible = __popc(__ballot_sync(kAll, top != 0));
  int64_t id = key_id(top);
  int filled = possible;
  for (int64_t other = 0; filled < top_k; ++other) {
    if (__any_sync(kAll, lane < possible && id == other)) continue;
    if (lane == filled) id = other;
    ++filled;
  }
  if (lane < top_k) {
    args.top_ids[r * top_k + lane] = missing ? -1 : id;
    args.top_probs[r * top_k + lane] = probability(top);
  }
  if (lane != 0) return;
  const auto number = [&](double x) { return static_cast<float>(undefined ? NAN : missing ? 0.0 : x); };
  args.ids[r] = missing ? -1 : key_id(chosen);
  args.probs[r] = probability(chosen);
  args.entropy[r] = number(log(sums.total) - sums.weighted / sums.total);
  args.logsumexp[r] = missing ? -INFINITY : number(sums.largest * inv_temperature + log(sums.total));
  args.margin[r] =
      number((0 - expm1((static_cast<double>(key_logit(second)) - sums.largest) * inv_temperature)) / sums.total);
}

template <class T, bool kPacks>
void launch_rows(const TokenStatisticsArgs& args, cudaStream_t stream) {
  constexpr int kSize = kPacks ? 16 / sizeof(T) : 1;
  const dim3 rows(static_cast<unsigned>(args.rows)), parts(static_cast<unsigned>(args.rows * args.num_parts()));
  if (args.filtered()) PDK_LAUNCH((token_cut_kernel<T, kSize>), rows, dim3(kCutThreads), 0, stream, args);
  if (args.samples_token()) {
    PDK_LAUNCH((token_region_kernel<T, kPacks, true>), parts, dim3(kThreads), 0, stream, args);
  } else {
    PDK_LAUNCH((token_region_kernel<T, kPacks, false>), parts, dim3(kThreads), 0, stream, args);
  }
  PDK_LAUNCH((token_row_kernel<T, kPacks>), rows, dim3(kThreads), 0, stream, args);
}

}  // namespace

cudaError_t token_statistics(const TokenStatisticsArgs& given, cudaStream_t stream) {
  TokenStatisticsArgs args = given;
  if (given.filters.any()) {
    const int64_t pieces = (given.width + kFilterPiece - 1) / kFilterPiece;
    const dim3 blocks(static_cast<unsigned>(given.rows * pieces));
    with_element(given.element, [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      PDK_LAUNCH(token_filter_kernel<T>, blocks, dim3(kFilterThreads), 0, stream, given);
    });
    args.logits = {given.workspace, given.width};
    args.element = Element::kFloat;
    args.staged = true;
  }
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    if (args.width % (16 / sizeof(T)) == 0 && in_packs<T>(args.logits)) {
      launch_rows<T, true>(args, stream);
    } else {
      launch_rows<T, false>(args, stream);
    }
  });
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
