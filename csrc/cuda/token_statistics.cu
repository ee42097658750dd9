// Vocabulary statistics on CUDA. A block handles one part of a row, whose logits it holds in registers, so they are
// read once; a warp finds its own first tokens, sums and draw without a barrier, and a second kernel puts the parts of
// a row together. With filters a kernel before them finds the smallest logit that they leave.
#include "launch.h"
#include "packs.h"
#include "pdkernels/token_statistics.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = kVocabularyPart / kThreads;  // tokens of a thread
constexpr unsigned kAll = 0xffffffffu;

__device__ uint64_t warp_largest(uint64_t key) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const uint64_t other = __shfl_xor_sync(kAll, key, lanes);
    key = other > key ? other : key;
  }
  return key;
}

// The `count` first of the keys that the lanes hold, the i-th in lane i, 0 after the last. `head` is a lane's first
// key, next(key) the one that follows in it.
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

// The sums of all lanes, in every lane.
__device__ DistributionSums warp_joined(DistributionSums sums, double inverse) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const DistributionSums other{__shfl_xor_sync(kAll, sums.largest, lanes), __shfl_xor_sync(kAll, sums.total, lanes),
                                 __shfl_xor_sync(kAll, sums.weighted, lanes)};
    sums.join(other, inverse, [](double x) { return exp(x); });
  }
  return sums;
}

// A token with its score in a draw; of equal scores the lower id wins, which has the larger key of equal logits.
struct Drawn {
  double score;
  uint64_t key;

  __device__ void join(double other_score, uint64_t other_key) {
    if (other_key == 0) return;
    if (key != 0 && (score > other_score || (score == other_score && key_id(key) < key_id(other_key)))) return;
    score = other_score, key = other_key;
  }
};

__device__ Drawn warp_winner(Drawn drawn) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    drawn.join(__shfl_xor_sync(kAll, drawn.score, lanes), __shfl_xor_sync(kAll, drawn.key, lanes));
  }
  return drawn;
}

// --- filters: a block finds the smallest logit of a row that they keep

constexpr int kCutThreads = 512;
constexpr int kBins = 2048;

// Masses are whole multiples of 2^-40 of the largest token's, so the order in which they are added does not matter.
using Mass = unsigned long long;
constexpr float kMass = 0x1p40f;

struct CutRoom {
  Mass bins[kBins];
  float largest[kCutThreads / 32];
  Mass before, target;
  int bin;
};

// Calls body(logit) for this thread's part of the tokens that count.
template <class T, int kSize, class Body>
__device__ void for_share(const TokenStatisticsArgs& args, const T* row, const Body& body) {
  for (int64_t pack = threadIdx.x; pack < args.width / kSize; pack += kCutThreads) {
    const Pack<T, kSize> values = Pack<T, kSize>::load(row, pack);
    for (int j = 0; j < kSize; ++j) {
      const int64_t token = pack * kSize + j;
      if (args.num_suppressed == 0 || !args.suppresses_in(token, token + 1)) body(to_float(values.at[j]));
    }
  }
}

// Finds the first bin that has at least the target mass before or in it. A warp; each lane looks at neighbouring bins.
__device__ void find_bin(CutRoom& room, double share) {
  constexpr int kPerLane = kBins / 32;
  const int lane = threadIdx.x;
  Mass sum = 0;
  for (int i = 0; i < kPerLane; ++i) sum += room.bins[lane * kPerLane + i];
  Mass until = sum;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const Mass other = __shfl_up_sync(kAll, until, lanes);
    if (lane >= lanes) until += other;
  }
  const Mass all = __shfl_sync(kAll, until, 31);
  if (share >= 0 && lane == 0)
    room.target = 1 + static_cast<Mass>(share * static_cast<double>(all - 1));  // at least the first token's
  __syncwarp();
  const Mass target = room.target, before = room.before;
  const unsigned reached = __ballot_sync(kAll, before + until >= target);
  if (lane != (reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : 31)) return;
  Mass sofar = before + until - sum;
  int bin = lane * kPerLane;
  for (; bin < lane * kPerLane + kPerLane - 1 && sofar + room.bins[bin] < target; ++bin) sofar += room.bins[bin];
  room.bin = bin, room.before = sofar;
}

template <class T, int kSize>
__global__ void __launch_bounds__(kCutThreads) token_cut_kernel(const __grid_constant__ TokenStatisticsArgs args) {
  __shared__ CutRoom room;
  const int64_t r = blockIdx.x, source = args.source(r);
  if (source < 0) return;
  const T* row = args.logits.row<const T>(source);
  float largest = -INFINITY;
  bool undefined = false;
  for_share<T, kSize>(args, row, [&](float x) {
    largest = x > largest ? x : largest;
    undefined = undefined || x != x;
  });
  for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, lanes));
  if (threadIdx.x % 32 == 0) room.largest[threadIdx.x / 32] = largest;
  if (threadIdx.x == 0) room.before = 0;
  undefined = __syncthreads_or(undefined);
  for (int warp = 0; warp < kCutThreads / 32; ++warp) largest = fmaxf(largest, room.largest[warp]);
  undefined = undefined || largest == INFINITY;
  const double heat = args.heat();
  const double floor = args.min_p > 0 ? largest + heat * log(args.min_p) : -INFINITY;
  if (undefined || largest == -INFINITY || args.top_p >= 1) {
    if (threadIdx.x == 0) args.cuts[r] = undefined ? -INFINITY : at_least(floor);
    return;
  }

  // A token with less than (1 - top_p) / V of the largest token's mass is outside the nucleus: it goes to the last bin.
  const double reach = heat * log((1 - args.top_p) / static_cast<double>(args.width)) - 1e-5 * heat;
  const float slope = static_cast<float>(1 / heat), bins_per_logit = static_cast<float>((kBins - 1) / -reach);
  const auto mass_of = [&](float x) { return static_cast<Mass>(expf((x - largest) * slope) * kMass); };
  const auto place_of = [&](float x) {
    return static_cast<int>(fminf((largest - x) * bins_per_logit, static_cast<float>(kBins - 1)));
  };
  const auto rank_of = [](float x) { return static_cast<uint32_t>(token_key(x, 0) >> 32); };
  int place = 0;      // the bin of the first level, by distance, where masses spread out
  uint32_t rank = 0;  // the bits of the cut's rank that the next levels found: equals may be many there
  constexpr int kLevels = sizeof(T) == 2 ? 3 : 4;
  for (int level = 0; level < kLevels; ++level) {
    const int shift = level == 3 ? 0 : level == 2 ? 10 : 21;
    for (int bin = threadIdx.x; bin < kBins; bin += kCutThreads) room.bins[bin] = 0;
    __syncthreads();
    Mass behind = 0;
    for_share<T, kSize>(args, row, [&](float x) {
      const int near = place_of(x);
      if (level == 0) {
        if (near == kBins - 1) behind += mass_of(x);
        else atomicAdd(&room.bins[near], mass_of(x));
      } else if (near == place && x != -INFINITY) {
        const uint32_t mine = rank_of(x);
        const int known = level == 1 ? 32 : level == 2 ? 21 : 10;  // bits below those that were found
        if (known == 32 || mine >> known == rank >> known)
          atomicAdd(&room.bins[kBins - 1 - (mine >> shift & (level == 3 ? 1023 : 2047))], mass_of(x));
      }
    });
    if (level == 0) {
      behind = warp_sum(behind);
      if (threadIdx.x % 32 == 0) atomicAdd(&room.bins[kBins - 1], behind);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_bin(room, level == 0 ? args.top_p : -1.0);
    __syncthreads();
    if (level == 0) {
      place = room.bin;
    } else {
      rank |= static_cast<uint32_t>(kBins - 1 - room.bin) << shift;
    }
    __syncthreads();  // the bins are emptied next
  }
  // With 16-bit elements the low bits carry no information: zeros, or ones if the number is negative.
  if (sizeof(T) == 2 && rank >> 31 == 0) rank |= 0x3ffu;
  const float nucleus = place == kBins - 1 ? -INFINITY : key_logit(static_cast<uint64_t>(rank) << 32);
  if (threadIdx.x == 0) args.cuts[r] = fmaxf(nucleus, at_least(floor));
}

// --- a part of a row

// The tokens of a thread: packs of neighbours, kThreads packs apart, whether rows are loaded in packs or not.
template <int kSize>
__device__ int64_t token_at(int64_t begin, int i) {
  return begin + (static_cast<int64_t>(i / kSize) * kThreads + threadIdx.x) * kSize + i % kSize;
}

// This thread's logits; -inf past the row and where a token is suppressed or below the cut.
template <class T, bool kPacks>
__device__ void load_share(const TokenStatisticsArgs& args, const T* row, int64_t begin, int64_t end, float cut,
                           float* logits) {
  constexpr int kSize = 16 / sizeof(T);
  const bool suppresses = args.suppresses_in(begin, end);
#pragma unroll
  for (int pack = 0; pack < kEach / kSize; ++pack) {
    const int64_t first = token_at<kSize>(begin, pack * kSize);
    Pack<T, kSize> values = {};
    if constexpr (kPacks) {
      if (first < end) values = Pack<T, kSize>::load(row, first / kSize);
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (first + j < end) values.at[j] = row[first + j];
      }
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      float x = first + (kPacks ? 0 : j) < end ? to_float(values.at[j]) : -INFINITY;
      if (suppresses && args.suppresses_in(first + j, first + j + 1)) x = -INFINITY;
      logits[pack * kSize + j] = x < cut ? -INFINITY : x;
    }
  }
}

// ln(-ln u) within 1e-5: enough to tell the few tokens whose exact score counts.
__device__ float rough_noise(uint32_t word) {
  const uint32_t distance = ~word;
  if (distance >= 0x20000000u) return __logf(-__logf((static_cast<float>(word) + 0.5f) * 0x1p-32f));
  const float d = (static_cast<float>(distance) + 0.5f) * 0x1p-32f;  // 1 - u
  return __logf(d * (1.0f + d * (0.5f + d * (0.33333333f + d * (0.25f + d * (0.2f + d * 0.16666667f))))));
}

template <int kSize>
__device__ Drawn draw(const TokenStatisticsArgs& args, int64_t r, int64_t begin, float cut, const float* logits) {
  const uint32_t position = args.position(r), step = args.step_of(r);
  const PhiloxKey key = args.seeds.key(r);
  const float temperature = static_cast<float>(args.temperature);
  const auto words_at = [&](int64_t token) {
    return philox4x32({{static_cast<uint32_t>((args.first_id + token) / 4), position, step, 0}}, key);
  };
  const auto possible = [&](float x) { return x != -INFINITY && !(x < cut); };
  float rough[kEach], best = -INFINITY;
  PhiloxWords words;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t token = token_at<kSize>(begin, i);
    if (i % 4 == 0) words = words_at(token);
    rough[i] = possible(logits[i]) ? logits[i] - temperature * rough_noise(words.word[i % 4]) : -INFINITY;
    best = rough[i] > best ? rough[i] : best;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) best = fmaxf(best, __shfl_xor_sync(kAll, best, lanes));
  // Twice the error of rough scores: from the noise, and from the rounding of numbers of this size.
  best -= 5e-5f * temperature + 1e-6f * fabsf(best);
  Drawn drawn{0, 0};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!possible(logits[i]) || rough[i] < best) continue;
    const int64_t token = token_at<kSize>(begin, i);
    drawn.join(draw_score(logits[i], args.temperature, words_at(token).word[token % 4]), token_key(logits[i], token));
  }
  return warp_winner(drawn);
}

struct Room {
  uint64_t top[kWarps][kMaxTopK];
  DistributionSums sums[kWarps];
  Drawn drawn[kWarps];
};

template <class T, bool kPacks, bool kDraws>
__global__ void __launch_bounds__(kThreads) token_part_kernel(const __grid_constant__ TokenStatisticsArgs args) {
  constexpr int kSize = 16 / sizeof(T);
  __shared__ Room room;
  const unsigned num_parts = static_cast<unsigned>(args.num_parts());
  const int64_t r = blockIdx.x / num_parts, source = args.source(r), begin = blockIdx.x % num_parts * kVocabularyPart;
  if (source < 0) return;
  const int64_t end = begin + kVocabularyPart < args.width ? begin + kVocabularyPart : args.width;
  const float cut = args.filtered() ? args.cuts[r] : -INFINITY;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float logits[kEach];
  load_share<T, kPacks>(args, args.logits.row<const T>(source), begin, end, args.sampling ? cut : -INFINITY, logits);

  // A thread's first token: on ties the one it reads first, whose id is the lowest.
  const auto first_of = [&] {
    uint32_t rank = 0;
    int place = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t other = static_cast<uint32_t>(token_key(logits[i], 0) >> 32);
      if (other > rank) rank = other, place = i;
    }
    return rank == 0 ? uint64_t{0}
                     : static_cast<uint64_t>(rank) << 32 |
                           (0xffffffffu - static_cast<uint32_t>(token_at<kSize>(begin, place)));
  };
  const uint64_t head = first_of();
  const float largest = key_logit(warp_largest(head));

  const double inverse = args.inverse();
  const float shift = largest == -INFINITY ? 0.0f : largest, slope = static_cast<float>(inverse),
              rest = args.inverse_rest();
  // Floats of four neighbours, doubles beyond: the largest term is 1, and what is added to it one by one is rounded as
  // often.
  double total = 0, weighted = 0;
#pragma unroll
  for (int first = 0; first < kEach; first += 4) {
    float few = 0, few_weighted = 0;
#pragma unroll
    for (int i = first; i < first + 4; ++i) {
      const float near = (logits[i] - shift) * slope, distance = near < -1e3f ? -1e3f : near,
                  x = distance + distance * rest, e = expf(x);
      few += e;
      few_weighted += x * e;
    }
    total += few, weighted += few_weighted;
  }
  const DistributionSums sums{largest, warp_sum(total), warp_sum(weighted)};
  Drawn drawn{0, 0};
  if constexpr (kDraws) drawn = draw<kSize>(args, r, begin, cut, logits);
  // Last, because found tokens are removed.
  const uint64_t top = warp_first(args.num_ranked(), head, [&](uint64_t found) {
    const unsigned token = static_cast<unsigned>(key_id(found) - begin),
                   taken = token / (kThreads * kSize) * kSize + token % kSize;
#pragma unroll
    for (int i = 0; i < kEach; ++i) logits[i] = i == static_cast<int>(taken) ? -INFINITY : logits[i];
    return first_of();
  });
  if (lane < kMaxTopK) room.top[warp][lane] = top;
  if (lane == 0) room.sums[warp] = sums, room.drawn[warp] = drawn;
  __syncthreads();

  if (warp != 0) return;
  TokenPart& part = args.parts[blockIdx.x];
  const bool some = lane < kWarps;
  int place = 0;
  const uint64_t first = warp_first(args.num_ranked(), some ? room.top[lane][0] : 0,
                                    [&](uint64_t) { return ++place < kMaxTopK ? room.top[lane][place] : 0; });
  const DistributionSums all = warp_joined(some ? room.sums[lane] : DistributionSums{-INFINITY, 0, 0}, inverse);
  const Drawn winner = warp_winner(some ? room.drawn[lane] : Drawn{0, 0});
  bool undefined = some && room.sums[lane].total != room.sums[lane].total;
  undefined = __any_sync(kAll, undefined);
  if (lane < kMaxTopK) part.top[lane] = first;
  if (lane == 0) part.sums = all, part.drawn = winner.key, part.score = winner.score, part.undefined = undefined;
}

// --- a row: a warp merges its parts

__global__ void __launch_bounds__(32) token_row_kernel(const __grid_constant__ TokenStatisticsArgs args) {
  const int64_t r = blockIdx.x, num_parts = args.source(r) < 0 ? 0 : args.num_parts();
  const int lane = threadIdx.x, top_k = args.top_k, ranked = args.num_ranked();
  const TokenPart* parts = args.parts + r * args.num_parts();
  const double inverse = args.inverse();
  uint64_t top = 0;  // the i-th token of the row in lane i
  DistributionSums sums{-INFINITY, 0, 0};
  Drawn drawn{0, 0};
  bool undefined = false;
  for (int64_t c = 0; c < num_parts; c += 32) {
    const bool some = c + lane < num_parts;
    const TokenPart& part = parts[some ? c + lane : 0];
    // What was found so far goes on as one more key a lane: the larger of it and of the part's is the lane's next one.
    uint64_t found = lane < kMaxTopK ? top : 0, offered = some ? part.top[0] : 0;
    int place = 0;
    top = warp_first(ranked, found > offered ? found : offered, [&](uint64_t key) {
      if (key == found) found = 0;
      if (key == offered) offered = ++place < kMaxTopK ? part.top[place] : 0;
      return found > offered ? found : offered;
    });
    sums.join(warp_joined(some ? part.sums : DistributionSums{-INFINITY, 0, 0}, inverse), inverse,
              [](double x) { return exp(x); });
    if (some) drawn.join(part.score, part.drawn);
    undefined = undefined || (some && part.undefined);
  }
  drawn = warp_winner(drawn);
  undefined = __any_sync(kAll, undefined);

  const uint64_t first = __shfl_sync(kAll, top, 0), second = __shfl_sync(kAll, top, 1);
  const uint64_t chosen = args.draws() && !undefined ? drawn.key : first;
  const bool missing = first == 0;
  const auto probability = [&](uint64_t key) -> float {
    if (undefined) return NAN;
    return key == 0
               ? 0.0f
               : static_cast<float>(exp((static_cast<double>(key_logit(key)) - sums.largest) * inverse) / sums.total);
  };
  // After the possible tokens come the others, the lowest id first.
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
  args.logsumexp[r] = missing ? -INFINITY : number(sums.largest * inverse + log(sums.total));
  args.margin[r] = number((0 - expm1((static_cast<double>(key_logit(second)) - sums.largest) * inverse)) / sums.total);
}

}  // namespace

cudaError_t token_statistics(const TokenStatisticsArgs& args, cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(args.rows)), parts(static_cast<unsigned>(args.rows * args.num_parts()));
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kSize = 16 / sizeof(T);
    const bool packs = args.width % kSize == 0 && in_packs<T>(args.logits);
    if (args.filtered() && packs) PDK_LAUNCH((token_cut_kernel<T, kSize>), rows, dim3(kCutThreads), 0, stream, args);
    if (args.filtered() && !packs) PDK_LAUNCH((token_cut_kernel<T, 1>), rows, dim3(kCutThreads), 0, stream, args);
    if (packs && args.draws()) PDK_LAUNCH((token_part_kernel<T, true, true>), parts, dim3(kThreads), 0, stream, args);
    if (packs && !args.draws()) PDK_LAUNCH((token_part_kernel<T, true, false>), parts, dim3(kThreads), 0, stream, args);
    if (!packs && args.draws()) PDK_LAUNCH((token_part_kernel<T, false, true>), parts, dim3(kThreads), 0, stream, args);
    if (!packs && !args.draws())
      PDK_LAUNCH((token_part_kernel<T, false, false>), parts, dim3(kThreads), 0, stream, args);
  });
  PDK_LAUNCH(token_row_kernel, rows, dim3(32), 0, stream, args);
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
