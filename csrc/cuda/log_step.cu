// Logs a step's entry on CUDA and sets the condition of a graph's conditional node: one block.
#include "launch.h"
#include "ops/log_step.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    log_step_kernel(LogStepArgs args, bool conditional, cudaGraphConditionalHandle handle) {
  const int64_t at = *args.count;
  const bool fits = args.has_room(at);
  const int64_t size = args.size();
  for (int64_t i = threadIdx.x; fits && i < size; i += kThreads) args.log[at * size + i] = args.entry[i];
  bool mine = false;
  for (int64_t b = threadIdx.x; b < args.batch; b += kThreads) mine |= args.active(b);
  // Also the barrier after which no thread reads the count.
  const bool any = __syncthreads_or(mine) != 0;
  if (threadIdx.x != 0) return;
  const bool more = fits && args.continues(at, any);
  if (fits) *args.count = at + 1;
  *args.more = more;
  if (conditional) cudaGraphSetConditional(handle, more ? 1 : 0);
}

}  // namespace

cudaError_t log_step(const LogStepArgs& args, cudaStream_t stream) {
  PDK_LAUNCH(log_step_kernel, dim3(1), dim3(kThreads), 0, stream, args, args.conditional,
             static_cast<cudaGraphConditionalHandle>(args.handle));
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
