// Lengths of drafts on CUDA: one block, whose threads count a sequence each. One thread chooses: it compares a few
// hundred numbers.
#include "launch.h"
#include "ops/draft_lengths.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 64;

__global__ void __launch_bounds__(kThreads) draft_lengths_kernel(DraftLengthsArgs args) {
  PDK_DYNAMIC_SHARED(double, memory);
  for (int64_t b = threadIdx.x; b < args.batch; b += kThreads) args.count(b);
  __syncthreads();
  if (threadIdx.x == 0) args.choose(args.memory(memory));
}

}  // namespace

cudaError_t draft_lengths(const DraftLengthsArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  const size_t bytes = static_cast<size_t>(args.memory_bytes());
  PDK_LAUNCH(draft_lengths_kernel, dim3(1), dim3(kThreads), bytes, stream, args);
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
