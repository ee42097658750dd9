// The blocks of a sequence's rows, and the check of the sequence that every block makes.
//
// A bad sequence is left unchanged as a whole, so every block has to check all of its rows. The number of blocks is
// bounded, which keeps the checks linear in the rows; a block may process several rows.
#pragma once

#include "common/cache_layout.h"

namespace pdkernels::cuda {

inline unsigned row_blocks(int64_t rows, int64_t max_blocks) {
  return static_cast<unsigned>(rows < max_blocks ? rows : max_blocks);
}

// Whether `fine(i)` holds for all i below `count`, computed by the whole block. Unrolled, so that several loads are in
// flight.
template <class Fine>
__device__ bool all_fine(int64_t count, const Fine& fine) {
  bool all = true;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) all &= fine(i);
  return __syncthreads_and(all);
}

// Whether the pages of `count` positions exist, computed by the whole block. Always true for a contiguous cache.
__device__ inline bool pages_exist(const PageMap& pages, int64_t b, int64_t start, int64_t count) {
  if (!pages.block_table.given() || count <= 0) return true;
  const int64_t first = start / pages.page_size, last = (start + count - 1) / pages.page_size;
  return all_fine(last - first + 1, [&](int64_t i) {
    const int64_t page = pages.block_table.load(b, first + i);
    return page >= 0 && page < pages.num_pages;
  });
}

}  // namespace pdkernels::cuda
