// Filtered logits on CUDA, a piece of a row per block.
#include "launch.h"
#include "logit_filters.h"
#include "ops/filter_logits.h"

namespace pdkernels::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kFilterThreads) filter_logits_kernel(const __grid_constant__ FilterLogitsArgs args) {
  const int64_t pieces = (args.width + kFilterPiece - 1) / kFilterPiece;
  const int64_t r = blockIdx.x / pieces, begin = blockIdx.x % pieces * kFilterPiece;
  filter_piece(args.filters, r, args.logits.row<const T>(r), begin, args.width, args.out + r * args.width);
}

}  // namespace

cudaError_t filter_logits(const FilterLogitsArgs& args, cudaStream_t stream) {
  const int64_t pieces = (args.width + kFilterPiece - 1) / kFilterPiece;
  const dim3 blocks(static_cast<unsigned>(args.rows * pieces));
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    PDK_LAUNCH(filter_logits_kernel<T>, blocks, dim3(kFilterThreads), 0, stream, args);
  });
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
