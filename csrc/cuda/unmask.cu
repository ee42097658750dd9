// Committing guesses on CUDA: one block per segment. The smallest key to accept is found bit by bit from the top, by
// counting the keys at or above a threshold. That takes one pass per bit, regardless of the number of keys, and no
// memory except for the keys.
#include "elements.h"
#include "launch.h"
#include "ops/unmask.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 2;        // by default ptxas aims for more and spills
constexpr int64_t kStagedKeys = 5120;  // 40 KiB of shared memory; keys of a longer list are recomputed in every pass

// Whether a sequence has invalid values; every thread of the block gets the answer.
__device__ bool unfit(const UnmaskArgs& args, int64_t b) {
  bool bad = false;
  for (int64_t g = threadIdx.x; g < args.segments; g += kThreads) {
    bad = bad || !args.window_fits(b, g) || args.quota.load(b, g) < 0 || args.min_count.load(b, g) < 0;
    for (int64_t h = 0; h < g && !bad; ++h) bad = args.overlap(b, g, h);
  }
  for (int64_t r = threadIdx.x; args.positions.given() && r < args.candidates; r += kThreads)
    bad = bad || !args.position_fits(b, r);
  return __syncthreads_or(bad) != 0;
}

// The largest key for which `holds(key, number of keys at or above it)`, 0 if there is none. `holds` is true up to some
// key and false above it. The search may end early at a key that exactly `enough` keys reach.
template <class Reaching, class Holds>
__device__ uint64_t last_that(int low_bits, int enough, const Reaching& count_from, const Holds& holds) {
  uint64_t found = 0;
  for (int bit = 63; bit >= 0; --bit) {
    if (bit == 31) bit = low_bits - 1;  // continues in the lower half
    const uint64_t next = found | uint64_t{1} << bit;
    const int reaching = count_from(next);
    if (reaching == enough) return next;
    if (holds(next, reaching)) found = next;
  }
  return found;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    unmask_kernel(const __grid_constant__ UnmaskArgs args, int64_t staged_keys) {
  PDK_DYNAMIC_SHARED(uint64_t, keys);  // [staged_keys]; a thread reads only what it wrote
  __shared__ int warp_sums[kThreads / 32];
  const int64_t b = blockIdx.x / args.segments, g = blockIdx.x % args.segments;
  const bool bad = unfit(args, b);
  int64_t start = args.start(b, g), end = args.end(b, g);
  if (bad) {
    start = start < 0 ? 0 : start;
    end = end > args.length ? args.length : end;
  }
  int own = 0;
  for (int64_t p = start + threadIdx.x; p < end; p += kThreads) own += args.tokens.load(b, p) == args.mask_token;
  const int masks = block_sum<kThreads>(own, warp_sums);
  if (bad) {
    if (threadIdx.x == 0) args.write(b, g, 0, masks);
    return;
  }

  const bool has_positions = args.positions.given();
  const int64_t first = has_positions ? 0 : start, count = has_positions ? args.candidates : end - start;
  const bool staged = count <= staged_keys;
  for (int64_t i = threadIdx.x; staged && i < count; i += kThreads) keys[i] = args.key(b, first + i, start, end);
  const auto key_at = [&](int64_t i) { return staged ? keys[i] : args.key(b, first + i, start, end); };
  const auto count_from = [&](uint64_t min_key) {
    int own = 0;
    for (int64_t i = threadIdx.x; i < count; i += kThreads) own += key_at(i) >= min_key;
    return block_sum<kThreads>(own, warp_sums);
  };

  int low_bits = 1;
  while (low_bits < 32 && args.candidates >> low_bits != 0) ++low_bits;
  const int m = count_from(1);
  uint64_t min_key = 1;
  int64_t n = m;
  if (args.rule == UnmaskRule::kFactor) {
    const uint64_t failing =
        last_that(low_bits, -1, count_from, [&](uint64_t key, int reaching) { return args.fails(key, reaching); });
    n = args.count(m, count_from(failing + 1));
    if (n < m) min_key = failing + 1;
  } else {
    const bool has_threshold = args.rule == UnmaskRule::kThreshold;
    const int passing = has_threshold ? count_from(args.lowest_passing) : 0;
    n = args.count(b, g, m, passing);
    if (has_threshold && n == passing) min_key = args.lowest_passing;
    else if (n == 0) min_key = ~uint64_t{0};
    else if (n < m)
      min_key =
          last_that(low_bits, static_cast<int>(n), count_from, [&](uint64_t, int reaching) { return reaching >= n; });
  }
  // All keys are computed, so tokens may change from here on.
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t key = key_at(i);
    if (key >= min_key) args.commit(b, key);
  }
  if (threadIdx.x == 0) args.write(b, g, n, masks);
}

}  // namespace

cudaError_t unmask(const UnmaskArgs& args, cudaStream_t stream) {
  const int64_t blocks = args.batch * args.segments;
  if (blocks == 0) return cudaSuccess;
  const int64_t staged = args.candidates < kStagedKeys ? args.candidates : kStagedKeys;
  const size_t bytes = static_cast<size_t>(staged) * sizeof(uint64_t);
  PDK_LAUNCH(unmask_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), bytes, stream, args, staged);
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
