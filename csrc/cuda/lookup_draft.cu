// Lookup drafts on CUDA: one block per sequence, whose threads share the places.
#include "launch.h"
#include "ops/lookup_draft.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The largest value of a block, for every thread. `scratch` is used once.
__device__ int64_t block_max(int64_t value, int64_t* scratch) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const int64_t other = __shfl_xor_sync(0xffffffffu, value, lanes);
    value = other > value ? other : value;
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) value = scratch[w] > value ? scratch[w] : value;
  return value;
}

__global__ void __launch_bounds__(kThreads) lookup_draft_kernel(LookupDraftArgs args) {
  __shared__ int64_t bests[kWarps];
  __shared__ int64_t stops[kWarps];
  const int64_t b = blockIdx.x;
  // The same for every thread of the block. Lengths above `slots` only mean more room than there is.
  if (args.draft_lengths.load(b) <= 0 || !args.has_end(b)) return;
  const SearchedTokens text = args.searched(b);
  const int64_t tail = text.tail(args.reach);

  // Length, then place, as one number: lengths and places are at most `width`.
  int64_t best = 0;
  for (int64_t place = 1 + threadIdx.x; place <= text.end && tail > 0; place += kThreads) {
    if (text.tokens[place - 1] != text.known) continue;
    const int64_t length = text.matched(place, tail);
    const int64_t key = length > 0 ? length * (args.width + 1) + place : 0;
    best = key > best ? key : best;
  }
  best = block_max(best, bests);
  const int64_t place = best % (args.width + 1);
  const int64_t most = args.most(best / (args.width + 1));

  int64_t found = most;
  for (int64_t i = threadIdx.x; i < found; i += kThreads) {
    if (text.guess(place, i) == -1) found = i;
  }
  found = -block_max(-found, stops);  // the least of the block
  for (int64_t i = threadIdx.x; i < args.slots - 1; i += kThreads) {
    args.write_guess(b, i, i < found ? text.guess(place, i) : 0);
  }
  // Behind both barriers: no thread reads a length or an end any more.
  if (threadIdx.x == 0) args.finish(b, found);
}

}  // namespace

cudaError_t lookup_draft(const LookupDraftArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  PDK_LAUNCH(lookup_draft_kernel, dim3(static_cast<unsigned>(args.batch)), dim3(kThreads), 0, stream, args);
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
