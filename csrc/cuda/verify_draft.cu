// Greedy draft verification on CUDA: one block per sequence, one warp per candidate, 32 positions per ballot.
#include "launch.h"
#include "ops/verify_draft.h"

namespace pdkernels::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr unsigned kAllLanes = 0xffffffffu;

// The first position in [0, count) for which `stop` holds, or count. Called by a whole warp; every lane gets the
// answer.
template <class Stop>
__device__ int64_t warp_first(int64_t count, const Stop& stop) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t start = 0; start < count; start += kWarp) {
    const int64_t i = start + lane;
    const unsigned hits = __ballot_sync(kAllLanes, i < count && stop(i));
    if (hits != 0) return start + __ffs(hits) - 1;
  }
  return count;
}

__global__ void __launch_bounds__(kWarps* kWarp) verify_draft_kernel(VerifyArgs args) {
  __shared__ int64_t counts[kWarps];
  __shared__ int64_t winners[kWarps];
  const int64_t b = blockIdx.x;
  const int warp = threadIdx.x / kWarp;
  const int64_t length = args.length(b);

  int64_t count = 0;
  int64_t winner = 0;
  for (int64_t c = warp; c < args.candidates && length > 0; c += kWarps) {
    const int64_t matched = 1 + warp_first(length - 1, [&](int64_t i) { return !args.matches(b, c, i); });
    if (matched > count) {
      count = matched;
      winner = c;
    }
  }
  if (threadIdx.x % kWarp == 0) {
    counts[warp] = count;
    winners[warp] = winner;
  }
  __syncthreads();
  // Every thread reduces the few warps itself: longest wins, lowest candidate on ties.
  count = counts[0];
  winner = winners[0];
  for (int w = 1; w < kWarps; ++w) {
    if (counts[w] > count || (counts[w] == count && count > 0 && winners[w] < winner)) {
      count = counts[w];
      winner = winners[w];
    }
  }
  // All warps do the same search, so that every thread knows where the new draft begins without another barrier.
  const int64_t first_end = warp_first(count, [&](int64_t i) { return args.is_end(args.draft.load(b, winner, i)); });
  if (threadIdx.x == 0) args.write_verdict(b, winner, count, first_end);
  const int64_t kept = first_end < count ? first_end + 1 : count;
  for (int64_t j = threadIdx.x; j < args.width; j += kWarps * kWarp) {
    args.new_draft[b * args.width + j] = args.new_draft_token(b, winner, kept, length, j);
  }
}

}  // namespace

cudaError_t verify_draft(const VerifyArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  PDK_LAUNCH(verify_draft_kernel, dim3(static_cast<unsigned>(args.batch)), dim3(kWarps * kWarp), 0, stream, args);
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
