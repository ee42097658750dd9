// Lengths of drafts on CUDA: a thread per sequence.
#include "launch.h"
#include "ops/draft_lengths.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 32;

__global__ void __launch_bounds__(kThreads) draft_lengths_kernel(DraftLengthsArgs args) {
  const int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (b < args.batch) args.choose(b);
}

}  // namespace

cudaError_t draft_lengths(const DraftLengthsArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((args.batch + kThreads - 1) / kThreads);
  PDK_LAUNCH(draft_lengths_kernel, dim3(blocks), dim3(kThreads), 0, stream, args);
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
