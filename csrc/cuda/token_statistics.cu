// Vocabulary statistics on CUDA: one kernel for all rows. With filters of the distribution, another one first finds the
// logits that pass them; before that, one writes rows whose logits are filtered themselves.
#include "logit_filters.h"
#include "token_cut.h"
#include "token_rows.h"

namespace pdkernels::cuda {
namespace {

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
void launch_rows(const TokenStatisticsArgs& args, cudaStream_t stream) {
  const auto kernel = token_row_kernel<T, kPacks, kDraws>;
  const int64_t regions = (args.width + kRegion - 1) / kRegion;
  const unsigned blocks = blocks_of_row(kernel, args.rows, regions, kResident<T>);
  const dim3 grid(static_cast<unsigned>(args.rows * blocks));
  PDK_LAUNCH_CLUSTERS(kernel, blocks, grid, dim3(kRowThreads), 0, stream, args);
}

template <class T, bool kPacks>
void launch(const TokenStatisticsArgs& args, cudaStream_t stream) {
  constexpr int kSize = kPacks ? 16 / sizeof(T) : 1;
  const dim3 rows(static_cast<unsigned>(args.rows));
  if (args.filtered()) PDK_LAUNCH((token_cut_kernel<T, kSize>), rows, dim3(kCutThreads), 0, stream, args);
  if (args.samples_token()) {
    launch_rows<T, kPacks, true>(args, stream);
  } else {
    launch_rows<T, kPacks, false>(args, stream);
  }
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
      launch<T, true>(args, stream);
    } else {
      launch<T, false>(args, stream);
    }
  });
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
