// Committing guesses on CUDA: one block per segment. The last key to accept is found bit by bit from the top, by
// counting the keys at or above a threshold. That takes as many passes as a key has bits, regardless of the number of
// keys, and needs no memory but the keys themselves.
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
    bad = bad || !args.window_fits(b, g) || args.quota.load(b, g) < 0 || args.need.load(b, g) < 0;
    for (int64_t h = 0; h < g && !bad; ++h) bad = args.overlap(b, g, h);
  }
  for (int64_t r = threadIdx.x; args.positions.given() && r < args.candidates; r += kThreads)
    bad = bad || !args.position_fits(b, r);
  return __syncthreads_or(bad) != 0;
}

// The largest key for which `holds(key, number of keys that reach it)`, which is true up to some key and false after
// it; 0 if it never is. Or some key that exactly `enough` reach.
template <class Reaching, class Holds>
__device__ uint64_t last_that(int low_bits, int enough, const Reaching& reaching, const Holds& holds) {
  uint64_t found = 0;
  for (int bit = 63; bit >= 0; --bit) {
    if (bit == 31) bit = low_bits - 1;  // of the lower half
    const uint64_t next = found | uint64_t{1} << bit;
    const int reached = reaching(next);
    if (reached == enough) return next;
    if (holds(next, reached)) found = next;
  }
  return found;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    unmask_kernel(const __grid_constant__ UnmaskArgs args, int64_t staged_keys) {
  PDK_DYNAMIC_SHARED(uint64_t, keys);  // [staged_keys]; a thread reads only what it wrote
  __shared__ int room[kThreads / 32];
  const int64_t b = blockIdx.x / args.segments, g = blockIdx.x % args.segments;
  const bool bad = unfit(args, b);
  int64_t start = args.start(b, g), end = args.end(b, g);
  if (bad) {
    start = start < 0 ? 0 : start;
    end = end > args.length ? args.length : end;
  }
  int own = 0;
  for (int64_t p = start + threadIdx.x; p < end; p += kThreads) own += args.tokens.load(b, p) == args.mask_token;
  const int masks = block_sum<kThreads>(own, room);
  if (bad) {
    if (threadIdx.x == 0) args.write(b, g, 0, masks);
    return;
  }

  const bool placed = args.positions.given();
  const int64_t first = placed ? 0 : start, count = placed ? args.candidates : end - start;
  const bool staged = count <= staged_keys;
  for (int64_t i = threadIdx.x; staged && i < count; i += kThreads) keys[i] = args.key(b, first + i, start, end);
  const auto key_at = [&](int64_t i) { return staged ? keys[i] : args.key(b, first + i, start, end); };
  const auto reaching = [&](uint64_t bar) {
    int own = 0;
    for (int64_t i = threadIdx.x; i < count; i += kThreads) own += key_at(i) >= bar;
    return block_sum<kThreads>(own, room);
  };

  int low_bits = 1;
  while (low_bits < 32 && args.candidates >> low_bits != 0) ++low_bits;
  const int m = reaching(1);
  uint64_t bar = 1;
  int64_t n = m;
  if (args.rule == UnmaskRule::kFactor) {
    const uint64_t failing =
        last_that(low_bits, -1, reaching, [&](uint64_t key, int reached) { return args.fails(key, reached); });
    n = args.count(m, reaching(failing + 1));
    if (n < m) bar = failing + 1;
  } else {
    const bool has_bar = args.rule == UnmaskRule::kThreshold;
    const int passing = has_bar ? reaching(args.bar) : 0;
    n = args.count(b, g, m, passing);
    if (has_bar && n == passing) bar = args.bar;
    else if (n == 0) bar = ~uint64_t{0};
    else if (n < m)
      bar = last_that(low_bits, static_cast<int>(n), reaching, [&](uint64_t, int reached) { return reached >= n; });
  }
  // Every thread has computed its keys: from here on tokens change.
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t key = key_at(i);
    if (key >= bar) args.commit(b, key);
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
